"""
The roster: requests that have not ended, and the four things that happen to them.

enter -> start -> (preempt -> start)* -> finish. `Memory` does what that takes of slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Iterator
from collections.abc import Sequence as Items
from dataclasses import asdict
from heapq import heappop, heappush
from math import isnan

from pyllama_raw.core.costs import StepCost
from pyllama_raw.core.memory.memory import Memory
from pyllama_raw.core.policy_runner import PolicyRunner, Victim, choose
from pyllama_raw.core.request import (
    EmbedRequest,
    Event,
    FinishReason,
    Lot,
    Request,
    SlotChange,
    are_valid,
)
from pyllama_raw.core.sequence import (
    NO_LIMIT,
    Running,
    Sequence,
    TextSequence,
    WaitingQueue,
)
from pyllama_raw.core.stats import Counters, SchedulerStats
from pyllama_raw.errors import (
    EngineStalled,
    NoKVSpace,
    PyllamaError,
    WaitedTooLong,
)

Note = Callable[[SlotChange, int, float], None]  # with its id and the time


class Roster:
    """Requests that wait or run; each one ends exactly once, by finish()."""

    def __init__(
        self,
        memory: Memory,
        policy: PolicyRunner | None = None,
        victim: Victim = "latest",
    ) -> None:
        self.memory = memory
        self.slots = memory.slots
        self.policy = policy  # None: first come, first served
        self._victim = victim
        self.waiting = WaitingQueue() if policy is None else policy.queue
        # Requests that need no slot, in the order of their turns.
        self.texts: list[TextSequence] = []
        self.deadlines = Deadlines()
        self.alive: dict[int, Sequence] = {}
        self.lots = Counter[Lot]()  # of those that take slots
        self.n_with_spans = 0  # of these
        self.counters = Counters()
        self.events: list[Event] = []  # that nobody has taken yet
        self.in_flight = False  # a step runs that was planned and not applied
        self.note: Note = _to_nobody
        # Called with each sequence that ends in a slot; None: drafts are off.
        self.remember: Callable[[Sequence], None] | None = None

    def enter(self, requests: Iterable[Request], now: float) -> None:
        """Queue all *requests*; if that raises anything, nothing has changed."""
        entered: list[Sequence] = []
        try:
            for order, request in enumerate(requests, self.counters.submitted):
                request_id = request.request_id
                assert request_id not in self.alive
                self.deadlines.add(request, now)
                sequence = self._sequence(request, order, now)
                if isinstance(sequence, TextSequence):
                    # Sorted, and equal ones stay in their order.
                    self.texts.append(sequence)
                    self.texts.sort(key=lambda text: text.request.priority)
                    self.alive[request_id] = sequence
                else:
                    self.waiting.push(sequence)
                    self.alive[request_id] = sequence
                    self.lots[request.lot] += 1
                    self.n_with_spans += bool(request.spans)
                entered.append(sequence)
        except BaseException:
            # Deadlines stay: those of nobody alive are skipped.
            for sequence in entered:
                self._remove(sequence)
            self.waiting.discard(entered)
            raise
        self.counters.submitted += len(entered)
        for sequence in entered:
            self._tell("on_arrival", sequence, now)

    def _sequence(self, request: Request, order: int, now: float) -> Sequence:
        """The request in progress, if queue and cache can bear it."""
        assert isinstance(request.priority, int)
        assert are_valid(request.spans, request.n_prompt)
        assert len(request.payloads) in (0, len(request.spans))
        assert not (request.spans and request.scoring is not None)
        assert request.scoring is None or request.scoring.first >= 1
        # Raises here instead of in the middle of a step.
        hash(request.namespace)
        if isinstance(request, EmbedRequest):
            return TextSequence(request, order, now)
        # Outputs that must not depend on others: what is not of the prompt is computed
        # token by token, also again.
        n_chunked = request.n_prompt if self.slots.limits.deterministic else NO_LIMIT
        return Sequence(request, order, now, n_chunked)

    def _remove(self, sequence: Sequence) -> None:
        request_id, lot = sequence.request.request_id, sequence.request.lot
        del self.alive[request_id]
        if isinstance(sequence, TextSequence):
            self.texts = [text for text in self.texts if text is not sequence]
            return
        self.n_with_spans -= bool(sequence.request.spans)
        self.lots[lot] -= 1
        if not self.lots[lot]:
            del self.lots[lot]

    @property
    def n_running(self) -> int:
        """Requests that have a slot, and those whose texts are being computed."""
        n_texts = sum([text.admitted is not None for text in self.texts])
        return len(self.slots.running) + n_texts

    @property
    def n_waiting(self) -> int:
        """All others."""
        return len(self.alive) - self.n_running

    def _tell(self, hook: str, sequence: Sequence, now: float) -> None:
        """Tell the policy, whose business are those that take slots."""
        if self.policy is not None and not isinstance(sequence, TextSequence):
            self.policy.tell(hook, sequence, now)

    @property
    def could_start(self) -> bool:
        """Whether somebody waits for a slot, and one is free."""
        return bool(self.waiting) and self.slots.has_free

    def start(self, sequence: Sequence, now: float) -> None:
        """Give a waiting sequence a slot."""
        self.waiting.remove(sequence)
        self.memory.seat(sequence)
        # One that was preempted was admitted before.
        if sequence.admitted is None:
            sequence.admitted = now
        self.note("running", sequence.request.request_id, now)
        self._tell("on_admitted", sequence, now)

    def preempt(self, running: Running, now: float) -> None:
        """Take the slot of a running sequence; it waits at its old rank."""
        self.counters.preempted += 1
        running.sequence.n_preempted += 1
        self.memory.swap_out(running)
        self.note("preempted", running.request.request_id, now)
        self.memory.leave(running, in_flight=self.in_flight)
        self._tell("on_preempted", running.sequence, now)
        self.waiting.push(running.sequence)

    def end(
        self, request_id: int, end: FinishReason | PyllamaError, now: float
    ) -> bool:
        """End a request; False if it has ended already."""
        sequence = self.alive.get(request_id)
        if sequence is not None:
            self.finish(sequence, end, now)
        return sequence is not None

    def expire(self, now: float) -> None:
        """End requests whose deadline is over, or that waited too long for a slot."""
        for request_id in self.deadlines.expired(now):
            sequence = self.alive.get(request_id)
            if sequence is None:
                continue
            # A request that has had a slot may take all the time until its deadline.
            deadline, limit = sequence.request.deadline, sequence.request.max_wait_s
            if deadline is not None and deadline <= now:
                self.finish(sequence, FinishReason.DEADLINE, now)
            elif sequence.admitted is None and limit is not None:
                error = WaitedTooLong("max_wait_s", now - sequence.submitted, limit)
                self.finish(sequence, error, now)

    def finish(
        self, sequence: Sequence, end: FinishReason | PyllamaError, now: float
    ) -> None:
        """End a request, wherever it is."""
        # It runs in a slot, or waits for one; a text does neither.
        running = self.slots.running.get(sequence.request.request_id)
        self._remove(sequence)
        self.memory.drop_swap(sequence)
        if running is not None:
            if self.remember is not None:
                self.remember(sequence)
            self.memory.leave(running, in_flight=self.in_flight)
        elif not isinstance(sequence, TextSequence):
            self.waiting.remove(sequence)
        self._tell("on_finished", sequence, now)
        if isinstance(end, FinishReason):
            self.counters.finished[end] += 1
            self.events.append(sequence.finish(end, None, now))
        else:
            self.counters.failed += 1
            self.events.append(sequence.finish(None, end, now))

    def make_room(self, now: float) -> None:
        """Preempt the worst sequence; one that is alone ends instead."""
        running = list(self.slots.running.values())
        # None is left to give way to it, so it can never go on.
        if len(running) == 1:
            (alone,) = running
            message = f"{len(alone.tokens)} tokens do not fit; raise n_ctx"
            self.finish(alone.sequence, NoKVSpace("llama_decode", 1, message), now)
        elif running:
            self.preempt_one(running, now)

    def preempt_one(self, running: Items[Running], now: float) -> None:
        """Preempt the one of *running* that is missed least."""
        policy = self.policy
        if policy is not None and (policy.chooses_victims or self._victim == "latest"):
            self.preempt(policy.victim(running), now)
        else:
            self.preempt(choose(self._victim, running), now)

    def stall(self, now: float) -> None:
        """End all requests, because nothing can be computed for any of them."""
        limits = self.slots.limits
        error = EngineStalled(
            n_running=len(self.slots.running),
            n_waiting=self.n_waiting,
            n_slots=limits.n_slots,
            n_cells_used=self.slots.cells.n_used,
            n_cells=limits.n_cells,
        )
        for sequence in list(self.alive.values()):
            self.finish(sequence, error, now)

    def stats(self, step_cost: StepCost | None = None) -> SchedulerStats:
        """The state of this moment and all totals."""
        limits = self.slots.limits
        host, disk = self.memory.ledgers
        texts = [text for text in self.texts if text.admitted is None]
        n_text_tokens = sum([text.request.n_prompt for text in texts])
        return SchedulerStats(
            n_slots=limits.n_slots,
            running=self.n_running,
            waiting=self.n_waiting,
            waiting_tokens=self.waiting.n_tokens + n_text_tokens,
            n_cells=limits.n_cells,
            n_cells_used=self.slots.cells.n_used,
            swapped=self.memory.n_swapped,
            swapped_bytes=self.memory.n_swapped_bytes,
            kv_bytes_used=self.slots.cells.n_used * self.memory.cell_bytes,
            cache_bytes=host.n_used_bytes,
            disk_bytes=disk.n_used_bytes,
            step_cost=step_cost,
            policy_faults=0 if self.policy is None else self.policy.n_faults,
            **asdict(self.counters),
        )

    def check_integrity(self) -> None:
        """Each request is in one place, and none is missing."""
        self.memory.check_integrity()
        self.waiting.check_integrity()
        sequences = [running.sequence for running in self.slots.running.values()]
        sequences += [*self.waiting, *self.texts]
        assert len(sequences) == len(self.alive)
        assert {id(s) for s in sequences} == {id(s) for s in self.alive.values()}
        stats = self.stats()
        ended = sum(stats.finished.values()) + stats.failed
        assert ended + stats.running + stats.waiting == stats.submitted


def _to_nobody(change: SlotChange, request_id: int, now: float) -> None:
    """Nobody watches."""


class Deadlines:
    """
    Moments at which time may be over for requests, earliest first.

    A heap with lazy removal: requests that ended are skipped when they come up.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int]] = []

    def add(self, request: Request, submitted: float) -> None:
        """Add the moments at which time may be over for *request*."""
        deadline, request_id = request.deadline, request.request_id
        if deadline is not None:
            assert isinstance(deadline, float | int)
            assert not isnan(deadline)
            heappush(self._heap, (deadline, request_id))
        if request.max_wait_s is not None:
            heappush(self._heap, (submitted + request.max_wait_s, request_id))

    def next(self, alive: Container[int]) -> float | None:
        """The earliest moment of a request in *alive*."""
        while self._heap and self._heap[0][1] not in alive:
            heappop(self._heap)
        return self._heap[0][0] if self._heap else None

    def expired(self, now: float) -> Iterator[int]:
        """Take out the ids whose moment is not after *now*."""
        while self._heap and self._heap[0][0] <= now:
            yield heappop(self._heap)[1]
