"""Counters of the scheduler, and the frozen view of them a caller gets."""

from __future__ import annotations

from dataclasses import dataclass, field

from pyllama_raw.core.request import FinishReason


@dataclass(slots=True)
class Counters:
    """Totals since the engine started; the scheduler counts where it decides."""

    submitted: int = 0
    finished: dict[FinishReason, int] = field(
        default_factory=lambda: dict.fromkeys(FinishReason, 0)
    )
    failed: int = 0
    preempted: int = 0
    shifted: int = 0
    steps: int = 0
    aborted_steps: int = 0
    no_space_steps: int = 0
    failed_steps: int = 0
    rebuilds: int = 0
    computed_tokens: int = 0  # all tokens that went through a successful decode
    output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """The scheduler at one moment. Finished + failed + running + waiting = submitted."""

    n_slots: int
    running: int
    waiting: int
    waiting_tokens: int
    n_cells: int
    n_cells_used: int
    submitted: int
    finished: dict[str, int]  # by finish reason
    failed: int
    preempted: int
    shifted: int
    steps: int
    aborted_steps: int
    no_space_steps: int
    failed_steps: int  # decodes that libllama refused or could not do
    rebuilds: int  # of these, those after which the context was made anew
    computed_tokens: int
    output_tokens: int
