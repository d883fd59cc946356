"""
The scheduler: continuous batching of requests. `Packer` says what a step computes.

Rules, in this order:
1. A waiting request starts when a slot is free, the cells it will need are not promised
   to others, and its source, if it has one, can be read beside those of others. If the
   head of the queue cannot start, at most `max_overtakes` others start before it.
2. When memory is short, the sequence of the worst rank gives its cells up and goes on
   later: see `Memory`. Only a sequence that is alone and does not fit is ended.
3. Every request ends exactly once, with a `Finished` event. If there is work and
   nothing of it can be computed, all end with `EngineStalled`.
4. A step that did not work loses nothing: see `Failures`.

The caller passes the time in; nothing here blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Items
from functools import partial
from itertools import islice
from typing import Literal

from pyllama_raw.core.costs import GOAL_S, CostHistory, StepBudget
from pyllama_raw.core.memory.cache import PrefixCache
from pyllama_raw.core.memory.memory import Memory
from pyllama_raw.core.memory.slots import ContextLimits
from pyllama_raw.core.memory.tiers import SnapshotCost, Tier
from pyllama_raw.core.policies import Fcfs, SchedulingPolicy
from pyllama_raw.core.policy_runner import (
    PolicyFault,
    PolicyRunner,
    Victim,
    pass_on_interrupts,
)
from pyllama_raw.core.request import DRAFTS, SOURCES, Event, FinishReason, Request
from pyllama_raw.core.scheduling.lots import Suspects
from pyllama_raw.core.scheduling.packer import (
    BudgetMode,
    Packer,
    PrefillOrder,
    PrefillTurns,
)
from pyllama_raw.core.scheduling.results import Failures, Outputs
from pyllama_raw.core.scheduling.roster import Note, Roster
from pyllama_raw.core.scheduling.speculation import DraftLimits, Speculation
from pyllama_raw.core.scheduling.texts import SourceSteps, Texts
from pyllama_raw.core.sequence import Sequence, growth
from pyllama_raw.core.stats import CacheStats, Occupancy, SchedulerStats, SlotStats
from pyllama_raw.core.step import (
    Computed,
    DecodeStatus,
    Fetched,
    StepPlan,
    StepResult,
    Verify,
    Written,
)
from pyllama_raw.errors import PyllamaError

NO_COST = SnapshotCost()
ADMISSION_WINDOW = 64  # waiting requests looked at in one step


class Scheduler:
    """Plans steps and turns their results into events. One thread owns it."""

    def __init__(
        self,
        limits: ContextLimits,
        pieces: Items[bytes],
        *,
        token_budget: int | None = None,
        target_step_s: float | None = None,
        prefill_order: PrefillOrder = "shortest",
        prefill_quantum: int = 256,
        max_overtakes: int = 16,
        preempt: Literal["memory", "priority"] = "memory",
        victim: Victim = "latest",
        context_full: Literal["stop", "shift"] = "stop",
        n_keep: int = 4,
        policy: SchedulingPolicy | None = None,
        budget_mode: BudgetMode = "balanced",
        cache: PrefixCache | None = None,
        disk: Tier | None = None,
        snapshot_cost: SnapshotCost = NO_COST,
        snapshot_interval_tokens: int = 0,
        texts: ContextLimits | None = None,
        speculates: bool = False,
        exact_drafts: bool = False,
        draft: DraftLimits | None = None,
        report: Callable[[PolicyFault], None] = pass_on_interrupts,
    ) -> None:
        """
        Args:
            pieces: bytes of each token, read for stop strings.
            preempt: for what sequences lose their slots; priority needs no policy.
            policy: None: first come, first served.
            cache: None: slots forget what they held as soon as a request ends.
            disk: None: nothing is kept in files.
            speculates: whether steps may verify drafts.
            exact_drafts: whether drafts may change no bit, so that rows with adapters have none.
            draft: of the context of a draft model; None: there is none.
            texts: limits of the contexts that make vectors: n_slots texts and n_batch
                tokens a step; None: *limits*.
            report: told of what the policy does wrong; what it raises is passed on.
        """
        self.limits = limits
        self._max_overtakes = max_overtakes
        self._for_priority = preempt == "priority"
        self._costs = CostHistory()
        # What slots hold, and what is saved of it.
        self.memory = Memory(
            limits,
            cache=cache,
            disk=disk,
            prefill=self._costs,
            cost=snapshot_cost,
            interval=snapshot_interval_tokens,
            target_step_s=target_step_s or GOAL_S,
        )
        self._slots = self.memory.slots
        self._policy = None
        if policy is not None and type(policy) is not Fcfs:
            self._policy = PolicyRunner(policy, self.memory, max_overtakes, report)
        self._roster = Roster(self.memory, self._policy, victim)
        self.alive: Mapping[int, object] = self._roster.alive  # by request_id
        self.counters = self._roster.counters  # totals, which others read
        shifts = context_full == "shift" and limits.can_shift
        self._outputs = Outputs(self._roster, pieces, n_keep if shifts else None)
        self._suspects = Suspects()
        budget = StepBudget(token_budget, target_step_s, limits.n_batch, self._costs)
        make_turns = partial(PrefillTurns, prefill_order, prefill_quantum)
        self._packer = Packer(
            self._roster, self._suspects, budget, make_turns, budget_mode
        )
        if speculates and not limits.deterministic:
            drafts = Speculation(self.memory, self._costs, draft, is_exact=exact_drafts)
            self._packer.speculation = drafts
            self._roster.remember = drafts.remember
        self._failures = Failures(self._roster, self._packer, self._suspects)
        self._sources = SourceSteps(self._roster) if limits.n_source else None
        self._started = 0.0  # when the last plan was made
        texts = limits if texts is None else texts
        self._texts = Texts(self._roster, texts, token_budget, target_step_s or GOAL_S)
        self._texts_are_next = False  # texts and sequences take turns, a step each

    # -- requests ---------------------------------------------------------------

    @property
    def next_deadline(self) -> float | None:
        """The earliest moment at which time may be over for a request."""
        return self._roster.deadlines.next(self._roster.alive)

    def add(self, request: Request, now: float) -> None:
        """As add_all(), for one."""
        self.add_all((request,), now)

    def add_all(self, requests: Items[Request], now: float) -> None:
        """
        Queue all *requests* or none.

        Raises:
            PromptTooLong: one leaves no room for an output token.
            BadMedia: rows that see each other are more than one micro-batch.
        """
        for request in requests:
            self._slots.limits.check(request)
        self._roster.enter(requests, now)

    def cancel(
        self,
        request_id: int,
        now: float,
        reason: FinishReason = FinishReason.CANCELLED,
    ) -> bool:
        """End a request at once; False if it has ended already."""
        return self._roster.end(request_id, reason, now)

    def fail(self, request_id: int, error: PyllamaError, now: float) -> bool:
        """End a request by *error*; False if it has ended already."""
        return self._roster.end(request_id, error, now)

    def take_events(self) -> list[Event]:
        """Events that arose outside apply(): cancelled, past the deadline, no space."""
        events, self._roster.events = self._roster.events, []
        return events

    @property
    def occupancy(self) -> Occupancy:
        """Counts of what there is to do and what is held, at little cost."""
        slots, roster = self._slots, self._roster
        host, disk = self.memory.ledgers
        n_running = roster.n_running
        return Occupancy(
            n_running,
            len(roster.alive) - n_running,
            slots.cells.n_used,
            host.n_used_bytes,
            disk.n_used_bytes,
            self._packer.budget,
        )

    def stats(self) -> SchedulerStats:
        """The state of this moment and all totals."""
        return self._roster.stats(self._costs.cost)

    def slots(self) -> tuple[SlotStats, ...]:
        """The slots that run a request, by number."""
        return tuple(running.stats for running in self._slots.running.values())

    def cache_stats(self) -> CacheStats:
        """Counts of what was reused and what is stored."""
        return self.memory.stats()

    def clear_cache(self, salt: str | None = None) -> int:
        """Forget snapshots, files, idle slots and texts; returns the host bytes freed."""
        if self._packer.speculation is not None:
            self._packer.speculation.clear(salt)
        return self.memory.clear(salt)

    def lose_slots(self) -> None:
        """
        The context is another one, and empty: what runs is filled again.

        Snapshots and files stay good, because the new one has the same layout.
        """
        self._failures.lose_slots()

    def lose_reading(self) -> None:
        """No context holds a part of a text, or what an encoder made of sources."""
        self._texts.restart()
        if self._sources is not None:
            self._sources.restart()

    def check_integrity(self) -> None:
        """The conservation laws; raises AssertionError."""
        self._roster.check_integrity()

    def watch(self, note: Note) -> None:
        """Call *note*, and nobody else, when a request gets a slot or loses it."""
        self._roster.note = note

    # -- files ------------------------------------------------------------------

    def take_report(self, report: Written | Fetched) -> None:
        """Take in what came of a file that a plan asked for; call schedule() then."""
        self.memory.tiers.take_report(report)

    def last_plans(self) -> Iterator[StepPlan]:
        """
        Plans that write what idle slots hold, when no request is left.

        Each is to be executed and applied before the next one is asked for.
        """
        assert not self.alive
        for moves in self.memory.last_moves():
            yield StepPlan(moves)

    # -- plan -------------------------------------------------------------------

    def expire(self, now: float) -> None:
        """End the requests whose time is over."""
        self._roster.expire(now)

    def schedule(self, now: float) -> StepPlan:
        """Decide the next step; a falsy plan means that there is nothing to do."""
        self._roster.expire(now)
        texts = self._roster.texts
        # Texts need nothing of memory. They and sequences take turns, a step each.
        if texts and self._texts_are_next:
            self._texts_are_next = False
            return self._texts.plan(now)
        # Whoever else is there waits for what this step saves.
        others_wait = len(self._roster.alive) > 1
        self.memory.captures.begin(others_wait=others_wait)
        if self._policy is not None:
            self._policy.begin(now)
        # Slots are given, then filled; only then is it clear what there is to compute.
        if self._for_priority:
            self._make_way(now)
        self._admit(now)
        if self.memory.ahead.has_files and self._roster.waiting:
            self.memory.prefetch(self._roster.waiting.head)
        self.memory.catch_up()
        plan, waits = StepPlan(), False
        if self._sources is not None:
            plan, waits = self._sources.plan(now), self._sources.waits
        plan = plan or self._packer.pack(now)
        self._started = now
        # What loads or is read next to it makes the next plan another one.
        steady = plan.steady and not (self.memory.loads or waits)
        is_fetching = bool(self.memory.fetchers)
        plan = plan._replace(moves=self.memory.take_moves(), steady=steady)
        self._roster.in_flight = bool(plan)
        if texts:
            self._texts_are_next = bool(plan)
            return plan or self._texts.plan(now)
        # Nothing of the work can be computed, and no later plan would be another one.
        if self.alive and not (plan or self._roster.events or is_fetching):
            self._roster.stall(now)
        return plan

    def _make_way(self, now: float) -> None:
        """Preempt for the first that waits, if it is more urgent than running ones."""
        roster, slots = self._roster, self._slots
        # While libllama lacks space nobody starts.
        if not roster.waiting or self._packer.prefill_cap is not None:
            return
        head = roster.waiting.head
        n_cells, n_source = growth(head), head.n_source
        lower = [
            running
            for running in slots.running.values()
            if running.request.priority > head.request.priority
            and slots.limits.is_repeatable(running.sequence)
        ]
        # Nobody is preempted in vain: all of them together must make enough room.
        gain = sum(growth(running.sequence) for running in lower)
        source_gain = sum(running.sequence.n_source for running in lower)
        if slots.n_unpromised + gain < n_cells:
            return
        if slots.n_source_room + source_gain < n_source:
            return
        # Nor are more than it takes.
        while lower and not (
            slots.has_free
            and n_cells <= slots.n_unpromised
            and n_source <= slots.n_source_room
        ):
            roster.preempt_one(lower, now)
            lower = [running for running in lower if slots.is_here(running)]

    def _admit(self, now: float) -> None:
        """Start those that wait, while there are slots, cells and room for sources."""
        if not self._roster.could_start:
            return
        # libllama lacks space: none starts beside others until a step has worked.
        alone = not self._slots.running
        if self._packer.prefill_cap is not None and not alone:
            return
        room, source_room = self._slots.n_unpromised, self._slots.n_source_room
        blocked: Sequence | None = None
        for sequence in islice(self._roster.waiting.candidates(), ADMISSION_WINDOW):
            n_cells, n_source = growth(sequence), sequence.n_source
            # One that would be alone always starts, and ends if it does not fit.
            if (n_cells > room or n_source > source_room) and not alone:
                # It was overtaken often enough: all others wait for it.
                if sequence.n_overtaken >= self._max_overtakes:
                    return
                blocked = blocked or sequence
            else:
                room -= n_cells
                source_room -= n_source
                alone = False
                self._roster.start(sequence, now)
                self._roster.waiting.note_overtaken(sequence, blocked)
            at_limit = blocked and blocked.n_overtaken >= self._max_overtakes
            if at_limit or not self._slots.has_free:
                return

    # -- results ----------------------------------------------------------------

    def give_up(self, plan: StepPlan, error: PyllamaError, now: float) -> list[Event]:
        """As apply(), without a result: nothing may be done, and the context is new."""
        self.memory.tiers.give_up(plan.moves)
        return self.apply(plan, StepResult(DecodeStatus.FAILED, error=error), now)

    def apply(self, plan: StepPlan, result: StepResult, now: float) -> list[Event]:
        """Take in what the executor did; returns the events of this step in order."""
        self._roster.counters.steps += 1
        # A step of texts has no moves and changes no slot.
        if plan.lot.makes_vectors:
            self._texts.take(plan, result, now)
            return self.take_events()
        self._roster.in_flight = False
        self.memory.settle(result)
        if plan.lot == SOURCES:
            assert self._sources is not None
            self._sources.take(plan, result, now)
            return self.take_events()
        if result.switch_s is not None:
            self._packer.lots.switch_s = result.switch_s
        if result.status is not DecodeStatus.OK:
            self._failures.take(plan, result, now)
            return self.take_events()
        if plan.lot == DRAFTS:
            assert self._packer.speculation is not None
            self._packer.speculation.take(plan, result)
            return self.take_events()
        # It had space, so others may start again.
        self._packer.prefill_cap = None
        if self._policy is not None:
            self._policy.computed(plan, now)
        n_tokens = self._outputs.take(plan.works, result.outputs, now)
        if self._suspects.all:
            self._suspects.clear(self._roster.alive, self._slots.running)
        computed_s = now - self._started - result.moves_s
        # A step that was begun ahead has taken what its decode took, too.
        step_s = max(computed_s, result.decode_s + result.sample_s)
        n_outputs = len(plan.works) - [*map(type, result.outputs)].count(Computed)
        # Each draft has logits, too.
        if plan.works and type(plan.works[-1]) is Verify:
            n_outputs = n_tokens
        self._costs.observe(n_tokens, n_outputs, step_s)
        if n_tokens == len(plan.works) and not plan.moves:
            self.memory.captures.observe_decode(computed_s)
        return self.take_events()
