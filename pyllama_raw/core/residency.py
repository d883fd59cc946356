"""
Which models are in memory: what is loaded, what gives way, and whose requests run next.

Models are a cache. This file decides; who asks it does the moves, and tells it what came of them.

Rules:
1. The bytes of all models that load, are there, leave or sleep never exceed the budget, of any device.
2. A model gives way only while nobody uses it. What runs is never ended. A pinned model stays.
3. Requests of a model that is there run at once. All that wait for a model run together as soon as it
   is there, and until then it does not give way: a load belongs to those who wait for it.
4. A request that has waited `max_wait_s`, and at least as long as its model takes to load, or that
   `max_overtakes` later ones have overtaken, is *due*. Models in its way are *closed*: they let run what
   runs, and take nothing new until it has had its turn.
5. Next to load are models whose oldest request is due, the oldest first. Of the others next is the one
   whose client was charged least for loads so far; of equal ones the oldest.
6. What gives way is of little use for its bytes: the time that it takes to load again, for its share of
   the budget, counted from when it was last used (GreedyDual).
7. A model that failed to load rests, longer with each failure. Its requests end with the failure.
   So does one that dies again before it has served a request.

Source: Young, On-line file caching, SODA 1998, for rule 6.
"""

from __future__ import annotations

from bisect import bisect
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from pyllama_raw.errors import ModelTooLarge

Bytes = Mapping[str, int]  # by device; also numbers of anything else that has a limit
NOTHING: Bytes = {}
BYTES_PER_S = 10**9  # of a load that nobody has measured
FIRST_REST_S, MAX_REST_S = 1.0, 60.0  # after a failure, and after many


class ModelState(StrEnum):
    """Where a model is."""

    UNLOADED = "unloaded"
    """Nowhere: its first request loads it."""
    LOADING = "loading"
    """On its way into memory, or out of sleep."""
    LOADED = "loaded"
    """In memory."""
    LEAVING = "leaving"
    """On its way out, or to sleep."""
    SLEEPING = "sleeping"
    """Only what it held for requests is in host memory."""


class Move(StrEnum):
    """A change of where a model is."""

    LOAD = "load"
    """Load it, or wake it if it sleeps."""
    SLEEP = "sleep"
    """Put it to sleep."""
    UNLOAD = "unload"
    """Free all of it."""


@dataclass(slots=True, eq=False)
class Claim:
    """A request for a model, from when it comes until it leaves."""

    model: str
    client: str
    since: float
    number: int  # in the order in which they came
    n_overtaken: int = 0  # later requests that ran before it
    is_running: bool = False


@dataclass(slots=True, eq=False)
class Resident:
    """A model, and where it is."""

    name: str
    need: Bytes
    """What it takes while it is loaded."""
    parked: Bytes = field(default_factory=dict)
    """What it takes while it sleeps."""
    is_pinned: bool = False
    """Whether it stays for others, and when it is idle."""
    sleep_s: float = inf
    """Seconds without use after which it sleeps."""
    unload_s: float = inf
    """Seconds without use after which it is unloaded."""
    state: ModelState = ModelState.UNLOADED
    sleeps: bool = False  # whether it wakes when it loads, or sleeps when it leaves
    occupies: Bytes = field(default_factory=dict)  # now
    waiting: deque[Claim] = field(default_factory=deque)
    n_running: int = 0
    keep_s: float | None = None  # in place of unload_s, as the latest request says
    used_at: float = 0.0
    load_s: float = 0.0  # as it was last measured
    value: float = 0.0  # of having it, by rule 6
    is_fresh: bool = False  # has not served those that it was loaded for
    is_to_leave: bool = False  # somebody said so
    is_closed: bool = False
    n_failures: int = 0
    n_deaths: int = 0  # since it served a request
    retry_at: float = -inf

    @property
    def is_idle(self) -> bool:
        """Whether nobody uses it or waits for it."""
        return not self.n_running and not self.waiting

    @property
    def cost_s(self) -> float:
        """Seconds that it takes to load."""
        return self.load_s or sum(self.need.values()) / BYTES_PER_S


@dataclass(frozen=True, slots=True)
class Turn:
    """What is to be done now."""

    run: tuple[Claim, ...]
    """Requests that may run."""
    moves: tuple[tuple[str, Move], ...]
    """Changes of models, to be begun at once."""


