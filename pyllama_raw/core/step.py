"""
A step is a small program: moves of memory in order, then one decode that samples.

The scheduler writes a `StepPlan`, an executor runs it in that order and answers with a
`StepResult`: each work of the plan has one output. A new feature is a new type here, not
a branch in the loop. A context knows positions, so plans speak of these: see `Span`.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from pyllama_raw.core.request import (
    TOKENS,
    Adapted,
    CacheTier,
    Lot,
    Request,
    SamplerUse,
    Spans,
    TokenLogprobs,
)
from pyllama_raw.errors import PyllamaError

NONE: Mapping[int, Any] = MappingProxyType({})


class Release(NamedTuple):
    """Forget all of a slot."""

    slot: int


class Trim(NamedTuple):
    """Forget all but the first *n_pos* positions of a slot."""

    slot: int
    n_pos: int


class Shift(NamedTuple):
    """Forget *n_discard* positions after the first *n_keep* of a slot, close the gap."""

    slot: int
    n_keep: int
    n_discard: int


class Copy(NamedTuple):
    """Give *dst*, which is empty, the first *n_pos* positions of *src* too."""

    src: int
    dst: int
    n_pos: int


class Snapshot(NamedTuple):
    """A payload that a save has put into host memory."""

    payload: object


class FileKey(NamedTuple):
    """The key of a state in a file."""

    namespace: str | Adapted | None
    tokens: bytes  # one C int each
    spans: Spans = ()  # of these, whole; their numbers are of this engine only


class Save(NamedTuple):
    """
    Keep what *source* holds of the positions [start, stop) in *tier*.

    A state in host memory is complete when the step is over. A file is written meanwhile:
    see `Written`.
    """

    save_id: int  # of this tier, and alone in `StepResult.saved`, which names no tier
    tier: CacheTier
    source: int | Snapshot  # a slot, or what goes to a file as it is
    start: int
    stop: int
    max_bytes: int  # a larger state is not kept; its tokens are not counted
    key: FileKey | None = None  # of a file


class Fetch(NamedTuple):
    """Read a file into host memory; the step does not wait: see `Fetched`."""

    fetch_id: int
    payload: object  # of the file


class Piece(NamedTuple):
    """A payload in host memory, of which the positions [start, stop) are wanted."""

    payload: object
    start: int
    stop: int


class Load(NamedTuple):
    """Fill a slot, which has all before the first piece; pieces join at their ends."""

    slot: int
    pieces: tuple[Piece, ...]
    last_pos: int  # of the last row; its span may have more


class Delete(NamedTuple):
    """Delete files."""

    payloads: tuple[object, ...]


FileMove = Fetch | Delete
Move = Release | Trim | Shift | Copy | Save | Load | FileMove


class Saved(NamedTuple):
    """A state that is kept now."""

    payload: object
    n_bytes: int
    seconds: float = 0.0  # that the capture took


class Written(NamedTuple):
    """A file that a `Save` asked for is complete; None: there is none."""

    save_id: int
    saved: Saved | None


class Fetched(NamedTuple):
    """A file that was to be read is in host memory; None: it is gone, or not as written."""

    fetch_id: int
    payload: object | None
    seconds: float


class Decode(NamedTuple):
    """Compute the last token of a sequence and sample the next one."""

    request_id: int
    slot: int
    pos: int  # of tokens[0]
    tokens: array[int]  # array("i")

    @property
    def samples(self) -> bool:
        """Always."""
        return True


class Verify(NamedTuple):
    """
    Compute the last token of a sequence and drafts of what follows, and sample after each.

    A draft is right if the token sampled in its place equals it. The slot then holds the
    drafts before the first wrong one, and a token is sampled after the last of them, too.
    """

    request_id: int
    slot: int
    pos: int
    tokens: array[int]  # the last one, then drafts

    @property
    def samples(self) -> bool:
        """Always."""
        return True


class Prefill(NamedTuple):
    """Compute a run of known tokens."""

    request_id: int
    slot: int
    pos: int
    tokens: array[int]
    samples: bool  # the token after the last one


class PrefillSpan(NamedTuple):
    """Compute rows of a span; no work of another type is beside it."""

    request_id: int
    slot: int
    pos: int  # of the span
    tokens: array[int]  # one a row
    span: int  # which one of the request
    start: int  # its first row here, counted from 0
    samples: bool = False  # never


class ScoredPrefill(NamedTuple):
    """Like `Prefill`; what follows each token after the first *n_plain* is scored."""

    request_id: int
    slot: int
    pos: int
    tokens: array[int]
    samples: bool
    targets: array[int]  # what follows each of these, as far as it is known
    n_plain: int = 0  # tokens without a row


class ReadSource(NamedTuple):
    """
    Have the encoder read the source of a sequence; no work of another type is beside it.

    Decodes of a slot see the source that the last step of such works has for it, and none if
    it has none, so a step has the sources of all sequences that go on.
    """

    request_id: int
    slot: int
    pos: int  # behind what the slot holds, which is left as it is
    tokens: array[int]
    samples: bool = False  # never


class Propose(NamedTuple):
    """
    Have the draft model go on with a sequence; no work of another type is beside it.

    The slot is one of another context. It forgets all from *pos* on and computes *tokens*, then
    drafts. It holds all drafts but the last one.
    """

    request_id: int
    slot: int
    pos: int  # of tokens[0]; the slot holds all before
    tokens: array[int]
    n_drafts: int  # the same number in all works of a plan
    samples: bool = False  # nothing of the model


class Encode(NamedTuple):
    """Compute a run of a text; with its last token the text becomes a vector."""

    request_id: int
    slot: int  # empty before a run that starts at 0, and after the last one
    pos: int
    tokens: array[int]
    is_last: bool
    samples: bool = False  # never


Work = (
    Decode
    | Verify
    | Prefill
    | PrefillSpan
    | ScoredPrefill
    | ReadSource
    | Propose
    | Encode
)


class StepPlan(NamedTuple):
    """A step to be done; at most one work a slot."""

    moves: tuple[Move, ...] = ()
    works: tuple[Work, ...] = ()  # decodes first, each kind by rising slot
    lot: Lot = TOKENS  # of all works
    # The scheduler expects the next plan to hold just the next token of each work. The
    # executor may begin it early, and must discard that if another plan comes.
    steady: bool = False

    @property
    def n_tokens(self) -> int:
        return sum(len(work.tokens) for work in self.works)

    def __bool__(self) -> bool:
        return bool(self.works or self.moves)


class Sampled(NamedTuple):
    """
    The output of a work that samples: the next tokens.

    The slot then holds the sequence but for the last of these tokens, so several need as
    much free memory as they are, less one.
    """

    tokens: tuple[int, ...]  # one or more
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token, if asked for
    # What a constraint lets follow, as a rule in these tokens.
    forced: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RowFailed:
    """The output of a work that is computed, but whose sampler failed; without its drafts."""

    error: PyllamaError


@dataclass(frozen=True, slots=True)
class Computed:
    """The output of a work that does not sample."""


@dataclass(frozen=True, slots=True)
class Scored:
    """The output of a `ScoredPrefill`: its targets, and what else it gave."""

    logprobs: tuple[TokenLogprobs, ...]  # one a target
    then: Sampled | RowFailed | Computed


class Proposed(NamedTuple):
    """The output of a `Propose`: drafts, and the probability of each by the draft model."""

    tokens: tuple[int, ...]
    chances: tuple[float, ...]


class Vector(NamedTuple):
    """The output of the last `Encode` of a text: floats of 32 bits, all of them finite."""

    values: bytes


@dataclass(frozen=True, slots=True)
class Lost:
    """The output of a work whose slot is empty: it could not be filled, or has lost all."""


@dataclass(frozen=True, slots=True)
class PartlyComputed:
    """The output of a work of an aborted decode: so many of its tokens are computed."""

    n_tokens: int


Output = (
    Sampled | RowFailed | Computed | Scored | Proposed | Vector | Lost | PartlyComputed
)


class DecodeStatus(Enum):
    """The end of the one decode call of a step."""

    OK = "ok"
    NO_SPACE = "no space"  # memory is as the moves left it
    ABORTED = "aborted"  # some works may be computed in part
    INVALID = "invalid"  # memory as after NO_SPACE; the batch broke a rule
    FAILED = "failed"  # nothing was sampled; the executor has made an empty context


class StepResult(NamedTuple):
    """
    The result of a plan.

    outputs[i] is of works[i]: after ABORTED each is `PartlyComputed` or `Lost`, after the other
    failures there is none.
    """

    status: DecodeStatus = DecodeStatus.OK
    outputs: tuple[Output, ...] = ()
    # After INVALID and FAILED; or of a draft model, whose failures lose its slots and nothing else.
    error: PyllamaError | None = None
    saved: Mapping[int, Saved] = NONE  # by save_id, in host memory
    not_restored: frozenset[int] = frozenset()  # slots left empty
    refuses_cuts: bool = False  # this memory could not forget the end of a slot
    restore_s: Mapping[int, float] = NONE  # by slot, what filling it took
    # What it costs to compute with other adapters; None: as before.
    switch_s: float | None = None
    decode_s: float = 0.0  # in llama_decode
    sample_s: float = 0.0  # of choosing tokens
    moves_s: float = 0.0  # of the moves
    # Of decodes of the draft model, one after the other.
    draft_s: tuple[float, ...] = ()


class Executor(Protocol):
    """Does what a plan says. One thread makes all calls but stop()."""

    def open(self, request: Request) -> None:
        """Prepare the sampler of *request*. Raises RequestError; the request then ends."""

    def close(self, request_id: int) -> SamplerUse | None:
        """Free what open() made and tell how it was used; unknown ids are ignored."""

    def execute(self, plan: StepPlan) -> StepResult:
        """Run *plan*. Failures of libllama come back as a status, never as an exception."""

    def stop(self, request_id: int | None = None) -> None:
        """
        Nobody wants what *request_id* gets of the running step, or else of the next one.

        A step is aborted if nobody wants anything of it. None: nobody wants anything of
        any step from now on. Thread: any.
        """
