"""
The requests that have not ended, and the four things that happen to them.

enter -> start -> (preempt -> start)* -> finish. `Memory` does what that takes of slots.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Items
from dataclasses import asdict
from math import isnan

from pyllama_raw.core.memory.memory import Memory
from pyllama_raw.core.policies.runner import PolicyRunner
from pyllama_raw.core.request import EmbedRequest, Event, FinishReason, Lot, Request
from pyllama_raw.core.scheduling.deadlines import Deadlines
from pyllama_raw.core.scheduling.slot_change import Note, SlotChange
from pyllama_raw.core.scheduling.texts import Texts, TextSequence
from pyllama_raw.core.sequence import Running, Sequence
from pyllama_raw.core.spans import are_valid
from pyllama_raw.core.stats import Counters, SchedulerStats
from pyllama_raw.core.victims import Victim, choose
from pyllama_raw.core.waiting import WaitingQueue
from pyllama_raw.errors import EngineStalled, NoKVSpace, PyllamaError, WaitedTooLong


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
        self.texts = Texts()  # requests that need no slot
        self.deadlines = Deadlines()
        self.alive: dict[int, Sequence] = {}
        self.lots = Counter[Lot]()  # of those that take slots
        self.n_with_spans = 0  # of these
        self.counters = Counters()
        self.events: list[Event] = []  # not told yet
        self.in_flight = False  # a step runs that was planned and not applied
        self.note: Note = _to_nobody

    def enter(self, requests: Iterable[Request], now: float) -> None:
        """Queue all *requests*; if that raises anything, nothing has changed."""
        entered: list[Sequence] = []
        try:
            for order, request in enumerate(requests, self.counters.submitted):
                entered.append(self._sequence(request, order, now))
                self._enter(entered[-1])
        except BaseException:
            self._forget(entered)
            raise
        self.counters.submitted += len(entered)
        for sequence in entered:
            self._tell("on_arrival", sequence, now)

    def _sequence(self, request: Request, order: int, now: float) -> Sequence:
        """The request in progress, if the order of the queue and the cache can bear it."""
        assert isinstance(request.priority, int)
        assert are_valid(request.spans, request.n_prompt)
        assert len(request.payloads) in (0, len(request.spans))
        assert not (request.spans and request.scores_prompt)
        if request.deadline is not None:
            assert isinstance(request.deadline, float | int)
            assert not isnan(request.deadline)
        hash(request.namespace)  # raises here instead of in the middle of a step
        if isinstance(request, EmbedRequest):
            return TextSequence(request, order, now)
        return Sequence(request, order, now, self.slots.limits.n_chunked(request))

    def _enter(self, sequence: Sequence) -> None:
        request = sequence.request
        assert request.request_id not in self.alive
        for moment in request.time_limits(sequence.submitted):
            self.deadlines.add(moment, request.request_id)
        if isinstance(sequence, TextSequence):
            self.texts.push(sequence)
            self.alive[request.request_id] = sequence
            return
        self.waiting.push(sequence)
        self.alive[request.request_id] = sequence
        self.lots[request.lot] += 1
        self.n_with_spans += bool(request.spans)

    def _forget(self, entered: list[Sequence]) -> None:
        """Take back what enter() did; a deadline of nobody alive is skipped."""
        for sequence in entered:
            request_id = sequence.request.request_id
            if self.alive.get(request_id) is sequence:
                self._remove(sequence)
        self.waiting.discard(entered)

    def _remove(self, sequence: Sequence) -> None:
        request_id, lot = sequence.request.request_id, sequence.request.lot
        del self.alive[request_id]
        if isinstance(sequence, TextSequence):
            self.texts.remove(sequence)
            return
        self.n_with_spans -= bool(sequence.request.spans)
        self.lots[lot] -= 1
        if not self.lots[lot]:
            del self.lots[lot]

    @property
    def n_running(self) -> int:
        """Requests that have a slot, and those whose texts are being computed."""
        return len(self.slots.running) + self.texts.n_running

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
        """End the requests whose deadline is over, or that have waited too long for a slot."""
        for request_id in self.deadlines.expired(now):
            sequence = self.alive.get(request_id)
            if sequence is None:
                continue
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
        running = self.slots.running.get(sequence.request.request_id)
        if running is not None:
            self.memory.leave(running, in_flight=self.in_flight)
        elif not isinstance(sequence, TextSequence):
            self.waiting.remove(sequence)
        self._remove(sequence)
        self.memory.drop_swap(sequence)
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

    def stats(self) -> SchedulerStats:
        """The state of this moment and all totals."""
        limits = self.slots.limits
        host, disk = self.memory.ledgers
        return SchedulerStats(
            n_slots=limits.n_slots,
            running=self.n_running,
            waiting=self.n_waiting,
            waiting_tokens=self.waiting.n_tokens + self.texts.n_tokens,
            n_cells=limits.n_cells,
            n_cells_used=self.slots.cells.n_used,
            swapped=self.memory.n_swapped,
            swapped_bytes=self.memory.n_swapped_bytes,
            kv_bytes_used=self.slots.cells.n_used * self.memory.cell_bytes,
            cache_bytes=host.n_used_bytes,
            disk_bytes=disk.n_used_bytes,
            policy_faults=0 if self.policy is None else self.policy.n_faults,
            **asdict(self.counters),
        )

    def check_integrity(self) -> None:
        """Each request is in one place, and none is missing."""
        self.memory.check_integrity()
        self.waiting.check_integrity()
        here = [r.sequence for r in self.slots.running.values()]
        here += [*self.waiting, *self.texts.all]
        assert len(here) == len(self.alive)
        assert {id(s) for s in here} == {id(s) for s in self.alive.values()}
        stats = self.stats()
        ended = sum(stats.finished.values()) + stats.failed
        assert ended + stats.running + stats.waiting == stats.submitted


def _to_nobody(change: SlotChange, request_id: int, now: float) -> None:
    """Nobody watches."""