class Residency:
    """
    The models of a process, their room and those who wait for it.

    Args:
        budget: the most that all models may take, by device; without limit where none is named.
    """

    def __init__(
        self, budget: Bytes, *, max_wait_s: float = 10.0, max_overtakes: int = 64
    ) -> None:
        self.budget = dict(budget)
        self.models: dict[str, Resident] = {}
        self._max_wait_s, self._max_overtakes = max_wait_s, max_overtakes
        self._n_claims = 0
        self._decided_at = -inf
        self._age = 0.0  # the value of what gave way last, which others count from
        self._charges: dict[str, float] = {}  # seconds of loads for each client

    # -- what happens ---------------------------------------------------------

    def add(self, model: Resident) -> None:
        """Have a model, of a name that no other has."""
        assert model.name not in self.models
        self.models[model.name] = model

    def enter(self, name: str, now: float, client: str = "") -> Claim:
        """
        A request for the model *name*, which waits until decide() lets it run.

        Raises:
            ModelTooLarge: the budget has no room for it, whatever gives way.
        """
        model = self.models[name]
        self._check_size(model)
        # Nobody saves up by being idle: who comes back counts from the least of those who are here.
        here = {
            claim.client for other in self.models.values() for claim in other.waiting
        }
        if here and client not in here:
            least = min(self._charges.get(other, 0.0) for other in here)
            self._charges[client] = max(self._charges.get(client, 0.0), least)
        elif not here:
            self._charges.clear()
        self._n_claims += 1
        claim = Claim(name, client, now, self._n_claims)
        model.waiting.append(claim)
        return claim

    def leave(self, claim: Claim, now: float, keep_s: float | None = None) -> None:
        """
        End a request that runs or waits.

        Args:
            keep_s: seconds without use after which the model is unloaded. None: as it was.
        """
        model = self.models[claim.model]
        if claim.is_running:
            claim.is_running = False
            model.n_running -= 1
            model.used_at = now
            model.keep_s = model.keep_s if keep_s is None else keep_s
            if not model.is_to_leave:
                model.n_deaths = 0
        elif claim in model.waiting:  # it may have ended with a failure
            model.waiting.remove(claim)

    def loaded(self, name: str, now: float, load_s: float) -> None:
        """Take in that a load has ended, which took *load_s* seconds."""
        model = self.models[name]
        model.state, model.sleeps = ModelState.LOADED, False
        model.occupies = model.need
        model.used_at, model.load_s = now, max(load_s, 1e-6)
        model.value = self._value(model)
        model.is_fresh = bool(model.waiting)
        model.n_failures, model.retry_at = 0, -inf

    def failed(self, name: str, now: float) -> tuple[Claim, ...]:
        """Take in that a load has failed, and give those who waited for it, who wait no more."""
        model = self.models[name]
        is_asleep = model.sleeps
        model.state = ModelState.SLEEPING if is_asleep else ModelState.UNLOADED
        model.occupies = model.parked if is_asleep else NOTHING
        model.n_failures += 1
        model.is_to_leave &= is_asleep  # what is to leave leaves from its sleep, too
        model.retry_at = now + _rest_s(model.n_failures)
        return self.dismiss(name)

    def died(self, name: str, now: float) -> None:
        """
        Take in that a model has ended by itself: it leaves once its requests have seen that.

        The first time it may be loaded again at once; if it dies again before it has served a
        request, it rests, longer each time.
        """
        model = self.models[name]
        self.unload(name)
        model.n_deaths += 1
        if model.n_deaths > 1:
            model.retry_at = now + _rest_s(model.n_deaths - 1)

    def gave_up(self, name: str) -> None:
        """Take in that a load was ended before its time, because nobody waits for it."""
        model = self.models[name]
        model.state = ModelState.SLEEPING if model.sleeps else ModelState.UNLOADED
        model.occupies = model.parked if model.sleeps else NOTHING
        model.is_to_leave &= model.sleeps

    def gone(self, name: str, *, asleep: bool = False) -> None:
        """Take in that a model has left, or sleeps."""
        model = self.models[name]
        model.state = ModelState.SLEEPING if asleep else ModelState.UNLOADED
        model.occupies = model.parked if asleep else NOTHING
        model.sleeps, model.keep_s = asleep, None
        model.is_to_leave &= asleep  # somebody said so while it went to sleep

    def stayed(self, name: str) -> None:
        """Take in that a model could not be put to sleep, which is not tried again."""
        model = self.models[name]
        model.state, model.sleeps = ModelState.LOADED, False
        model.occupies, model.sleep_s = model.need, inf

    def dismiss(self, name: str) -> tuple[Claim, ...]:
        """All who wait for a model, and wait no more."""
        model = self.models[name]
        claims = tuple(model.waiting)
        model.waiting.clear()
        return claims

    def unload(self, name: str) -> None:
        """Have a model leave as soon as nobody uses it; those who wait then load it again."""
        model = self.models[name]
        model.is_to_leave = model.state is not ModelState.UNLOADED

    def forget(self, name: str) -> None:
        """Have no such model any more, which is nowhere and has no requests."""
        model = self.models.pop(name)
        assert model.state is ModelState.UNLOADED
        assert model.is_idle

    # -- what is to be done ---------------------------------------------------

    def decide(self, now: float) -> Turn:
        """
        Who may run, and which moves begin, as of now.

        Call it after each of the above, and at next_time().
        """
        self._decided_at = now
        moves = [*self._partings(now)]
        closed = self._make_room(now, moves)
        run: list[Claim] = []
        for model in self.models.values():
            # Whoever waited for the load runs, whatever else is due.
            model.is_closed = model.name in closed or model.is_to_leave
            if model.state is not ModelState.LOADED:
                continue
            if model.is_closed and not model.is_fresh:
                continue
            if model.waiting:
                run += model.waiting
                model.n_running += len(model.waiting)
                model.waiting.clear()
                model.used_at, model.value = now, self._value(model)
                model.keep_s = None
            model.is_fresh = False
        for claim in run:
            claim.is_running = True
        self._count_overtakes(run)
        return Turn(tuple(run), tuple(moves))

    def next_time(self, now: float) -> float:
        """
        When decide() may say something else, although nothing happens; inf: never.

        It is *now* if that time went by since the latest decision, as in a process that was busy.
        """
        times = [inf]
        for model in self.models.values():
            if model.waiting and model.state is not ModelState.LOADED:
                times.append(model.waiting[0].since + self._patience_s(model))
            if model.is_idle and not model.is_pinned:
                if model.state is ModelState.LOADED:
                    times += [model.used_at + model.sleep_s, _unload_at(model)]
                elif model.state is ModelState.SLEEPING:
                    times.append(_unload_at(model))
        return max(min(time for time in times if time > self._decided_at), now)

    def free(self) -> dict[str, int]:
        """What no model takes, of each device that has a limit."""
        return _less(self.budget, (model.occupies for model in self.models.values()))

    def check_invariants(self) -> None:
        """Assert the rules that must hold at any time."""
        assert all(n >= 0 for n in self.free().values()), "the budget is exceeded"
        for model in self.models.values():
            assert model.n_running >= 0
            assert not model.n_running or model.state is ModelState.LOADED

    # -- inside ---------------------------------------------------------------

    def _check_size(self, model: Resident) -> None:
        """Raise ModelTooLarge if *model* can never be loaded beside those that are pinned."""
        pinned = (
            m.need for m in self.models.values() if m.is_pinned and m is not model
        )
        room = _less(self.budget, pinned)
        for place, n_bytes in model.need.items():
            if n_bytes > room.get(place, n_bytes):
                raise ModelTooLarge(model.name, place, n_bytes, room[place])

    def _partings(self, now: float) -> Iterator[tuple[str, Move]]:
        """Moves of models that leave or sleep without being in anybody's way."""
        for model in self.models.values():
            is_there = model.state in (ModelState.LOADED, ModelState.SLEEPING)
            if not is_there or model.n_running:
                continue
            may_rest = model.is_idle and not model.is_pinned
            is_awake = model.state is ModelState.LOADED
            if model.is_to_leave or (may_rest and now >= _unload_at(model)):
                yield self._begin(model, Move.UNLOAD)
            elif is_awake and may_rest and now >= model.used_at + model.sleep_s:
                # What it holds for requests is in memory twice for a moment.
                fits = _fits(model.parked, self.free())
                yield self._begin(model, Move.SLEEP if fits else Move.UNLOAD)

    def _make_room(self, now: float, moves: list[tuple[str, Move]]) -> set[str]:
        """Begin loads, and what they need; the names of models that are closed."""
        closed: set[str] = set()
        room = self.free()  # now
        soon = dict(room)  # once all has left that leaves
        for model in self.models.values():
            if model.state is ModelState.LEAVING:
                _add(soon, model.occupies, 1)
                _add(soon, model.parked if model.sleeps else NOTHING, -1)
        for model, is_due in self._order(now):
            # There is room, or there will be as soon as others have left.
            if _fits(model.need, room):
                self._charge(model)
                moves.append(self._begin(model, Move.LOAD))
            elif not _fits(model.need, soon):
                victims = self._victims(model, soon, closed, may_close=is_due)
                # It may not disturb anybody yet: smaller models may have their turn before it.
                if victims is None:
                    continue
                if any(victim.n_running for victim in victims):
                    closed |= {victim.name for victim in victims}
                else:
                    moves += [self._begin(victim, Move.UNLOAD) for victim in victims]
                for victim in victims:
                    _add(soon, victim.occupies, 1)
            # Nobody else gets the room that it waits for.
            _add(room, model.need, -1)
            _add(soon, model.need, -1)
        return closed

    def _order(self, now: float) -> list[tuple[Resident, bool]]:
        """Models that are to be loaded, the next first, and whether each is due."""
        waiting = [
            model
            for model in self.models.values()
            if model.waiting
            and model.state in (ModelState.UNLOADED, ModelState.SLEEPING)
        ]

        def turn(model: Resident) -> tuple[bool, float, int]:
            head = model.waiting[0]
            is_due = self._is_due(model, now)
            return (
                not is_due,
                0.0 if is_due else self._charges.get(head.client, 0.0),
                head.number,
            )

        return [
            (model, self._is_due(model, now)) for model in sorted(waiting, key=turn)
        ]

    def _victims(
        self,
        model: Resident,
        soon: dict[str, int],
        closed: set[str],
        *,
        may_close: bool,
    ) -> list[Resident] | None:
        """The models whose room *model* gets, those that nobody uses first. None: there are none."""
        lacks = {
            p: n - soon[p] for p, n in model.need.items() if p in soon and n > soon[p]
        }
        candidates = [
            other
            for other in self.models.values()
            if other.state in (ModelState.LOADED, ModelState.SLEEPING)
            and other is not model
            and not (other.is_pinned or other.is_fresh or other.name in closed)
            and (may_close or other.is_idle)
            and any(other.occupies.get(place) for place in lacks)
        ]
        # Whom nobody uses; then who is closed already, because it has begun to get empty.
        candidates.sort(
            key=lambda m: (not m.is_idle, not m.is_closed, m.value, m.used_at)
        )
        victims: list[Resident] = []
        while any(n > 0 for n in lacks.values()):
            if not candidates:
                return None
            victims.append(candidates.pop(0))
            _add(lacks, victims[-1].occupies, -1)
        # The first ones may have been of no use beside a large one that came later.
        for victim in [*victims]:
            if all(
                n + victim.occupies.get(place, 0) <= 0 for place, n in lacks.items()
            ):
                victims.remove(victim)
                _add(lacks, victim.occupies, 1)
        return victims

    def _begin(self, model: Resident, move: Move) -> tuple[str, Move]:
        """Begin a move, whose room counts from now on."""
        if move is Move.LOAD:
            model.sleeps = model.state is ModelState.SLEEPING
            model.state = ModelState.LOADING
            model.occupies = _sum(model.need, model.occupies)
            return model.name, move
        model.sleeps = move is Move.SLEEP
        if model.sleeps:
            model.occupies = _sum(model.need, model.parked)
        else:
            self._age = max(self._age, model.value)
        model.state = ModelState.LEAVING
        return model.name, move

    def _is_due(self, model: Resident, now: float) -> bool:
        head = model.waiting[0]
        is_late = now >= head.since + self._patience_s(model)
        return is_late or head.n_overtaken >= self._max_overtakes

    def _patience_s(self, model: Resident) -> float:
        """Seconds that requests of *model* wait before they are due."""
        return max(self._max_wait_s, model.cost_s)

    def _count_overtakes(self, run: list[Claim]) -> None:
        """Count the requests that *run* before older ones, which wait for another model."""
        numbers = sorted(claim.number for claim in run)
        for model in self.models.values() if run else ():
            for claim in model.waiting:
                claim.n_overtaken += len(run) - bisect(numbers, claim.number)

    def _charge(self, model: Resident) -> None:
        """Charge the clients who wait for *model* for its load, in equal parts."""
        clients = {claim.client for claim in model.waiting}
        for client in clients:
            charge = self._charges.get(client, 0.0)
            self._charges[client] = charge + model.cost_s / len(clients)

    def _value(self, model: Resident) -> float:
        """The value of having *model*: from when it was used, its time to load for its room."""
        shares = [
            n / self.budget[p] for p, n in model.need.items() if self.budget.get(p)
        ]
        return self._age + model.cost_s / max([*shares, 1e-6])


def _rest_s(n_failures: int) -> float:
    """Seconds that a model rests after so many failures."""
    return min(FIRST_REST_S * float(2 ** min(n_failures - 1, 30)), MAX_REST_S)


def _unload_at(model: Resident) -> float:
    """When *model* is unloaded, if nobody uses it until then."""
    return model.used_at + (model.unload_s if model.keep_s is None else model.keep_s)


def _fits(need: Bytes, room: Bytes) -> bool:
    return all(n <= room[place] for place, n in need.items() if place in room)


def _sum(first: Bytes, second: Bytes) -> dict[str, int]:
    places = dict.fromkeys((*first, *second))
    return {place: first.get(place, 0) + second.get(place, 0) for place in places}


def _add(room: dict[str, int], need: Bytes, sign: int) -> None:
    """Add to *room* what it has a place for."""
    for place in room:
        room[place] += sign * need.get(place, 0)


def _less(room: Bytes, needs: Iterable[Bytes]) -> dict[str, int]:
    """*room* without all of *needs*."""
    left = dict(room)
    for need in needs:
        _add(left, need, -1)
    return left
