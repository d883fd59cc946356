"""
The packer chooses what the next step computes.

1. A step has works of one lot; lots take turns. Rows of spans are a lot of their own, and so
   are sequences with other adapters.
2. Every sequence of the lot that can decode goes on by a token; prompts share what is left of
   the token budget, and always some.
3. When cells are short, the sequence of the worst rank gives up its own.
"""

from __future__ import annotations

from pyllama_raw.core import exact
from pyllama_raw.core.lots import Groups, LotGroup, LotTurns, by_lot, n_least
from pyllama_raw.core.request import Lot
from pyllama_raw.core.scheduling.budget import StepBudget
from pyllama_raw.core.scheduling.budget_modes import BudgetMode, divide
from pyllama_raw.core.scheduling.prefill import PrefillTurns, share_rows
from pyllama_raw.core.scheduling.roster import Roster
from pyllama_raw.core.scheduling.suspects import Suspects
from pyllama_raw.core.sequence import Running
from pyllama_raw.core.spans import span_at
from pyllama_raw.core.step import (
    Decode,
    Prefill,
    PrefillSpan,
    ScoredPrefill,
    StepPlan,
    Work,
)

MAX_WITHOUT = 8  # steps in a row in which streams leave prompts nothing

new = tuple.__new__  # makes a NamedTuple in half the time, where there is one a token


