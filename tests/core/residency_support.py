"""A clock, models and requests that replay what residency decides; and what the least loads are."""

import heapq
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from math import inf

from pyllama_raw.core.residency import ModelState, Move, Residency, Resident


@dataclass
class Arrival:
    model: str
    at: float = 0.0
    serve_s: float = 1.0
    client: str = ""


@dataclass
class History:
    """What became of all requests."""

    n_loads: int = 0
    loads: list[str] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    n_served: int = 0
    most_bytes: int = 0
    ended_at: float = 0.0
    served: list[str] = field(default_factory=list)
    n_failed: int = 0


class Replay:
    """Requests that come at their times, or each when one of *n_streams* has ended."""

    def __init__(
        self,
        residency: Residency,
        arrivals: Sequence[Arrival],
        *,
        n_streams: int | None = None,
        load_s: float = 10.0,
        leave_s: float = 0.5,
        fails=lambda name: False,
    ) -> None:
        self.residency, self.history = residency, History()
        self._load_s, self._leave_s, self._fails = load_s, leave_s, fails
        self._events: list = []
        self._order = count()
        self.now = 0.0
        self._queue = deque(arrivals) if n_streams else deque()
        for arrival in arrivals if n_streams is None else ():
            self._at(arrival.at, "arrive", arrival)
        for _ in range(min(n_streams or 0, len(arrivals))):
            self._at(0.0, "arrive", self._queue.popleft())
        self._open = {}

    def run(self) -> History:
        residency, history = self.residency, self.history
        while self._events:
            self.now, _, kind, value = heapq.heappop(self._events)
            getattr(self, f"_{kind}")(value)
            while self._turn():
                pass
            residency.check_invariants()
            n_used = sum(residency.budget[p] - n for p, n in residency.free().items())
            history.most_bytes = max(history.most_bytes, n_used)
            if (time := residency.next_time(self.now)) < inf and self._open:
                self._at(time, "look", None)
        history.ended_at = self.now
        return history

    def _at(self, time: float, kind: str, value: object) -> None:
        heapq.heappush(self._events, (time, next(self._order), kind, value))

    def _look(self, _: None) -> None:
        pass

    def _arrive(self, arrival: Arrival) -> None:
        claim = self.residency.enter(arrival.model, self.now, arrival.client)
        self._open[claim] = arrival

    def _loaded(self, name: str) -> None:
        if self._fails(name):
            for claim in self.residency.failed(name, self.now):
                del self._open[claim]
                self.history.n_failed += 1
                self._go_on()
        else:
            self.residency.loaded(name, self.now, self._load_s)

    def _left(self, name: str) -> None:
        self.residency.gone(name, asleep=self.residency.models[name].sleeps)

    def _served(self, claim) -> None:
        self.residency.leave(claim, self.now)
        del self._open[claim]
        self.history.n_served += 1
        self._go_on()

    def _go_on(self) -> None:
        if self._queue:
            self._at(self.now, "arrive", self._queue.popleft())

    def _turn(self) -> bool:
        turn = self.residency.decide(self.now)
        for claim in turn.run:
            self.history.waits.append(self.now - claim.since)
            self.history.served.append(claim.model)
            serve_s = self._open[claim].serve_s
            self._at(self.now + serve_s, "served", claim)
        for name, move in turn.moves:
            if move is Move.LOAD:
                self.history.n_loads += 1
                self.history.loads.append(name)
                self._at(self.now + self._load_s, "loaded", name)
            else:
                self._at(self.now + self._leave_s, "left", name)
        return bool(turn.run or turn.moves)


def residency_of(
    names: str,
    room: int,
    *,
    need: int = 1,
    max_wait_s: float = 120.0,
    max_overtakes: int = 64,
) -> Residency:
    """Equal models, of which *room* fit."""
    residency = Residency(
        {"CPU": room * need}, max_wait_s=max_wait_s, max_overtakes=max_overtakes
    )
    for name in names:
        residency.add(Resident(name, {"CPU": need}))
    return residency


def least_loads(order: str, room: int) -> int:
    """Loads of who serves *order* as it is, and knows all of it (Belady)."""
    there: set[str] = set()
    n_loads = 0
    for at, model in enumerate(order):
        if model in there:
            continue
        n_loads += 1
        if len(there) == room:
            to_come = order[at:]
            there.discard(
                max(there, key=lambda m: to_come.find(m) if m in to_come else inf)
            )
        there.add(model)
    return n_loads


__all__ = ["Arrival", "History", "ModelState", "Replay", "least_loads", "residency_of"]
