"""
Asks a policy, and goes on without it where it fails.

Rule: nothing that a hook does or returns changes what the scheduler holds. A hook gets views
that cannot be written to, its answers are checked, and whatever it raises is counted and
reported. It is passed on only if the report raises: a user may interrupt a hook.

`PolicyQueue` is a queue of waiting sequences that is sorted by the keys of a policy, too. Rank
decides wherever the policy does not: among equal keys, and while the policy fails. `choose()` says which
sequence loses its slot, if one must and no policy says which.

Rules of a policy's queue:
1. A preempted one goes before all keys, because it would otherwise be preempted for
   those it waits for.
2. The first by rank goes next after `max_overtakes` others. So one with r others before
   it by rank waits for (r + 1) * (max_overtakes + 1) admissions at most, whatever the
   keys.
3. A step asks for a bounded number of keys again, so a long queue does not slow it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Items
from functools import partial
from heapq import heapify, heappop, heappush, nsmallest
from typing import Any, Literal, NamedTuple, TypeVar

from pyllama_raw.core.memory.memory import Memory
from pyllama_raw.core.memory.placement import find_sources
from pyllama_raw.core.memory.slots import Idle, Slots
from pyllama_raw.core.memory.snapshots import n_common
from pyllama_raw.core.policies import (
    RequestView,
    SchedulerView,
    SchedulingPolicy,
    checked_key,
    checked_quota,
)
from pyllama_raw.core.request import Namespace
from pyllama_raw.core.sequence import Running, Sequence, WaitingQueue, n_reusable
from pyllama_raw.core.step import StepPlan

N_FIRST = 16  # keys asked for again in each step: those of the first ones
N_TURN = 8  # and of so many others in turn
MAX_PREEMPTED = 3  # after so many times, others are preempted first

Numbers = tuple[float, ...]
Ask = Callable[[Sequence], Numbers | None]  # None: the policy failed
Victim = Literal["latest", "largest", "smallest"]


class PolicyQueue(WaitingQueue):
    """Sequences that hold no slot, with keys."""

    def __init__(
        self,
        keys: Literal["fixed", "changing", "by_client"],
        max_overtakes: int,
        ask: Ask,
    ) -> None:
        super().__init__()
        self._ask = ask
        self._changes = keys != "fixed"
        self._by_client = keys == "by_client"
        self._max_overtakes = max_overtakes
        # By the order in which they were asked for; empty: it was preempted.
        self._keys: dict[Sequence, Numbers] = {}

    def remove(self, sequence: Sequence) -> None:
        super().remove(sequence)
        self._keys.pop(sequence, None)

    def candidates(self) -> Iterator[Sequence]:
        """Sequences by their keys; if the policy fails, the others follow by rank."""
        works, overdue = self._renew(self._due()), None  # whether the policy answers
        keys = self._keys
        heap = [(keys[s], rank, s) for rank, s in self._items if s in keys]
        heapify(heap)
        while works and self._items:
            # The head goes first once it was overtaken often enough, whatever its key is.
            first = self.head
            if first is not overdue and first.n_overtaken >= self._max_overtakes:
                candidate = overdue = first
            elif heap:
                candidate = heappop(heap)[2]
            else:
                return
            if candidate in self._keys:  # else it was overdue, and admitted
                yield candidate
                # It was admitted, so the next one of its client needs a key.
                if self._by_client and candidate not in self._keys:
                    new = self._new()
                    works = self._renew(new)
                    for sequence in new if works else ():
                        entry = self._keys[sequence], sequence.rank, sequence
                        heappush(heap, entry)
        if not works:
            yield from super().candidates()

    def note_overtaken(self, by: Sequence, blocked: Sequence | None) -> None:
        """The first one was passed, too."""
        super().note_overtaken(by, blocked)
        if self._items:
            first = self.head
            if first is not blocked and first.rank < by.rank:
                first.n_overtaken += 1

    def _renew(self, sequences: Iterable[Sequence]) -> bool:
        """Give *sequences* their keys of now; False if the policy failed."""
        for sequence in sequences:
            # One that was preempted goes before all others, so nobody is asked.
            key = () if sequence.n_preempted else self._ask(sequence)
            if key is None:
                return False
            # It goes behind all that were asked before.
            self._keys.pop(sequence, None)
            self._keys[sequence] = key
        return True

    def _due(self) -> Iterable[Sequence]:
        """
        Sequences that are new, and some others if keys change: the first ones, and in
        turn.
        """
        due = self._new()
        if self._changes:
            with_keys = [sequence for sequence, key in self._keys.items() if key]
            due += nsmallest(N_FIRST, with_keys, lambda s: (self._keys[s], s.rank))
            due += with_keys[:N_TURN]
        return dict.fromkeys(due)

    def _new(self) -> list[Sequence]:
        """Sequences that want a key and have none; takes the keys of others away."""
        sequences = self._eligible()
        for sequence in self._keys.keys() - sequences.keys():
            del self._keys[sequence]
        return [sequence for sequence in sequences if sequence not in self._keys]

    def _eligible(self) -> dict[Sequence, None]:
        """
        Sequences that need a key: all, or the first of each client and the preempted
        ones.
        """
        if not self._by_client:
            return dict.fromkeys(self)
        firsts: dict[str | None, Sequence] = {}
        for sequence in self:
            if not sequence.n_preempted:
                firsts.setdefault(sequence.request.client, sequence)
        preempted = [sequence for sequence in self if sequence.n_preempted]
        return dict.fromkeys([*preempted, *firsts.values()])

    def check_integrity(self) -> None:
        """Only sequences that wait have keys; those of the preempted ones are empty."""
        super().check_integrity()
        assert self._keys.keys() <= set(self)
        assert all(bool(key) != bool(s.n_preempted) for s, key in self._keys.items())


KEYS: Mapping[Victim, Callable[[Running], int]] = {
    "latest": lambda _: 0,
    "largest": lambda running: running.n_computed,
    "smallest": lambda running: -running.n_computed,
}


def choose(victim: Victim, running: Items[Running]) -> Running:
    """One of *running*: the one with the largest key, and of those the worst rank."""
    candidates = running
    # The worst rank gets better as others end. Sizes need not, so those that were
    # preempted often are spared.
    if victim != "latest":
        rare = [r for r in running if r.sequence.n_preempted < MAX_PREEMPTED]
        candidates = rare or running
    return max(candidates, key=lambda r: (KEYS[victim](r), r.sequence.rank))


T = TypeVar("T")

MAX_HELD = 8  # steps in a row that a quota may keep a prompt waiting


class PolicyFault(NamedTuple):
    """A fault of a hook of a policy."""

    policy: str
    hook: str
    error: BaseException


class PolicyRunner:
    """
    One policy at work.

    Args:
        report: told of every fault; what it raises is passed on.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        memory: Memory,
        max_overtakes: int,
        report: Callable[[PolicyFault], None],
    ) -> None:
        self.queue = PolicyQueue(policy.keys, max_overtakes, self._order_key)
        self.n_faults = 0
        self._policy = policy
        self._memory = memory
        self._report = report
        self._now = 0.0
        self._view: SchedulerView | None = None  # of this step, once a hook gets it
        self._probed: Sequence | None = None  # the one that the policy is asked about
        self._prefixes: Prefixes | None = None  # of now; made when a policy asks
        self._views: dict[Sequence, RequestView] = {}  # of those it was told of
        self._hooks = {name for name in HOOKS if _overrides(policy, name)}

    def begin(self, now: float) -> None:
        """A step is planned."""
        self._prefixes = self._view = None
        self._now = now

    # -- decisions -----------------------------------------------------------------

    def _order_key(self, sequence: Sequence) -> Numbers | None:
        self._probed = sequence
        return self._ask(
            "order_key", checked_key, self._view_of(sequence), self._seen()
        )

    def _view_of(self, sequence: Sequence) -> RequestView:
        view = self._views.get(sequence)
        if view is None:
            view = self._views[sequence] = RequestView(sequence, self._running)
        return view

    def _running(self, request_id: int) -> Running | None:
        return self._memory.slots.running.get(request_id)

    def _seen(self) -> SchedulerView:
        """The scheduler as it was when the first hook of this step was asked."""
        if self._view is None:
            slots, limits = self._memory.slots, self._memory.slots.limits
            self._view = SchedulerView(
                now=self._now,
                n_slots=limits.n_slots,
                n_running=len(slots.running),
                n_waiting=len(self.queue),
                n_cells=limits.n_cells,
                n_cells_used=slots.cells.n_used,
                probe=self._n_cached,
            )
        return self._view

    def _n_cached(self, request_id: int) -> int:
        """
        Tokens that a waiting request would not have to compute now.

        0 for any but the one that the policy is asked about.
        """
        sequence, memory, slots = self._probed, self._memory, self._memory.slots
        if sequence is None or sequence.request.request_id != request_id:
            return 0
        if not memory.reuses:
            return 0
        n_most = n_reusable(sequence)
        offers = memory.tiers.offers(sequence, n_most, slots.n_not_running)
        counts = [offer.hit.n_tokens for offer in offers]
        if slots.limits.kind.can_cut and not sequence.is_scoring:
            # Made once for all requests of a step, until one of them changes what slots hold.
            if self._prefixes is None:
                self._prefixes = Prefixes(slots)
            counts.append(self._prefixes.n_longest(sequence, n_most))
        else:
            counts += [source.n_later for source in find_sources(slots, sequence)]
        return max(counts, default=0)

    @property
    def chooses_victims(self) -> bool:
        """Whether the policy chooses the first one to be preempted."""
        return "victim_key" in self._hooks

    def victim(self, running: Items[Running]) -> Running:
        """The sequence that is preempted, if memory is short."""
        candidates = [r for r in running if r.sequence.n_preempted < MAX_PREEMPTED]
        if self.chooses_victims:
            best: tuple[Numbers, tuple[int, int]] | None = None
            victim: Running | None = None
            # The largest key wins, and of equal ones the worst rank.
            for candidate in candidates:
                view, rank = self._view_of(candidate.sequence), candidate.sequence.rank
                answer = self._ask("victim_key", _key_or_never, view, self._seen())
                # The hook failed, so nothing that it said of others counts.
                if answer is None:
                    break
                if answer and (best is None or (answer, rank) > best):
                    best, victim = (answer, rank), candidate
            else:
                if victim is not None:
                    return victim
        # The policy has no such hook, wants to spare all, or failed.
        return max(candidates or running, key=lambda r: r.sequence.rank)

    def quotas(
        self, prompts: list[Running], *, all_may_wait: bool
    ) -> tuple[list[Running], dict[int, int]]:
        """
        Select the *prompts* that get tokens, and the most tokens of some, by slot.

        Args:
            all_may_wait: there is something else to compute.
        """
        if "prefill_quota" not in self._hooks:
            return prompts, {}
        # All prompts are shown at once, and those that are not in the answer have no limit.
        by_id = {running.request.request_id: running for running in prompts}
        views = tuple(self._view_of(running.sequence) for running in prompts)
        check = partial(checked_quota, request_ids=by_id)
        quota = self._ask("prefill_quota", check, views, self._seen()) or {}
        # Less than two tokens is none: they wait, but not for more than MAX_HELD steps in a row.
        low = {
            request_id
            for request_id, n_tokens in quota.items()
            if n_tokens < 2 and by_id[request_id].sequence.n_held < MAX_HELD
        }
        # A step without any work would be the end of all.
        if len(low) == len(prompts) and not all_may_wait:
            return prompts, {}
        for request_id, running in by_id.items():
            sequence = running.sequence
            sequence.n_held = (sequence.n_held + 1) * (request_id in low)
        caps = {by_id[k].slot: n for k, n in quota.items() if n >= 2}
        return [by_id[k] for k in by_id if k not in low], caps

    # -- what happens --------------------------------------------------------------

    def computed(self, plan: StepPlan, now: float) -> None:
        """*plan* was computed; what came of it is not taken in yet."""
        if "on_scheduled" not in self._hooks:
            return
        works = ((self._running(work.request_id), work) for work in plan.works)
        done = tuple(
            (self._view_of(running.sequence), len(work.tokens))
            for running, work in works
            if running is not None  # else it has ended meanwhile
        )
        self._ask("on_scheduled", id, done, now)

    def tell(self, hook: str, sequence: Sequence, now: float) -> None:
        """*hook*, which has the name of what happened to *sequence*."""
        self._prefixes = None
        view = self._view_of(sequence)
        if hook in self._hooks:
            self._ask(hook, id, view, now)
        if hook == "on_preempted":
            sequence.n_held = 0
        if hook == "on_finished":
            del self._views[sequence]

    # -- calls ---------------------------------------------------------------------

    def _ask(
        self, hook: str, check: Callable[[Any], T], *arguments: object
    ) -> T | None:
        """The checked answer of *hook*; None if that failed."""
        try:
            return check(getattr(self._policy, hook)(*arguments))
        except BaseException as error:  # noqa: BLE001 - it is reported
            self._note_fault(hook, error)
            return None

    def _note_fault(self, hook: str, error: BaseException) -> None:
        self.n_faults += 1
        self._report(PolicyFault(self._policy.name, hook, error))