class Packer:
    """Chooses works of the sequences that run."""

    def __init__(
        self,
        roster: Roster,
        suspects: Suspects,
        budget: StepBudget,
        quantum: int,
        mode: BudgetMode,
    ) -> None:
        self.prefill_cap: int | None = None  # after a step that found no space
        self.budget: int | None = None  # tokens of the last plan, if prompts share it
        self._roster = roster
        self._memory = roster.memory
        self._slots = roster.slots
        self._suspects = suspects
        self._budget = budget
        self._quantum = quantum
        self._mode = mode
        self._n_without = 0  # steps in a row in which streams left prompts nothing
        self._next_stream = 0  # slot of the stream that has waited longest for its turn
        self._turns: dict[Lot, PrefillTurns] = {}
        self.lots = LotTurns()

    def pack(self, now: float) -> StepPlan:
        """A plan without moves; makes moves where it needs cells."""
        self.budget = None
        streams, prompts, replays = self._ready(now)
        recovers = bool(self._suspects.all)
        if not (streams or prompts):
            return StepPlan()
        groups = self._groups(streams, prompts)
        lot = self.lots.pick(groups, now)
        decodes, prompts = groups[lot]
        n_prefill = 0
        if prompts:
            n_turns = len(groups) if self._roster.n_with_spans else 1
            decodes, n_prefill = self._division(decodes, len(streams), n_turns)
        works = _replay(decodes) if replays else _decode(decodes)
        if n_prefill:
            if lot not in self._turns:
                known = self._turns.items()
                self._turns = {k: turns for k, turns in known if k in groups}
                self._turns[lot] = PrefillTurns(self._quantum)
            if lot.is_whole:
                chosen = self._turns[lot].pick(prompts)
                works.append(_prefill(chosen, n_least(chosen)))
            else:
                n_decodes, n_streams = len(decodes), len(streams)
                works += self._prefills(lot, n_decodes, n_streams, prompts, n_prefill)
        steady = (
            not (recovers or replays or len(groups) > 1)  # another plan is sure to come
            and (not prompts or self._completes(works, prompts))
            and self._all_go_on(decodes)
            and self._all_go_on(prompts)
        )
        return StepPlan((), tuple(works), lot, steady)

    def repeat(self, *, from_start: bool) -> None:
        """Take the failed step, or all, again: equal steps give equal last digits."""
        if from_start:
            self._turns.clear()
            self.lots.restart()
        else:
            lot = self.lots.repeat()
            if lot in self._turns:
                self._turns[lot].repeat()

    # -- which -------------------------------------------------------------------

    def _ready(self, now: float) -> tuple[list[Running], list[Running], bool]:
        """
        Sequences that go on by one token, and prompts; preempts until all that decode fit.

        Also whether one of the former computes output again that is known.
        """
        while True:
            streams, prompts, replays = self._divide()
            if self._suspects.all:
                streams, prompts = self._suspects.narrow(streams, prompts)
            n_cells = len(streams) or self._n_least(prompts)
            self._memory.reclaim(n_cells)
            # Each turn preempts a running sequence, so the loop ends.
            if n_cells <= self._slots.n_free_cells or not self._slots.running:
                return streams, prompts, replays
            self._roster.make_room(now)

    def _n_least(self, prompts: list[Running]) -> int:
        """Cells that one of *prompts* needs to go on."""
        if self._roster.n_with_spans:
            return min(map(n_least, prompts), default=0)
        return min(len(prompts), 1)

    def _divide(self) -> tuple[list[Running], list[Running], bool]:
        streams: list[Running] = []
        prompts: list[Running] = []
        replays = False
        for running in self._slots.running.values():
            if running.leader is None and running.fetch_id is None and running.is_read:
                if running.points:
                    self._memory.reach(running)
                if len(running.tokens) - running.n_computed == 1:
                    streams.append(running)
                elif running.n_computed < running.sequence.n_chunked:
                    prompts.append(running)
                else:
                    streams.append(running)
                    replays = True
        return streams, prompts, replays

    def _groups(self, streams: list[Running], prompts: list[Running]) -> Groups:
        """Sequences that can be computed, by lot."""
        lots = self._roster.lots
        if len(lots) > 1 or self._roster.n_with_spans:
            groups = by_lot(streams, self._with_cells(prompts, len(streams)))
        else:
            groups = dict.fromkeys(lots, LotGroup(streams, prompts))
        if self._slots.limits.deterministic:
            groups = exact.divided(groups)
        if len(groups) > 1:
            n_streams = len(streams)
            self._memory.reclaim(n_streams + 1)
            if self._slots.n_free_cells <= n_streams:  # none for prompts
                groups = {lot: group for lot, group in groups.items() if group.streams}
        return groups

    def _with_cells(self, prompts: list[Running], n_streams: int) -> list[Running]:
        """Select the *prompts* that can go on beside streams: a whole span needs many cells."""
        n_most = max(map(n_least, prompts), default=0)
        if n_most > 1:
            self._memory.reclaim(n_streams + n_most)
            n_free = max(self._slots.n_free_cells - n_streams, 1)
            prompts = [running for running in prompts if n_least(running) <= n_free]
        return prompts

    # -- how much ----------------------------------------------------------------

    def _division(
        self, decodes: list[Running], n_streams: int, n_turns: int
    ) -> tuple[list[Running], int]:
        """Divide the step: the *decodes* that go on beside prompts, and the tokens of the prompts."""
        captures = self._memory.captures
        total = self._budget.limit(
            streams=n_streams > 0, n_turns=n_turns, spent_s=captures.spent_s
        )
        captures.reserve_slack()
        n_ready = len(decodes)
        mode = "balanced" if self._n_without >= MAX_WITHOUT else self._mode
        if mode != "throughput_first":  # no stream waits
            n_floor = max(total // 8, 1) if mode == "balanced" else 0
            total = max(total, n_ready + n_floor)
        self.budget = total
        n_decodes, n_prefill = divide(mode, n_ready, total)
        self._n_without = 0 if n_prefill else self._n_without + 1
        if n_decodes < n_ready:
            decodes = self._in_turn(decodes, n_decodes)
        return decodes, n_prefill

    def _in_turn(self, streams: list[Running], n: int) -> list[Running]:
        """*n* of *streams*, by slot; each has its turn."""
        slots = [running.slot for running in streams]
        ahead = [slot for slot in slots if slot >= self._next_stream]
        chosen = [*ahead, *slots][:n]
        self._next_stream = chosen[-1] + 1
        return [running for running in streams if running.slot in chosen]

    def _prefills(
        self,
        lot: Lot,
        n_decodes: int,
        n_streams: int,
        prompts: list[Running],
        n_tokens: int,
    ) -> list[Work]:
        """Chunks of *prompts*, *n_tokens* at most, beside *n_decodes* of all *n_streams*."""
        limits, caps = self._slots.limits, dict[int, int]()
        if self._roster.policy is not None:
            some, policy = n_decodes > 0, self._roster.policy
            prompts, caps = policy.quotas(prompts, all_may_wait=some)
        budget = self._prefill_budget(n_decodes, n_streams, prompts, n_tokens)
        if budget < 1:
            return []
        n_rows = (limits.n_outputs or limits.n_slots) - n_decodes
        share_rows(n_rows, prompts, single=lot.is_single)
        turns = self._turns[lot]
        shares = turns.share(budget, prompts, single=lot.is_single, caps=caps)
        shares = exact.without_rest(shares, n_decodes, limits.n_ubatch)
        return [_prefill(r, n) for r in prompts if (n := shares.get(r.slot, 0))]

    def _prefill_budget(
        self, n_decodes: int, n_streams: int, prompts: list[Running], n_tokens: int
    ) -> int:
        left = min(n_tokens, sum(running.n_behind for running in prompts))
        if self.prefill_cap is not None:
            left = min(left, self.prefill_cap)
        self._memory.reclaim(n_streams + left)
        return min(
            left,
            self._slots.limits.n_batch - n_decodes,
            self._slots.n_free_cells - n_streams,
        )

    # -- what comes next -----------------------------------------------------------

    def _completes(self, works: list[Work], prompts: list[Running]) -> bool:
        """Whether all that run have a row in *works*, in the order of the next plan."""
        slots = [work.slot for work in works]
        return (
            len(works) == len(self._slots.running)
            and slots == sorted(slots)
            and all(work.samples and type(work) is not ScoredPrefill for work in works)
            and not any(running.points for running in prompts)
            and not self._roster.could_start
        )

    def _all_go_on(self, group: list[Running]) -> bool:
        """Whether none of *group* has its last token, or a full slot, after a step."""
        n_ctx_slot = self._slots.limits.n_ctx_slot
        for r in group:
            n_left = r.request.max_tokens - r.sequence.n_output
            if n_left < 2 or n_ctx_slot - len(r.tokens) < 2:
                return False
        return True


def _decode(streams: list[Running]) -> list[Work]:
    """The last token of each."""
    return [
        new(Decode, (r.request.request_id, r.slot, r.n_computed - r.lag, r.tokens[-1:]))
        for r in streams
    ]


def _replay(streams: list[Running]) -> list[Work]:
    """The next token of each; nothing is sampled where the one after it is known."""
    return [_decode([r])[0] if r.n_behind == 1 else _prefill(r, 1) for r in streams]


def _prefill(running: Running, n_tokens: int) -> Work:
    """The next *n_tokens* of what is known."""
    request_id, slot = running.request.request_id, running.slot
    sequence, tokens, start = running.sequence, running.tokens, running.n_computed
    end = start + n_tokens
    chunk, samples = tokens[start:end], end == len(tokens)
    pos = sequence.position(start)
    span = span_at(running.request.spans, start)
    if span is not None:
        n_before = start - running.request.spans[span].start
        return PrefillSpan(request_id, slot, pos, chunk, span, n_before)
    if sequence.is_scoring and start == len(sequence.prompt_logprobs):
        targets = tokens[start + 1 : end + 1]
        return ScoredPrefill(request_id, slot, pos, chunk, samples, targets)
    return Prefill(request_id, slot, pos, chunk, samples)
