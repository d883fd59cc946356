"""What steps did: a ring of records in memory, and a file on request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from pyllama_raw.core.scheduling.planner import Planner
from pyllama_raw.core.stats import Occupancy
from pyllama_raw.core.step import (
    Copy,
    Decode,
    DecodeStatus,
    Load,
    Save,
    StepPlan,
    StepResult,
)
from pyllama_raw.engine.records import read_records

MAX_STEPS = 16384  # kept by default

DONE = StepResult()

POS = itemgetter(Decode._fields.index("pos"))

Places = tuple[tuple[int, ...], tuple[int, ...]]  # request_ids and slots of all works
NOWHERE: Places = ((), ())


class StepRecord(NamedTuple):
    """One step; what its time depends on, and what was there after it."""

    at_s: float  # when it was planned, on the engine clock
    seconds: float  # from then until its result was taken in
    n_prefill: int  # tokens of prompts
    n_decode: int  # streams that went on by a token
    n_context: int  # cells that all its tokens looked at
    n_saved: int  # tokens captured into host memory or files
    n_loaded: int  # tokens copied or restored
    n_running: int
    n_waiting: int
    n_cells_used: int
    n_host_bytes: int = 0  # of snapshots in host memory
    n_disk_bytes: int = 0  # of files
    n_preempted: int = 0  # in this step
    budget: int | None = None  # tokens it could have; None: it had no prompt to divide
    host_s: float = 0.0  # of planning, of taking the result in and of telling it
    decode_s: float = 0.0  # in llama_decode; also what ran before it was planned
    sample_s: float = 0.0  # of choosing tokens
    restore_s: float = 0.0  # of copying back from host memory or files
    status: str = "ok"  # how the decode ended
    decodes: tuple[tuple[int, int], ...] = ()  # request_id, slot
    chunks: tuple[tuple[int, int, int], ...] = ()  # request_id, slot, tokens


class Size(NamedTuple):
    """How much a plan does."""

    n_prefill: int
    n_decode: int
    n_context: int
    n_saved: int
    n_loaded: int


class Entry(NamedTuple):
    """A step as it is kept: made in a few passes over its works."""

    at_s: float
    seconds: float
    size: Size
    after: Occupancy
    host_s: float
    decode_s: float
    sample_s: float
    restore_s: float
    status: DecodeStatus
    places: Places
    n_tokens: tuple[int, ...] | None  # None: all works are decodes; 0 is a decode
    n_preempted: int


def size_of(plan: StepPlan) -> Size:
    """How much *plan* does."""
    return _measured(plan, NOWHERE)[0]


def _measured(
    plan: StepPlan, last: Places
) -> tuple[Size, Places, tuple[int, ...] | None]:
    """Its size, whose works it has if not those of *last*, and tokens of chunks."""
    works = plan.works
    saved_loaded = _moved(plan) if plan.moves else (0, 0)
    if not works:
        return Size(0, 0, 0, *saved_loaded), NOWHERE, None
    if plan.same and last[0]:
        n_context = sum(map(POS, works)) + len(works)
        return Size(0, len(works), n_context, *saved_loaded), last, None
    request_ids, slots, positions, *_ = zip(*works, strict=False)
    n_prefill, n_decode, n_tokens = 0, len(works), None
    n_context = sum(positions) + n_decode
    if type(works[-1]) is not Decode:  # these come first
        n_tokens = tuple([0 if type(w) is Decode else len(w.tokens) for w in works])
        n_prefill, n_decode = sum(n_tokens), n_tokens.count(0)
        for n, position in zip(n_tokens, positions, strict=True):
            if n:
                n_context += (n - 1) * (2 * position + n + 2) // 2
    size = Size(n_prefill, n_decode, n_context, *saved_loaded)
    return size, (request_ids, slots), n_tokens


def _moved(plan: StepPlan) -> tuple[int, int]:
    """Tokens saved, and tokens copied or restored."""
    n_saved = n_loaded = 0
    for move in plan.moves:
        if type(move) is Save:
            n_saved += move.stop - move.start
        elif type(move) is Load:
            n_loaded += sum(piece.stop - piece.start for piece in move.pieces)
        elif type(move) is Copy:
            n_loaded += move.n_pos
    return n_saved, n_loaded


class StepLog:
    """The last steps of one driver, the oldest first. Any thread may read."""

    def __init__(
        self,
        max_steps: int = MAX_STEPS,
        put: Callable[[Entry], None] | None = None,
    ) -> None:
        """
        Args:
            put: gets each step, too; to be made a record by record_of().
        """
        self._entries: deque[Entry] = deque(maxlen=max_steps)
        self._put = put
        self._n_preempted = 0
        self._places = NOWHERE  # of the last step; most steps have the same

    def __iter__(self) -> Iterator[StepRecord]:
        return map(record_of, tuple(self._entries))

    def add(
        self,
        plan: StepPlan,
        scheduler: Planner,
        start: float,
        end: float,
        *,
        result: StepResult = DONE,
        host_s: float = 0.0,
    ) -> None:
        """Take in a step that ran from *start* to *end*."""
        size, self._places, n_tokens = _measured(plan, self._places)
        after = scheduler.occupancy
        n_preempted = after.n_preempted - self._n_preempted
        self._n_preempted = after.n_preempted
        entry = Entry(
            start,
            end - start,
            size,
            after,
            host_s,
            result.decode_s,
            result.sample_s,
            sum(result.restore_s.values()) if result.restore_s else 0.0,
            result.status,
            self._places,
            n_tokens,
            n_preempted,
        )
        self._entries.append(entry)
        if self._put is not None:
            self._put(entry)


def record_of(entry: Entry) -> StepRecord:
    """What *entry* says, one fact a field."""
    after = entry.after
    decodes = tuple(zip(*entry.places, strict=True))
    chunks: tuple[tuple[int, int, int], ...] = ()
    if entry.n_tokens is not None:
        works = list(zip(decodes, entry.n_tokens, strict=True))
        chunks = tuple((*place, n) for place, n in works if n)
        decodes = tuple(place for place, n in works if not n)
    return StepRecord(
        entry.at_s,
        entry.seconds,
        *entry.size,
        after.n_running,
        after.n_waiting,
        after.n_cells_used,
        after.n_host_bytes,
        after.n_disk_bytes,
        entry.n_preempted,
        after.budget,
        entry.host_s,
        entry.decode_s,
        entry.sample_s,
        entry.restore_s,
        entry.status.value,
        decodes,
        chunks,
    )


def read_steps(path: Path) -> list[StepRecord]:
    """
    What was written of a StepLog.

    Raises:
        ValueError: a line is no record.
    """
    return read_records(path, StepRecord)
