"""Records of what steps did."""

from __future__ import annotations

from typing import NamedTuple

from pyllama_raw.core.stats import Occupancy
from pyllama_raw.core.step import Copy, Decode, Load, Save, StepPlan, StepResult
from pyllama_raw.engine.records import RecordLog
from pyllama_raw.engine.watcher import StepRecord


class Size(NamedTuple):
    """Size of what a plan does."""

    n_prefill: int
    n_decode: int
    n_context: int
    n_saved: int
    n_loaded: int


def size_of(plan: StepPlan) -> Size:
    """Size of what *plan* does."""
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
    warms_up: bool,
) -> StepRecord:
    """A record of what *plan* did, and of what was there *after* it."""
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
        warms_up,
    )


class StepLog(RecordLog[StepRecord]):
    """The last steps of one driver."""

    def stepped(self, step: StepRecord) -> None:
        """Keep the record."""
        self.keep(step)
