"""
A step is a small program: release, trim, shift, decode chunks, sample.

The scheduler writes a `StepPlan`, an executor runs it in that order and answers with a
`StepResult`. New features are new fields here, not branches in the loop.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple, Protocol

from pyllama_raw.core.request import Request
from pyllama_raw.errors import PyllamaError


class Chunk(NamedTuple):
    """A run of one sequence's tokens. (A tuple: one is made per row and step.)"""

    request_id: int
    slot: int
    pos: int  # position of tokens[0] in the sequence
    tokens: array[int]  # array("i")
    wants_output: bool  # sample after the last token


class Trim(NamedTuple):
    """Forget all but the first *n_tokens* of a slot."""

    slot: int
    n_tokens: int


class Shift(NamedTuple):
    """Forget *n_discard* positions after the first *n_keep* of a slot, close the gap."""

    slot: int
    n_keep: int
    n_discard: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step does; chunks with one output row each come in ascending slot order."""

    releases: tuple[int, ...] = ()  # slots whose memory is cleared first
    trims: tuple[Trim, ...] = ()
    shifts: tuple[Shift, ...] = ()
    chunks: tuple[Chunk, ...] = ()  # decode chunks first, then prefill

    @property
    def n_tokens(self) -> int:
        return sum(len(chunk.tokens) for chunk in self.chunks)

    def __bool__(self) -> bool:
        return bool(self.chunks or self.releases)


class DecodeStatus(Enum):
    """How the one decode call of a step ended."""

    OK = "ok"
    NO_SPACE = "no space"  # memory unchanged
    ABORTED = "aborted"  # some chunks may be computed in part
    INVALID = "invalid"  # memory unchanged; the batch broke a rule
    FAILED = "failed"  # the executor has rebuilt an empty context


@dataclass(frozen=True, slots=True)
class StepResult:
    """
    What came of a plan.

    tokens[i] belongs to the i-th chunk with wants_output; None where its sampler failed.
    """

    status: DecodeStatus = DecodeStatus.OK
    tokens: tuple[int | None, ...] = ()
    row_errors: dict[int, PyllamaError] = field(default_factory=dict)  # by request_id
    n_computed: dict[int, int] = field(default_factory=dict)  # by slot, after ABORTED
    error: PyllamaError | None = None  # after INVALID and FAILED


class Executor(Protocol):
    """Does what a plan says. One thread calls it; open() may come from that thread only."""

    def open(self, request: Request) -> None:
        """Prepare the sampler of *request*. Raises RequestError; the request then ends."""

    def close(self, request_id: int) -> None:
        """Free what open() made; unknown ids are ignored."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run *plan*. Failures of libllama come back as a status, never as an exception."""
