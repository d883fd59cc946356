"""What steps did: a ring of records, on request as JSON lines."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pyllama_raw.core.planner import Planner
from pyllama_raw.core.step import Copy, Decode, Load, Save, StepPlan

MAX_STEPS = 16384  # kept by default


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


class Size(NamedTuple):
    """How much a plan does."""

    n_prefill: int
    n_decode: int
    n_context: int
    n_saved: int
    n_loaded: int


def size_of(plan: StepPlan) -> Size:
    """Called once a step, with a work for each slot: the decodes cost one pass."""
    works = plan.works
    n_decode = n_prefill = 0
    n_context = sum([work.pos for work in works]) + len(works)
    for work in works:
        if type(work) is Decode:
            n_decode += 1
        else:
            n_tokens = len(work.tokens)
            n_prefill += n_tokens
            n_context += (n_tokens - 1) * (2 * work.pos + n_tokens + 2) // 2
    n_saved = n_loaded = 0
    for move in plan.moves:
        if type(move) is Save:
            n_saved += move.stop - move.start
        elif type(move) is Load:
            n_loaded += sum(piece.stop - piece.start for piece in move.pieces)
        elif type(move) is Copy:
            n_loaded += move.n_pos
    return Size(n_prefill, n_decode, n_context, n_saved, n_loaded)


class StepLog:
    """The last steps of one driver, the oldest first."""

    def __init__(self, max_steps: int = MAX_STEPS) -> None:
        self._records: deque[StepRecord] = deque(maxlen=max_steps)

    def __iter__(self) -> Iterator[StepRecord]:
        return iter(tuple(self._records))

    def add(self, plan: StepPlan, scheduler: Planner, start: float, end: float) -> None:
        """Take in a step that ran from *start* to *end*."""
        state = scheduler.load
        self._records.append(StepRecord(start, end - start, *size_of(plan), *state))


def write_records(path: Path, records: Iterable[NamedTuple]) -> None:
    """One JSON object a line."""
    with path.open("w") as file:
        file.writelines(json.dumps(record._asdict()) + "\n" for record in records)


def read_steps(path: Path) -> list[StepRecord]:
    """
    What write_records() has written.

    Raises:
        ValueError: a line is no record.
    """
    found = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        try:
            values: Any = json.loads(line)
            found.append(StepRecord(**values))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
    return found