def pass_on_interrupts(fault: PolicyFault) -> None:
    """A report where the user's thread runs the hooks: Ctrl-C is no fault of the policy."""
    if isinstance(fault.error, KeyboardInterrupt):
        raise fault.error


HOOKS = (
    *("prefill_quota", "victim_key"),
    *("on_arrival", "on_admitted", "on_scheduled", "on_preempted", "on_finished"),
)


def _overrides(policy: SchedulingPolicy, hook: str) -> bool:
    return getattr(type(policy), hook) is not getattr(SchedulingPolicy, hook)


def _key_or_never(key: object) -> Numbers:
    """Empty: never, if there is anybody else."""
    return () if key is None else checked_key(key)


class Prefixes:
    """
    Prefixes that slots hold, or will, as of now, in memory that can be cut.

    Keys are sorted: those beside the place of another one have most in common with it.
    """

    def __init__(self, slots: Slots) -> None:
        self._keys: dict[Namespace, list[bytes]] = {}
        for place in slots.all:
            if type(place) is Idle:
                self._keys.setdefault(place.namespace, []).append(place.key)
            elif isinstance(place, Running) and not place.sequence.is_shifted:
                n_tokens = slots.limits.n_kept(place.sequence)
                # Nobody waits for output.
                if place.n_behind == 1:
                    n_tokens = min(n_tokens, place.n_computed)
                key = place.tokens[:n_tokens].tobytes()
                self._keys.setdefault(place.request.namespace, []).append(key)
        for keys in self._keys.values():
            keys.sort()

    def n_longest(self, sequence: Sequence, n_most: int) -> int:
        """Tokens of a waiting *sequence*, at most *n_most*, that a slot has or will."""
        keys = self._keys.get(sequence.request.namespace, [])
        key = sequence.tokens[:n_most].tobytes()
        at = bisect_left(keys, key)
        beside = keys[max(at - 1, 0) : at + 1]
        return sequence.whole(max([n_common(near, key) for near in beside], default=0))
