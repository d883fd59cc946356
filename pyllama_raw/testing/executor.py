"""
Runs plans on lists instead of a context, and asserts what a context would.

`FakeMemory` is the KV memory of a context, on lists.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import count
from threading import Event
from typing import NamedTuple

from pyllama_raw import SamplingParams
from pyllama_raw.core.memory.slots import ContextLimits
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.request import (
    DRAFTS,
    SOURCES,
    Request,
    SamplerUse,
    Spans,
    TokenLogprobs,
)
from pyllama_raw.core.stats import StepTimes
from pyllama_raw.core.step import (
    Computed,
    Copy,
    Decode,
    DecodeStatus,
    Delete,
    Fetch,
    Fetched,
    FileMove,
    Load,
    Lost,
    Move,
    Output,
    PartlyComputed,
    PrefillSpan,
    Propose,
    Proposed,
    ReadSource,
    Release,
    RowFailed,
    Sampled,
    Save,
    Saved,
    Scored,
    ScoredPrefill,
    Shift,
    Snapshot,
    StepPlan,
    StepResult,
    Trim,
    Verify,
    Work,
    Written,
)
from pyllama_raw.engine.mailbox import AbortGate
from pyllama_raw.errors import DecodeFailed, SamplingFailed

HEAD_BYTES, TOKEN_BYTES = 4, 10  # of a snapshot here

Payload = tuple[tuple[int, int], ...]  # (position, token) of each row


class Columns(NamedTuple):
    """The rows of a slot; copies share cells, as unified KV does."""

    cells: list[int]  # their numbers
    tokens: list[int]
    positions: list[int]  # never falling

    def part(self, start: int, stop: int) -> Columns:
        """Rows of the positions [start, stop)."""
        first, end = (bisect_left(self.positions, pos) for pos in (start, stop))
        return Columns(*(column[first:end] for column in self))

    @property
    def payload(self) -> Payload:
        return tuple(zip(self.positions, self.tokens, strict=True))

    def end_at(self, pos: int) -> bool:
        """Whether *pos* comes next, as far as rows tell: a span has room behind it."""
        if not self.tokens:
            return pos == 0
        last = self.positions[-1]
        return pos == last + 1 or (self.tokens[-1] < 0 and pos > last)


class FakeFile(NamedTuple):
    """The file that a write leaves."""

    number: int
    rows: Payload

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for _, token in self.rows)

    @property
    def n_bytes(self) -> int:
        return HEAD_BYTES + TOKEN_BYTES * len(self.rows)


class FakeMemory:
    """
    Does memory operations and asserts what libllama would.

    Args:
        fails: asked before each save, fetch, load and trim; true: it fails. A trim that
            fails is refused, and from the next run() on must not be asked for.
    """

    def __init__(
        self,
        limits: ContextLimits,
        fails: Callable[[Move], bool] = lambda _: False,
    ) -> None:
        self.limits = limits
        n_slots = limits.n_slots + limits.n_parked
        self.slots = [Columns([], [], []) for _ in range(n_slots)]
        self._n_users = Counter[int]()  # slots that have a cell
        self.shifted: set[int] = set()  # slots whose tokens are no prefix any more
        self._fails = fails
        self.files: set[FakeFile] = set()  # complete ones
        self.writing: list[tuple[int, FakeFile | None]] = []  # until end_write()
        self.reading: list[tuple[int, FakeFile | None]] = []  # until end_fetch()
        self._numbers = count()
        self.refuses_cuts = False  # has refused one
        self._must_not_cut = not limits.kind.can_cut
        self._lost: set[int] = set()
        self._saved: dict[int, Saved] = {}

    @property
    def n_used(self) -> int:
        """Distinct cells."""
        return len(self._n_users)

    def tokens(self, slot: int) -> list[int]:
        """Tokens of a slot; the list grows with it."""
        return self.slots[slot].tokens

    def write(self, slot: int, tokens: Iterable[int], pos: int | None = None) -> None:
        """
        Fill new cells.

        Args:
            pos: of the first token; None: the next one. Tokens below 0 stand for rows of a
                span, which all have the position of the first one.
        """
        pos = self._highest(slot) + 1 if pos is None else pos
        rows = ((pos + i if t >= 0 else pos, t) for i, t in enumerate(tokens))
        self._fill(slot, rows)

    def _fill(self, slot: int, rows: Iterable[tuple[int, int]]) -> None:
        columns = self.slots[slot]
        for pos, token in rows:
            assert columns.end_at(pos) or (token < 0 and pos == columns.positions[-1])
            number = next(self._numbers)
            columns.cells.append(number)
            columns.tokens.append(token)
            columns.positions.append(pos)
            self._n_users[number] = 1
        assert len(columns.cells) <= self.limits.n_ctx_slot

    def _put(self, slot: int, rows: Columns) -> None:
        """Have a slot hold *rows* instead of what it holds."""
        self._n_users.update(rows.cells)
        for number in self.slots[slot].cells:
            self._n_users[number] -= 1
            if not self._n_users[number]:
                del self._n_users[number]
        self.slots[slot] = rows

    def _highest(self, slot: int) -> int:
        """The position of the last row, as seq_pos_max says; -1: there is none."""
        return max(self.slots[slot].positions[-1:], default=-1)

    def empty(self, slot: int) -> None:
        """Forget all of a slot."""
        self._put(slot, Columns([], [], []))
        self.shifted.discard(slot)

    def clear(self) -> None:
        for slot in range(len(self.slots)):
            self.empty(slot)

    def run(self, moves: Iterable[Move]) -> tuple[dict[int, Saved], frozenset[int]]:
        """Do all in order; what was saved in host memory, and slots that are empty."""
        self._lost, self._saved = set(), {}
        for move in moves:
            self._do(move)
        self._must_not_cut = self._must_not_cut or self.refuses_cuts
        return self._saved, frozenset(self._lost)

    def _do(self, move: Move) -> None:
        match move:
            case Release(slot):
                self.empty(slot)
                self._lost.discard(slot)
            case Trim():
                self._trim(move)
            case Shift():
                self._shift(move)
            case Copy():
                self._copy(move)
            case Save():
                self._save(move)
            case Load():
                self._load(move)
            case Fetch() | Delete():
                self._do_with_files(move)

    def _do_with_files(self, move: FileMove) -> None:
        match move:
            case Fetch(fetch_id, file):
                assert isinstance(file, FakeFile)
                is_read = file in self.files and not self._fails(move)
                self.reading.append((fetch_id, file if is_read else None))
            case Delete(payloads):
                self.files.difference_update(payloads)

    def _trim(self, trim: Trim) -> None:
        slot, n_pos = trim
        columns = self.slots[slot]
        head = columns.part(0, n_pos)
        assert head.end_at(n_pos) or slot in self._lost
        self._check_cut(slot, head)
        if 0 < len(head.cells) < len(columns.cells) and self._fails(trim):
            head = Columns([], [], [])
            self._lost.add(slot)
            self.refuses_cuts = True
        self._put(slot, head)

    def end_write(self, *, fails: bool = False) -> Written:
        """Complete the oldest file, or fail; what the scheduler is to be told."""
        save_id, file = self.writing.pop(0)
        if fails or file is None:
            return Written(save_id, None)
        self.files.add(file)
        return Written(save_id, Saved(file, file.n_bytes))

    def end_fetch(self, *, fails: bool = False) -> Fetched:
        """Have the oldest file read, or fail; what the scheduler is to be told."""
        fetch_id, file = self.reading.pop(0)
        if fails or file is None:
            return Fetched(fetch_id, None, 0.0)
        return Fetched(fetch_id, file.rows, 0.0)

    def _check_cut(self, slot: int, head: Columns) -> None:
        if self._must_not_cut:
            assert not head.cells or head == self.slots[slot], (
                "this memory cannot be cut"
            )

    def _shift(self, shift: Shift) -> None:
        assert self.limits.can_shift
        columns = self.slots[shift.slot]
        is_own = all(self._n_users[number] == 1 for number in columns.cells)
        assert is_own, "shared cells keep their position"
        assert columns.positions == list(range(len(columns.cells)))
        end = shift.n_keep + shift.n_discard
        assert end <= len(columns.cells)
        cells, tokens, _ = (c[: shift.n_keep] + c[end:] for c in columns)
        self._put(shift.slot, Columns(cells, tokens, list(range(len(cells)))))
        self.shifted.add(shift.slot)

    def _copy(self, copy: Copy) -> None:
        assert not self.slots[copy.dst].cells, "copies go to empty slots"
        assert copy.src not in self.shifted
        if copy.src in self._lost:
            self._lost.add(copy.dst)
            return
        rows = self.slots[copy.src].part(0, copy.n_pos)
        assert rows.end_at(copy.n_pos)
        self._check_cut(copy.src, rows)
        if self.limits.unified:
            self._put(copy.dst, rows)
        else:
            self._fill(copy.dst, rows.payload)

    def _save(self, save: Save) -> None:
        payload = self._payload(save)
        if save.tier.is_file:
            file = None
            if payload is not None:
                file = FakeFile(save.save_id, payload)
                assert save.key is not None
                assert array("i", file.tokens).tobytes() == save.key.tokens
                assert_keyed(file.tokens, save.key.spans)
                assert file.n_bytes <= save.max_bytes
            self.writing.append((save.save_id, file))
        elif payload is not None:
            n_bytes = HEAD_BYTES + TOKEN_BYTES * len(payload)
            if n_bytes <= save.max_bytes:
                self._saved[save.save_id] = Saved(payload, n_bytes)

    def _payload(self, save: Save) -> Payload | None:
        """The rows that are to be saved; None: the save fails."""
        source, is_on_disk = save.source, save.tier.is_file
        if isinstance(source, Snapshot):
            assert isinstance(source.payload, tuple)
            return source.payload
        if source in self._lost or self._fails(save):
            return None
        columns = self.slots[source]
        rows = columns.part(save.start, save.stop)
        assert rows.positions[0] == save.start
        assert rows.end_at(save.stop)
        if is_on_disk or self.limits.kind is SnapshotKind.EXACT:
            assert rows == columns, "all of the slot"
        elif not self.limits.kind.can_cut:
            assert rows.cells[-1] == columns.cells[-1], (
                "what holds at the end of the slot"
            )
        return rows.payload

    def _load(self, load: Load) -> None:
        slot = load.slot
        if self._fails(load):
            self._put(slot, Columns([], [], []))
            self._lost.add(slot)
            return
        for piece in load.pieces:
            assert isinstance(piece.payload, tuple)
            assert self.slots[slot].end_at(piece.start), "a slot has all before"
            rows = [row for row in piece.payload if piece.start <= row[0] < piece.stop]
            if not self.limits.kind.can_cut:
                assert rows == list(piece.payload)
            self._fill(slot, rows)
            assert self.slots[slot].end_at(piece.stop)
        assert self._highest(slot) == load.last_pos


def assert_keyed(tokens: Sequence[int], spans: Spans) -> None:
    """Other engines know rows by keys, so each span has one and is whole."""
    assert all(span.key for span in spans)
    rows = [index for span in spans for index in range(span.start, span.stop)]
    assert rows == [index for index, token in enumerate(tokens) if token < 0]


NextToken = Callable[[Sequence[int]], int]


def letters(tokens: Sequence[int]) -> int:
    """A letter that depends on all *tokens*, whatever runs beside."""
    return ord("a") + (sum(tokens) * 31 + len(tokens) * 7) % 26


def fake_logprobs(n_before: int, token: int, n_top: int) -> TokenLogprobs:
    """Log probabilities that the fake model gives *token* after *n_before* others."""
    logprob = -n_before / 8
    top = tuple((token + i, logprob - i) for i in range(n_top))
    return TokenLogprobs(token, logprob, top)


class FakeFlag:
    """An abort flag that can be waited for."""

    def __init__(self) -> None:
        self._event = Event()

    def set(self) -> None:
        self._event.set()

    def clear(self) -> None:
        self._event.clear()

    @property
    def is_set(self) -> bool:
        return self._event.is_set()

    def wait(self, timeout_s: float) -> bool:
        """Stand in for a long decode that polls the flag."""
        return self._event.wait(timeout_s)


class FakeDrafts:
    """
    A draft model on lists.

    Args:
        next_token: the model; gets all tokens of the slot, and says one and its probability.
        seconds: of a decode of so many tokens.
        fails: asked before each step; true: it fails, and its slots are lost.
    """

    def __init__(
        self,
        n_slots: int,
        next_token: Callable[[Sequence[int]], tuple[int, float]],
        seconds: Callable[[int], float] = lambda _: 0.25,
        fails: Callable[[int], bool] = lambda _: False,
    ) -> None:
        self.slots: list[list[int]] = [[] for _ in range(n_slots)]
        self.n_steps = 0
        self._next_token, self._seconds, self._fails = next_token, seconds, fails

    def run(self, plan: StepPlan) -> StepResult:
        """Drafts of each work of *plan*."""
        works = [work for work in plan.works if isinstance(work, Propose)]
        assert len(works) == len(plan.works)
        assert len({work.n_drafts for work in works}) == 1
        self.n_steps += 1
        if self._fails(self.n_steps):
            for work in works:
                self.slots[work.slot].clear()
            error = DecodeFailed("fake", -3, "as told")
            return StepResult(outputs=(Lost(),) * len(works), error=error)
        depth = works[0].n_drafts
        sizes = [plan.n_tokens] + [len(works)] * (depth - 1)
        return StepResult(
            outputs=tuple(self._output(work) for work in works),
            draft_s=tuple(map(self._seconds, sizes)),
        )

    def _output(self, work: Propose) -> Output:
        content = self.slots[work.slot]
        # Its context is another one, as after a sleep.
        if work.pos > len(content):
            content.clear()
            return Lost()
        content[work.pos :] = work.tokens
        drafts = list[tuple[int, float]]()
        for _ in range(work.n_drafts):
            content += [token for token, _ in drafts[-1:]]
            drafts.append(self._next_token(content))
        if not drafts:
            return Computed()
        tokens, chances = zip(*drafts, strict=True)
        return Proposed(tokens, chances)


class FakeExecutor:
    """
    Runs plans on lists instead of a context.

    Args:
        next_token: the sampler; gets all tokens of the slot.
        failures: what the decode of the n-th step ends with, instead of OK.
        poison: what a decode ends with if it has a work of that request_id.
        failing_rows: (step, request_id) whose sampler fails.
        on_step: called with the step's number and plan before it is computed.
        n_more: tokens that a work without drafts samples beyond the first, where memory has room.
        drafts: the draft model; None: plans have no works of one.
    """

    def __init__(
        self,
        limits: ContextLimits,
        flag: FakeFlag | None = None,
        *,
        next_token: NextToken = letters,
        failures: Mapping[int, DecodeStatus] | None = None,
        poison: Mapping[int, DecodeStatus] | None = None,
        failing_rows: frozenset[tuple[int, int]] = frozenset(),
        on_step: Callable[[int, StepPlan], None] | None = None,
        n_more: Callable[[Work], int] = lambda _: 0,
        drafts: FakeDrafts | None = None,
    ) -> None:
        self.limits = limits
        self.flag = flag or FakeFlag()
        self._gate = AbortGate()
        self.n_steps = self.n_warm_ups = 0
        self.is_suspended = False
        self.plans: list[StepPlan] = []
        self.memory = FakeMemory(limits)
        self._requests: dict[int, Request] = {}  # those that are open
        self._sources: dict[
            int, Sequence[int]
        ] = {}  # by slot, of the last that were read
        self._next_token = next_token
        self._failures = dict(failures or {})
        self._poison = dict(poison or {})
        self._failing_rows = failing_rows
        self._on_step = on_step
        self._n_more = n_more
        self.drafts = drafts

    @property
    def times(self) -> StepTimes:
        return StepTimes()

    @property
    def opened(self) -> set[int]:
        """Requests that are open."""
        return set(self._requests)

    def open(self, request: Request) -> None:
        assert request.request_id not in self._requests
        self._requests[request.request_id] = request

    def close(self, request_id: int) -> SamplerUse | None:
        """Tells that the tokens came from the host, for known ids."""
        sampler = self._requests.pop(request_id, None)
        return SamplerUse("host", "it is a fake") if sampler is not None else None

    def stop(self, request_id: int | None = None) -> None:
        """Set the flag if nobody wants the running step."""
        self._gate.stop(request_id)

    def suspend(self) -> object:
        """The lists, which are back after resume()."""
        state, self.memory = self.memory, FakeMemory(self.limits)
        self.is_suspended, self._sources = True, {}
        return state

    def resume(self, state: object) -> bool:
        assert self.is_suspended
        assert isinstance(state, FakeMemory)
        self.memory, self.is_suspended = state, False
        return True

    def rebuild(self) -> None:
        self.memory.clear()
        self._sources = {}

    def warm_up(self) -> bool:
        self.n_warm_ups += 1
        self._sources = {}
        return True

    def execute(self, plan: StepPlan) -> StepResult:
        assert not self.is_suspended
        self._gate.enter(plan.works, self.flag)
        try:
            return self._execute(plan)
        finally:
            self._gate.leave()

    def _execute(self, plan: StepPlan) -> StepResult:
        """Check *plan* against the memory, then compute it or fail as told."""
        step, self.n_steps = self.n_steps, self.n_steps + 1
        self.plans.append(plan)
        saved, lost = self.memory.run(plan.moves)
        assert not lost
        if plan.lot == DRAFTS:
            return self._propose(step, plan)._replace(saved=saved)
        self._check(plan)
        if self._on_step is not None:
            self._on_step(step, plan)
        failing = self._failures if plan.works else {}  # else there is no decode
        status = failing.get(step, DecodeStatus.OK)
        for work in plan.works:
            status = self._poison.get(work.request_id, status)
        if plan.works and self.flag.is_set:
            status = DecodeStatus.ABORTED
        elif status is DecodeStatus.OK and self._is_full(plan):
            status = DecodeStatus.NO_SPACE
        return self._finish(step, plan, status)._replace(saved=saved)

    def _propose(self, step: int, plan: StepPlan) -> StepResult:
        if self._on_step is not None:
            self._on_step(step, plan)
        assert self.drafts is not None
        for work in plan.works:
            request = self._requests[work.request_id]
            assert request.speculates
            assert not request.spans
            assert work.tokens
        return self.drafts.run(plan)

    def _finish(self, step: int, plan: StepPlan, status: DecodeStatus) -> StepResult:
        match status:
            case DecodeStatus.OK:
                return self._compute(step, plan)
            case DecodeStatus.NO_SPACE:
                return StepResult(status)
            case DecodeStatus.ABORTED:
                return self._abort(plan)
            case DecodeStatus.INVALID:
                return StepResult(status, error=DecodeFailed("fake", -1, "as told"))
            case DecodeStatus.FAILED:
                self.memory.clear()
                self._sources = {}
                return StepResult(status, error=DecodeFailed("fake", -3, "as told"))

    def _abort(self, plan: StepPlan) -> StepResult:
        """Half of the works are computed; a last token without its row is dropped."""
        n_done = len(plan.works) // 2
        lengths = [
            0 if type(work) is Verify else len(work.tokens) - work.samples
            for work in plan.works[:n_done]
        ]
        for work, n_held in zip(plan.works, lengths, strict=False):
            if plan.lot != SOURCES:
                self._write(work, n_held)
        lengths += [0] * (len(plan.works) - n_done)
        return StepResult(DecodeStatus.ABORTED, tuple(map(PartlyComputed, lengths)))

    def _compute(self, step: int, plan: StepPlan) -> StepResult:
        if plan.lot == SOURCES:
            self._sources = {work.slot: work.tokens for work in plan.works}
        return StepResult(
            outputs=tuple(self._output(step, work) for work in plan.works)
        )

    def _output(self, step: int, work: Work) -> Output:
        if type(work) is ReadSource:
            return Computed()
        before = len(self.memory.tokens(work.slot))
        self._write(work, 1 if type(work) is Verify else len(work.tokens))
        params = self._requests[work.request_id].sampling
        sampling = params if isinstance(params, SamplingParams) else SamplingParams()
        output = self._sample(step, work, sampling.logprobs)
        if type(work) is not ScoredPrefill:
            return output
        n_top = sampling.prompt_logprobs or 0
        scores = (
            fake_logprobs(place, token, n_top)
            for place, token in enumerate(work.targets, before + work.n_plain + 1)
        )
        return Scored(tuple(scores), output)

    def _write(self, work: Work, n_tokens: int) -> None:
        """Fill cells."""
        self.memory.write(work.slot, work.tokens[:n_tokens], work.pos)

    def _sample(
        self, step: int, work: Work, n_top: int | None
    ) -> Sampled | RowFailed | Computed:
        if not work.samples:
            return Computed()
        if (step, work.request_id) in self._failing_rows:
            return RowFailed(SamplingFailed("fake", None, "as told"))
        history = self.memory.tokens(work.slot)
        n_before, tokens = len(history), tuple[int, ...]()
        drafts = tuple(work.tokens[1:]) if type(work) is Verify else None
        n_more = self._n_more(work) if drafts is None else len(drafts)
        for left in range(n_more, -1, -1):
            tokens += (self._next_token([*self._source_of(work), *history]),)
            # A draft that is wrong leaves nothing, nor do those behind it.
            if drafts is None:
                goes_on = self._has_room(work.slot)
            else:
                goes_on = drafts[: len(tokens)] == tokens
            if not left or not goes_on:
                break
            self.memory.write(work.slot, tokens[-1:])
        if n_top is None:
            return Sampled(tokens)
        logprobs = (fake_logprobs(n, t, n_top) for n, t in enumerate(tokens, n_before))
        return Sampled(tokens, tuple(logprobs))

    def _source_of(self, work: Work) -> Sequence[int]:
        if self._requests[work.request_id].source is None:
            return ()
        return self._sources[work.slot]

    def _has_room(self, slot: int) -> bool:
        """Whether another token of *slot* leaves room for a step of all."""
        limits, memory = self.limits, self.memory
        n_free = limits.n_cells - memory.n_used if limits.unified else limits.n_cells
        is_full = len(memory.tokens(slot)) >= limits.n_ctx_slot - 1
        return n_free > limits.n_batch and not is_full

    def _is_full(self, plan: StepPlan) -> bool:
        if not self.limits.unified or plan.lot == SOURCES:
            return False
        return self.memory.n_used + plan.n_tokens > self.limits.n_cells

    def _check(self, plan: StepPlan) -> None:
        """The rules of core.step and of libllama."""
        assert plan.n_tokens <= self.limits.n_batch
        n_rows = sum(_count_rows(work) for work in plan.works)
        assert n_rows <= (self.limits.n_outputs or self.limits.n_slots)
        slots = [work.slot for work in plan.works]
        assert len(set(slots)) == len(slots), "one work a slot"
        assert_one_lot(plan, self._requests, self.limits)
        for work in plan.works:
            assert len(work.tokens) > 0
            assert work.request_id in self._requests, "open() comes first"
            request = self._requests[work.request_id]
            n_held = len(self.memory.tokens(work.slot))
            assert work.pos == row_position(request, n_held), "without a gap"
            if type(work) is not ReadSource:
                assert_one_kind(request, n_held, work)
            if request.source is not None and plan.lot != SOURCES:
                assert self._sources.get(work.slot) == request.source, (
                    "it is read first"
                )
            assert len(work.tokens) == 1 or type(work) is not Decode
            if type(work) is Verify:
                assert len(work.tokens) > 1
                assert request.speculates
                assert self.limits.kind.can_cut, "wrong drafts are cut"
                assert n_held + len(work.tokens) < self.limits.n_ctx_slot
                ends = request.stop_token_ids
                assert not ends.intersection(work.tokens[1:]), "nothing follows an end"
            assert request.lot.adapters == plan.lot.adapters


def _count_rows(work: Work) -> int:
    """Output rows of *work*; the targets are those of its tokens that have one."""
    if type(work) is Verify:
        return len(work.tokens)
    if type(work) is not ScoredPrefill:
        return int(work.samples)
    rows = work.tokens[work.n_plain :]
    assert 0 <= work.n_plain < len(work.tokens)
    assert len(work.targets) == len(rows) - work.samples
    assert work.targets[:-1] == rows[1 : len(work.targets)]
    return len(rows)


def row_position(request: Request, index: int) -> int:
    """By counting: rows of text, and spans, take positions one after the other."""
    spans = request.spans
    n_positions = sum(span.n_pos for span in spans if span.stop <= index)
    in_spans = sum(min(index, s.stop) - s.start for s in spans if s.start < index)
    return index - in_spans + n_positions


def assert_one_kind(request: Request, start: int, work: Work) -> None:
    """A work has rows of text, or of one span, and says which."""
    rows = range(start, start + len(work.tokens))
    [span] = {
        next((s for s in request.spans if s.start <= row < s.stop), None)
        for row in rows
    }
    assert (span is not None) is (type(work) is PrefillSpan)
    if type(work) is PrefillSpan:
        assert span is request.spans[work.span]
        assert work.start == start - span.start
        assert set(work.tokens) == {request.tokens[span.start]}


def assert_one_lot(
    plan: StepPlan, requests: Mapping[int, Request], limits: ContextLimits
) -> None:
    """A batch has tokens or embeddings; rows that see each other are in it alone."""
    reads = {type(work) is ReadSource for work in plan.works}
    assert reads <= {plan.lot == SOURCES}
    assert plan.lot != SOURCES or plan.n_tokens <= limits.n_source
    of_spans = [work for work in plan.works if type(work) is PrefillSpan]
    assert len(of_spans) in (0, len(plan.works))
    for work in of_spans:
        span = requests[work.request_id].spans[work.span]
        if not span.is_causal:
            assert len(plan.works) == 1
            assert work.start == 0
            assert len(work.tokens) == span.stop - span.start <= limits.n_whole_rows
