"""
The packer chooses what the next step computes.

1. A step has works of one lot; lots take turns. Rows of spans are a lot of their own,
   and so are sequences with other adapters.
2. Sequences of the lot that can decode go on by a token; prompts have what is left of
   the token budget. The budget mode says who waits where that is not enough. Who waits
   takes turns:

   | mode | streams | prompts |
   |---|---|---|
   | balanced | all | what is left, and always some |
   | latency_first | all | what is left, if there is any |
   | throughput_first | at most a quarter | the others |

3. The budget is the latency knob: a step stalls each stream as long as it takes. What it
   takes is learned from the steps themselves; `StepBudget` says how long it may take.
4. The prompt with the fewest tokens left has the step first, so few prompts share a step,
   and most have their first token soon. One step in five begins with the prompt that came
   first, so each goes on, and a short one waits for one such step at a time.
   In the order `turns` prompts share the step by deficit round-robin instead. The prompt
   whose turn it is takes tokens until its quantum is spent or it is done, then the next
   one's turn comes. A turn outlives the step: what is left of a quantum is the sequence's
   `deficit`. So a short prompt waits for at most one quantum of each other prompt.
5. When cells are short, the sequence of the worst rank gives up its own.

Source: Shreedhar and Varghese, Efficient Fair Queuing using Deficit Round Robin, 1995.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from types import MappingProxyType
from typing import Literal

from pyllama_raw.core.costs import StepBudget
from pyllama_raw.core.request import Lot, border, span_at
from pyllama_raw.core.scheduling.lots import (
    Groups,
    LotGroup,
    LotTurns,
    Suspects,
    by_lot,
    divided,
    n_least,
)
from pyllama_raw.core.scheduling.roster import Roster
from pyllama_raw.core.scheduling.speculation import Speculation
from pyllama_raw.core.sequence import NO_LIMIT, Running
from pyllama_raw.core.step import (
    Decode,
    Prefill,
    PrefillSpan,
    ScoredPrefill,
    StepPlan,
    Work,
)

MAX_WITHOUT = 8  # steps in a row in which streams leave prompts nothing
PATIENCE = 4  # steps of shorter prompts for one of the prompt that came first
NO_CAPS: Mapping[int, int] = MappingProxyType({})

BudgetMode = Literal["balanced", "latency_first", "throughput_first"]
PrefillOrder = Literal["shortest", "turns"]

new = tuple.__new__  # makes a NamedTuple in half the time, where there is one a token


class Packer:
    """Chooses works of the sequences that run."""

    def __init__(
        self,
        roster: Roster,
        suspects: Suspects,
        budget: StepBudget,
        make_turns: Callable[[], PrefillTurns],
        mode: BudgetMode,
    ) -> None:
        self.prefill_cap: int | None = None  # after a step that found no space
        self.budget: int | None = None  # tokens of the last plan, if prompts share it
        self.lots = LotTurns()
        self.speculation: Speculation | None = None
        self._roster = roster
        self._memory = roster.memory
        self._slots = roster.slots
        self._suspects = suspects
        self._budget = budget
        self._make_turns = make_turns
        self._mode = mode
        self._n_without = 0  # steps in a row in which streams left prompts nothing
        self._next_stream = 0  # slot of the stream that has waited longest for its turn
        self._turns: dict[Lot, PrefillTurns] = {}

    def pack(self, now: float) -> StepPlan:
        """A plan without moves; makes moves where it needs cells."""
        self.budget = None
        streams, prompts, replays = self._ready(now)
        if not (streams or prompts):
            return StepPlan()
        groups = self._groups(streams, prompts)
        lot = self.lots.pick(groups, now)
        decodes, prompts = groups[lot]
        n_prefill = 0
        if prompts:
            # Lots of rows and of tokens take turns, so a stream waits for all of them.
            n_turns = len(groups) if self._roster.n_with_spans else 1
            decodes, n_prefill = self._division(decodes, len(streams), prompts, n_turns)
        # Output that is known is computed again, token by token.
        works = _replay(decodes) if replays else _decode(decodes)
        if n_prefill:
            if lot not in self._turns:
                turns = self._turns.items()
                self._turns = {key: turn for key, turn in turns if key in groups}
                self._turns[lot] = self._make_turns()
            if lot.is_whole:
                # Rows that see each other are computed at once, whatever the budget.
                prompt = self._turns[lot].pick(prompts)
                works.append(_prefill(prompt, n_least(prompt)))
            else:
                n_decodes, n_streams = len(decodes), len(streams)
                works += self._prefills(lot, n_decodes, n_streams, prompts, n_prefill)
        is_sure_to_change = self._suspects.all or replays or len(groups) > 1
        steady = not is_sure_to_change and self._is_steady(works, decodes, prompts)
        plan = StepPlan((), tuple(works), lot, steady)
        if self.speculation is not None:
            alone = not (is_sure_to_change or prompts or self.prefill_cap)
            return self.speculation.extend(plan, decodes, alone=alone)
        return plan

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
        Sequences that go on by one token, and prompts; preempts until the former fit.

        Also whether one of the former computes output again that is known.
        """
        while True:
            streams: list[Running] = []
            prompts: list[Running] = []
            replays = False
            for running in self._slots.running.values():
                # It waits for a leader, for a file, or for its source.
                if running.leader is not None or running.fetch_id is not None:
                    continue
                if not running.is_read:
                    continue
                if running.points:
                    self._memory.reach(running)
                if len(running.tokens) - running.n_computed == 1:
                    streams.append(running)
                elif running.n_computed < running.sequence.n_chunked:
                    prompts.append(running)
                else:
                    streams.append(running)
                    replays = True
            if self._suspects.all:
                streams, prompts = self._suspects.narrow(streams, prompts)
            n_cells = len(streams)
            # Without streams one prompt at least has to go on.
            if not streams and prompts:
                has_spans = self._roster.n_with_spans
                n_cells = min(map(n_least, prompts)) if has_spans else 1
            # Each turn preempts a running sequence, so the loop ends.
            if n_cells <= self._room_for(n_cells) or not self._slots.running:
                return streams, prompts, replays
            self._roster.make_room(now)

    def _groups(self, streams: list[Running], prompts: list[Running]) -> Groups:
        """Sequences that can be computed, by lot."""
        lots, n_streams = self._roster.lots, len(streams)
        if len(lots) > 1 or self._roster.n_with_spans:
            # A whole span needs many cells beside those of streams.
            n_most = max(map(n_least, prompts), default=0)
            if n_most > 1:
                n_free = max(self._room_for(n_streams + n_most) - n_streams, 1)
                prompts = [prompt for prompt in prompts if n_least(prompt) <= n_free]
            groups = by_lot(streams, prompts)
        else:
            groups = dict.fromkeys(lots, LotGroup(streams, prompts))
        if self._slots.limits.deterministic:
            groups = divided(groups)
        # Streams of other lots need the cells that are left.
        if len(groups) > 1 and self._room_for(n_streams + 1) <= n_streams:
            groups = {lot: group for lot, group in groups.items() if group.streams}
        return groups

    def _room_for(self, n_cells: int) -> int:
        """Cells that are free, after idle slots have given theirs if *n_cells* are not."""
        if self._slots.n_free_cells < n_cells:
            self._memory.reclaim(n_cells)
        return self._slots.n_free_cells

    # -- how much ----------------------------------------------------------------

    def _division(
        self,
        decodes: list[Running],
        n_streams: int,
        prompts: list[Running],
        n_turns: int,
    ) -> tuple[list[Running], int]:
        """The *decodes* that go on beside prompts, and the tokens of the prompts."""
        captures = self._memory.captures
        n_ready = len(decodes)
        total = self._budget.limit(
            n_ready,
            n_streams,
            [running.n_behind for running in prompts],
            n_turns=n_turns,
            spent_s=captures.spent_s,
        )
        captures.reserve_slack()
        # Prompts that have had nothing for many steps get some, whatever the mode.
        mode = "balanced" if self._n_without >= MAX_WITHOUT else self._mode
        if mode != "throughput_first":  # no stream waits
            n_floor = max(total // 8, 1) if mode == "balanced" else 0
            total = max(total, n_ready + n_floor)
        self.budget = total
        n_decodes, n_prefill = divide(mode, n_ready, total)
        self._n_without = 0 if n_prefill else self._n_without + 1
        if n_decodes < n_ready:
            # Streams that have to wait take turns, by slot.
            slots = [running.slot for running in decodes]
            ahead = [slot for slot in slots if slot >= self._next_stream]
            slots = [*ahead, *slots][:n_decodes]
            self._next_stream = slots[-1] + 1
            decodes = [running for running in decodes if running.slot in slots]
        return decodes, n_prefill

    def _prefills(
        self,
        lot: Lot,
        n_decodes: int,
        n_streams: int,
        prompts: list[Running],
        n_tokens: int,
    ) -> list[Work]:
        """Chunks of *prompts*, *n_tokens* at most, beside *n_decodes* of streams."""
        # A policy may have some wait, and others take less.
        limits, caps = self._slots.limits, dict[int, int]()
        if self._roster.policy is not None:
            policy, goes_on = self._roster.policy, n_decodes > 0
            prompts, caps = policy.quotas(prompts, all_may_wait=goes_on)
        # Scored prompts need a row for each token: those that streams leave.
        n_rows = (limits.n_outputs or limits.n_slots) - n_decodes
        if any(running.sequence.is_scoring for running in prompts):
            share_rows(n_rows, prompts, single=lot.is_single)
        # As many as there are, as fit the batch, and as have cells beside streams.
        n_behind = sum([len(r.tokens) - r.n_computed for r in prompts])
        n_left = min(n_tokens, n_behind)
        if self.prefill_cap is not None:
            n_left = min(n_left, self.prefill_cap)
        n_free = self._room_for(n_streams + n_left) - n_streams
        budget = min(n_left, limits.n_batch - n_decodes, n_free)
        if budget < 1:
            return []
        turns = self._turns[lot]
        shares = turns.share(budget, prompts, single=lot.is_single, caps=caps)
        shares = without_rest(shares, n_decodes, limits.n_ubatch)
        return [_prefill(r, n) for r in prompts if (n := shares.get(r.slot, 0))]

    # -- what comes next -----------------------------------------------------------

    def _is_steady(
        self, works: list[Work], decodes: list[Running], prompts: list[Running]
    ) -> bool:
        """Whether the next plan will have just the next token of all *works*."""
        if prompts:
            # All that run have a row, in the order of the next plan, and nobody comes.
            slots = [work.slot for work in works]
            if not (
                len(works) == len(self._slots.running)
                and slots == sorted(slots)
                and all(w.samples and type(w) is not ScoredPrefill for w in works)
                and not any(running.points for running in prompts)
                and not self._roster.could_start
            ):
                return False
        # None has its last token, or a full slot, after the step.
        return min([r.n_full - len(r.tokens) for r in (*decodes, *prompts)]) > 1


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
    spans = running.request.spans
    if spans and (span := span_at(spans, start)) is not None:
        n_before = start - spans[span].start
        return PrefillSpan(request_id, slot, pos, chunk, span, n_before)
    # Tokens whose successors have a score, or need none, are computed without rows.
    if sequence.is_scoring and (n_plain := sequence.n_unscored - start) < n_tokens:
        targets = tokens[start + n_plain + 1 : end + 1]
        return ScoredPrefill(request_id, slot, pos, chunk, samples, targets, n_plain)
    return Prefill(request_id, slot, pos, chunk, samples)


def divide(mode: BudgetMode, n_streams: int, total: int) -> tuple[int, int]:
    """Tokens of streams and tokens of the prompts beside them, *total* together."""
    n_most = total
    if mode == "balanced":
        n_most = max(total - 1, 1)
    elif mode == "throughput_first":
        n_most = max(total - total * 3 // 4, 1)
    n_streams = min(n_streams, n_most)
    return n_streams, total - n_streams


class PrefillTurns:
    """
    Divides a step among prompts, and remembers between steps whose turn it is.

    Args:
        order: `shortest` looks at what prompts have left, `turns` at a quantum of each.
        quantum: tokens of a turn.
    """

    def __init__(self, order: PrefillOrder, quantum: int) -> None:
        self._order = order
        self._quantum = quantum if order == "turns" else NO_LIMIT
        self._turn = 0  # slot that goes first
        self._last_turn = 0  # the one that went first the last time
        self._n_passed = 0  # tokens by which others passed the first one
        self._last_passed = 0  # those before the last time

    def share(
        self,
        budget: int,
        prompts: Items[Running],
        *,
        single: bool = False,
        caps: Mapping[int, int] = NO_CAPS,
    ) -> dict[int, int]:
        """
        Divide *budget* tokens among *prompts*.

        Args:
            prompts: sequences with a slot and more than one token behind, by slot.
            single: whether only one may have tokens.
            caps: the most tokens of some, two or more, by slot.

        Returns:
            Tokens by slot; they sum up to the budget unless no prompt can take more.
        """
        *_, first = min([(r.sequence.rank, r.slot, r) for r in prompts])
        ring = self._ring(prompts, first, budget)
        shares: dict[int, int] = {}
        while ring and budget > 0:
            running = ring[0]
            slot = running.slot
            # Its turn begins, unless it goes on from an earlier step.
            if running.deficit == 0:
                running.deficit = self._quantum
            n_shared = shares.get(slot, 0)
            ready = n_ready(running)
            if slot in caps:
                ready = min(ready, caps[slot])
            missing = ready - n_shared
            # Better two tokens in the next step than one in this.
            if shares and (budget == 1 < missing or (single and slot not in shares)):
                break
            share = min(budget, running.deficit)
            chunk = chunk_size(n_shared + share, ready, n_shared + budget)
            shares[slot], n_tokens = chunk, chunk - n_shared
            budget -= n_tokens
            running.deficit = max(running.deficit - n_tokens, 0)
            # Its turn ends when it has all, or has spent its quantum.
            if n_tokens == missing:
                running.deficit = 0
                ring.popleft()
            elif running.deficit == 0:
                ring.rotate(-1)
        if ring:
            self._turn = ring[0].slot
        self._n_passed += sum(shares.values()) - shares.get(first.slot, 0)
        return shares

    def pick(self, prompts: Items[Running]) -> Running:
        """The prompt whose turn it is, where a turn is one work."""
        *_, first = min([(r.sequence.rank, r.slot, r) for r in prompts])
        prompt = self._ring(prompts, first, n_least(first))[0]
        self._turn = prompt.slot + 1
        self._n_passed += n_least(prompt) if prompt is not first else 0
        return prompt

    def repeat(self) -> None:
        """Take back the last turn, because it was not computed."""
        self._turn, self._n_passed = self._last_turn, self._last_passed

    def _ring(
        self, prompts: Items[Running], first: Running, budget: int
    ) -> deque[Running]:
        """*prompts* in the order in which they have tokens of this step."""
        self._last_turn, self._last_passed = self._turn, self._n_passed
        if self._order == "shortest":
            by_length = sorted(
                (len(r.tokens) - r.n_computed, r.sequence.rank, r.slot, r)
                for r in prompts
            )
            ring = deque([running for *_, running in by_length])
            # The one that came first has waited for enough others: this step is its own.
            if self._n_passed >= PATIENCE * budget:
                self._n_passed = 0
                ring.remove(first)
                ring.appendleft(first)
            return ring
        # From the one on whose turn it is.
        ring = deque(prompts)
        for _ in range(len(ring)):
            if ring[0].slot >= self._turn:
                break
            ring.rotate(-1)
        return ring


def n_ready(running: Running) -> int:
    """
    Tokens *running* may compute in one step.

    Chunks end at its points and have text or rows of one span. While it is scored each
    token takes an output row, but for the first ones, whose successors need no score.
    """
    sequence, n_computed = running.sequence, running.n_computed
    n_ready = sequence.n_in_chunks - n_computed
    # A snapshot is taken at the next point, between two chunks.
    if running.points:
        n_ready = running.points[0] - n_computed
    # Tokens and rows share no decode.
    spans = running.request.spans
    if spans and (end := border(spans, n_computed)) is not None:
        n_ready = min(n_ready, end - n_computed)
    # As many as there are rows for, beside those that need none.
    if sequence.is_scoring:
        n_most = sequence.n_unscored - n_computed + running.max_rows
        n_ready = chunk_size(n_most, n_ready, n_most)
    return n_ready


def chunk_size(share: int, n_ready: int, budget: int) -> int:
    """*share* tokens of *n_ready*, or one more or less where one would be left alone."""
    n_tokens = min(max(share, 2), n_ready, budget)
    # One would be left: it joins, or another one stays with it.
    if n_ready - n_tokens == 1:
        n_tokens = n_ready if n_ready <= budget else max(n_tokens - 1, min(2, budget))
    return n_tokens


def without_rest(
    shares: dict[int, int], n_decodes: int, n_ubatch: int
) -> dict[int, int]:
    """*shares* of a step that micro-batches divide, none of which is a single token."""
    n_tokens = n_decodes + sum(shares.values())
    if not 2 < n_ubatch < n_tokens or n_tokens % n_ubatch != 1:
        return shares
    # The largest share gives two tokens to a later step, which are none alone either.
    slot = max(shares, key=shares.__getitem__)
    return shares | {slot: shares[slot] - 2} if shares[slot] > 3 else shares


def share_rows(n_rows: int, prompts: Items[Running], *, single: bool = False) -> None:
    """
    Divide *n_rows* output rows among *prompts*, of which some are scored: one for each other.

    Where only one of them gets into the step, it has all.
    """
    scoring = [running for running in prompts if running.sequence.is_scoring]
    n_free = n_rows - (len(prompts) - len(scoring))
    n_each = n_rows if single else n_free // len(scoring)
    for running in scoring:
        running.max_rows = max(n_each, 1)
