"""
Probes of a context: what its memory can do, what a snapshot of it costs, and whether libllama
computes the model at all.

A short decode tells. It runs in one thread, where an assertion of libllama that fails is an
error, and it brings the weights into memory before the first request.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf, isfinite
from time import perf_counter
from typing import TypeAlias

from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.memory.tiers import SnapshotCost
from pyllama_raw.core.speed import CopyPrice
from pyllama_raw.errors import DecodeFailed, ModelLoadFailed, Unsupported
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context
from pyllama_raw.native.libllama import EXCEPTION, check_decode, last_error
from pyllama_raw.native.model import Model
from pyllama_raw.native.pointers import new_bytes
from pyllama_raw.options.config import ContextConfig

SLACK_BYTES = 256  # of a snapshot's head, which may differ a little by slot
MAX_COPIES = 20  # of a slot, to time one
MAX_COPIES_S = 0.2  # in all, after which no other copy is timed
MUCH_CLOSER = 4.0  # a row that is another one by mistake differs from it in digits only
MAX_BESIDE = 8  # sequences that are computed beside each other
# Of the distance between rows of other tokens: rows of one sequence in batches of one shape are
# no further apart. On CPUs they are equal; mixed states of small plamo2 come to 0.015 to 0.3.
SAME_SHAPE = 0.003

Row: TypeAlias = "array[float]"


def expected_kind(model: Model, context: ContextConfig) -> SnapshotKind:
    """
    Kind that the facts of *model* state; recurrent state and windows are of use whole.

    That holds with swa_full too: libllama fills cells behind the window again when it
    needs some, and never saves them.
    """
    if model.is_recurrent or model.is_hybrid or model.n_swa > 0:
        return SnapshotKind.EXACT
    return SnapshotKind.RANGE if context.kv_unified else SnapshotKind.STATE


def measure(context: Context) -> SnapshotCost:
    """
    Measure what a snapshot of *context* costs, which is empty before and after, without lanes.

    Raises:
        ModelLoadFailed: libllama cannot compute the model.
        Unsupported: it computes the model wrongly, as its architecture is used here.
    """
    model = context.model
    with context.one_thread(), blaming(model):
        # What a snapshot costs, and whether rows are those of their tokens.
        cost = _compute(context)
        context.clear()
        if model.is_recurrent or model.is_hybrid:
            _check_sequences(context)
    return cost


@contextmanager
def blaming(model: Model) -> Iterator[None]:
    """A decode that fails by an assertion is the fault of *model*."""
    try:
        yield
    except DecodeFailed as error:
        if error.returned != EXCEPTION:
            raise
        message = f"libllama cannot compute this model: {error}"
        raise ModelLoadFailed(model.path, message) from error


def _compute(context: Context) -> SnapshotCost:
    """Two tokens, and three in another slot: one decode, if all find room in it."""
    # One decode is the usual case; a context of one slot or a few tokens needs several.
    fits = context.n_seq_max > 1 and context.max_tokens >= 5
    compute = _at_once if fits and context.n_outputs_max > 2 else _one_by_one
    cost, rows = compute(context, some_tokens(context))
    first, second, middle = rows
    # The row in the middle of a prompt must be that of its second token.
    if MUCH_CLOSER * _distance(middle, first) < _distance(middle, second):
        raise _unsupported(context, "gives out wrong rows of a prompt")
    return cost


def _at_once(context: Context, tokens: list[int]) -> tuple[SnapshotCost, list[Row]]:
    batch = Batch(5)
    batch.add_scored(tokens[:2], 0, 0)
    batch.add(tokens[:2], 0, 1, True)
    batch.add(tokens[2:], 2, 1, False)
    context.decode(batch)
    rows = [context.logits(place) for place in (0, 1, 3)]
    cost = cost_of(2, context.state_bytes(0), context.state_bytes(1))
    return replace(cost, price=_price(context)), rows


def _price(context: Context) -> CopyPrice:
    """
    Price of copies of slots 0 and 1, which hold two and three tokens in a run of cells each.

    Slot 0 then gets a cell of slot 1, too: that is the same number of cells in two runs. Without
    a pool for all slots cells of a slot always lie in one run.
    """
    base_s = _capture_s(context, 0)
    longer_s = _capture_s(context, 1)
    has_runs = context.kv_unified and not context.model.is_recurrent
    state = new_bytes(context.state_bytes(0))
    context.capture(0, state)
    runs_s = longer_s
    if has_runs:
        # A cell from behind that of the other slot makes a second run.
        context.seq_cp(1, 0, 2, 3)
        runs_s = _capture_s(context, 0)
    return CopyPrice(
        base_s,
        max(runs_s - longer_s, 0.0),
        max(longer_s - base_s, 0.0),
        _least_s(lambda: context.restore(0, state)),
    )


def _capture_s(context: Context, slot: int) -> float:
    state = new_bytes(context.state_bytes(slot))
    return _least_s(lambda: context.capture(slot, state))


def _least_s(copy: Callable[[], object]) -> float:
    """Seconds that *copy* takes at the best of many: on a busy machine most take longer."""
    least_s, spent_s = inf, 0.0
    for _ in range(MAX_COPIES):
        started = perf_counter()
        copy()
        took_s = perf_counter() - started
        least_s, spent_s = min(least_s, took_s), spent_s + took_s
        if spent_s > MAX_COPIES_S:
            break
    return least_s


def _one_by_one(context: Context, tokens: list[int]) -> tuple[SnapshotCost, list[Row]]:
    batch = Batch(2)
    n_bytes, rows = [], []
    for pos in range(2):
        batch.clear()
        batch.add(tokens[pos : pos + 1], pos, 0, True)
        context.decode(batch)
        n_bytes.append(context.state_bytes(0))
        rows.append(context.logits(0))
    # There is no second slot to compare with, but the least that a copy takes.
    base_s = _capture_s(context, 0)
    cost = replace(cost_of(1, *n_bytes), price=CopyPrice(base_s, restore_s=base_s))
    if context.max_tokens < 2:  # no prompt is ever computed in chunks
        return cost, [rows[0], rows[1], rows[1]]
    context.clear()
    batch.clear()
    batch.add(tokens[:2], 0, 0, True)
    context.decode(batch)
    return cost, [*rows, context.logits(1)]


def cost_of(n_tokens: int, n_bytes: int, one_more: int) -> SnapshotCost:
    """Cost by slots that hold *n_tokens*, and one more."""
    token_bytes = one_more - n_bytes
    head_bytes = max(n_bytes - n_tokens * token_bytes, 0)
    return SnapshotCost(head_bytes + SLACK_BYTES, token_bytes)


def _check_sequences(context: Context) -> None:
    """
    The rows of a sequence must not depend on what its neighbours are.

    Some architectures put the recurrent states of a batch where those of others are. That may
    weigh little. Therefore the sequence is computed twice in batches of the same shape, where
    kernels add in the same order: once beside neighbours with tokens like its own, which hide
    such a mistake, and once beside others.
    """
    max_tokens = context.max_tokens
    n_first = 2 if max_tokens >= 4 else 1  # tokens of each sequence in the first batch
    n_slots = min(context.n_seq_max, MAX_BESIDE, max_tokens // n_first)
    if n_slots < 2:
        return
    slots = range(context.n_seq_max - n_slots, context.n_seq_max)
    last = slots[-1]
    try:
        # The same sequence alone, in another slot, and beside equal and other neighbours.
        alone = _rows_of_last(context, {last: 0}, n_first)
        elsewhere = _rows_of_last(context, {0: 0}, n_first)
        beside_equals = _rows_of_last(context, dict.fromkeys(slots, 0), n_first)
        strangers = {slot: (last - slot) % 3 for slot in slots}
        beside_others = _rows_of_last(context, strangers, n_first)
    except DecodeFailed as error:
        raise _unsupported(
            context, "fails with several sequences: n_slots=1 works"
        ) from error
    # How far rows of other tokens are from each other, and how far rounding moves a row.
    scale = _far(alone[:-1], alone[1:])
    rounding = _far(alone, elsewhere)
    # Its rows look like those of other tokens, or move more than rounding moves them.
    is_other = MUCH_CLOSER * _far(alone, beside_others) > scale
    allowed = max(MUCH_CLOSER * rounding, SAME_SHAPE * scale)
    if is_other or _far(beside_equals, beside_others) > allowed:
        raise _unsupported(context, "mixes sequences: give n_slots=1")


def _rows_of_last(context: Context, begins: dict[int, int], n_first: int) -> list[Row]:
    """
    The rows of the last slot in a few decodes of all slots, of which nothing is left.

    Mistakes add up from one decode to the next. The last one has fewer slots, because an
    architecture may be wrong for some numbers of sequences only.

    Args:
        begins: by slot, which of some_tokens() comes first; they follow each other in turn.
        n_first: tokens of each slot in the first decode; later ones have one.
    """
    tokens = some_tokens(context)
    last = max(begins)
    rows, pos = [], 0
    # The last decode has three slots only.
    for n_tokens, n_beside in ((n_first, 0), (1, 0), (1, 0), (1, -3)):
        batch = Batch(context.max_tokens)
        for slot in sorted(begins)[n_beside:]:
            run = [tokens[(begins[slot] + pos + i) % 3] for i in range(n_tokens)]
            batch.add(run, pos, slot, slot == last)
        context.decode(batch)
        rows.append(context.logits(batch.n_tokens - 1))
        pos += n_tokens
    context.clear()
    return rows


def _far(rows: list[Row], reference: list[Row]) -> float:
    """The mean distance of *rows* from *reference*, one by one."""
    pairs = zip(rows, reference, strict=True)
    return sum(_distance(row, other) for row, other in pairs) / len(rows)


def _unsupported(context: Context, fault: str) -> Unsupported:
    name = context.model.meta.get("general.architecture", "")
    return Unsupported(
        "generation",
        f"libllama does not compute the architecture {name!r} rightly: it {fault}",
    )


def some_tokens(context: Context) -> list[int]:
    """Three tokens from the middle of the vocabulary: those at its ends may mean nothing."""
    n_vocab = context.model.n_vocab
    return [n_vocab // 3, n_vocab // 2, n_vocab * 2 // 3]


def _distance(row: Row, other: Row) -> float:
    """Distance by a few hundred numbers; not a number if one is none."""
    step = len(row) // 256 + 1
    return sum(abs(x - y) for x, y in zip(row[::step], other[::step], strict=False))


def slot_cost(context: Context) -> SnapshotCost:
    """What a slot of *context* costs; raises as measure() and measure_sources() do."""
    start = decoder_start(context.model)
    return measure(context) if start is None else measure_sources(context, start)


def decoder_start(model: Model) -> int | None:
    """
    The token that begins each output; None: *model* goes on with the prompt itself.

    Raises:
        Unsupported: the file names none.
        ModelLoadFailed: it names one that there is not.
    """
    if not model.reads_sources:
        return None
    token = model.vocab.bos if model.decoder_start is None else model.decoder_start
    if token is None:
        reason = "the file names no token that begins an output"
        raise Unsupported("generate", f"{reason}: give decoder_start_token_id")
    if token >= model.n_vocab:
        allowed = f"the vocabulary has {model.n_vocab} tokens"
        raise ModelLoadFailed(model.path, f"decoder_start_token_id={token}: {allowed}")
    return token


def measure_sources(context: Context, start: int) -> SnapshotCost:
    """
    Have *context*, which is empty before and after, read two sources and decode after them.

    Returns:
        What a slot costs.

    Raises:
        ModelLoadFailed: libllama cannot compute the model.
        Unsupported: it computes no numbers.
    """
    model, n_slots = context.model, min(context.n_seq_max, context.n_ubatch, 2)
    *source, third = some_tokens(context)
    source = source[: context.n_ubatch // n_slots]
    sizes: list[int] = []
    with context.one_thread(), blaming(model):
        # Each decode needs the sources of all slots read before it.
        for pos, token in enumerate((start, third)):
            batch = Batch(2 * n_slots)
            for slot in range(n_slots):
                batch.add_scored(source, pos, slot)
            check_decode(context.read_sources(batch).code, last_error())
            batch.clear()
            batch.add_rows([token] * n_slots, [pos] * n_slots, list(range(n_slots)))
            context.decode(batch)
            sizes.append(context.state_bytes(0))
            rows = [context.logits(row) for row in range(n_slots)]
            if not all(isfinite(value) for row in rows for value in row):
                raise Unsupported("generate", "libllama computes no numbers of it")
        context.clear()
    return cost_of(1, *sizes)
