"""What steps did: a ring of records in memory, and a file on request."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from pyllama_raw.core.request import Finished, Request
from pyllama_raw.core.stats import Occupancy
from pyllama_raw.core.step import (
    Copy,
    Decode,
    Load,
    Save,
    StepPlan,
    StepResult,
)
from pyllama_raw.engine.records import read_records
from pyllama_raw.engine.warm_up import warms_up
from pyllama_raw.engine.watcher import StepRecord, Watcher

MAX_STEPS = 16384  # kept by default


class Size(NamedTuple):
    """How much a plan does."""

    n_prefill: int
    n_decode: int
    n_context: int
    n_saved: int
    n_loaded: int


def size_of(plan: StepPlan) -> Size:
    """How much *plan* does."""
    n_prefill = n_decode = n_context = n_saved = n_loaded = 0
    for work in plan.works:
        if type(work) is Decode:
            n_decode += 1
            n_context += work.pos + 1
        else:
            n_tokens = len(work.tokens)
            n_prefill += n_tokens
            n_context += n_tokens * (2 * work.pos + n_tokens + 1) // 2
    for move in plan.moves:
        if type(move) is Save:
            n_saved += move.stop - move.start
        elif type(move) is Load:
            n_loaded += sum(piece.stop - piece.start for piece in move.pieces)
        elif type(move) is Copy:
            n_loaded += move.n_pos
    return Size(n_prefill, n_decode, n_context, n_saved, n_loaded)


def step_record(
    plan: StepPlan,
    result: StepResult,
    after: Occupancy,
    *,
    at_s: float,
    seconds: float,
    host_s: float,
    n_preempted: int,
) -> StepRecord:
    """What *plan* did, and what was there *after* it."""
    return StepRecord(
        at_s,
        seconds,
        *size_of(plan),
        after.n_running,
        after.n_waiting,
        after.n_cells_used,
        after.n_host_bytes,
        after.n_disk_bytes,
        n_preempted,
        after.budget,
        host_s,
        result.decode_s,
        result.sample_s,
        sum(result.restore_s.values()),
        result.status.value,
        tuple([(w.request_id, w.slot) for w in plan.works if type(w) is Decode]),
        tuple(
            (w.request_id, w.slot, len(w.tokens))
            for w in plan.works
            if type(w) is not Decode
        ),
    )


class StepLog(Watcher):
    """The last steps of one driver, the oldest first. Any thread may read."""

    def __init__(
        self,
        max_steps: int = MAX_STEPS,
        put: Callable[[StepRecord], None] | None = None,
    ) -> None:
        """
        Args:
            put: gets each record, too.
        """
        self._records: deque[StepRecord] = deque(maxlen=max_steps)
        self._put = put
        self._warming: dict[int, bool] = {}  # by request_id: whether it has ended

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(tuple(self._records))

    def came(self, requests: Sequence[Request], submitted: float) -> None:  # noqa: ARG002
        """Remember those that warm the engine up."""
        warming = [r.request_id for r in requests if warms_up(r.policy_data)]
        self._warming.update(dict.fromkeys(warming, False))

    def ended(self, request: Request, end: Finished) -> None:  # noqa: ARG002
        """It is told before the step that ended it is."""
        if request.request_id in self._warming:
            self._warming[request.request_id] = True

    def stepped(self, step: StepRecord) -> None:
        """Keep the record."""
        if self._warming:
            works = (*step.decodes, *step.chunks)
            is_warm_up = any(work[0] in self._warming for work in works)
            step = step._replace(warms_up=is_warm_up)
            self._warming = {i: ends for i, ends in self._warming.items() if not ends}
        self._records.append(step)
        if self._put is not None:
            self._put(step)


def read_steps(path: Path) -> list[StepRecord]:
    """
    What was written of a StepLog.

    Raises:
        ValueError: a line is no record.
    """
    return read_records(path, StepRecord)
