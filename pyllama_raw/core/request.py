"""
Requests, and the events that tell of them. All of it is frozen.

Namespaces: only requests whose namespaces are equal share cached prefixes.

Spans of a prompt are rows that are no text, as those of an image. Core counts indices: each row of
a sequence has one, and takes one cell. A token of text takes one position, too. The rows of a span
share `n_pos` positions, at most as many as they are: those of an image of 16 x 16 may take 256
cells and 16 positions. So where there is no span, which is nearly always, an index is a position.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, NamedTuple, Protocol

from pyllama_raw.core.text import NO_STOPS, StopStrings
from pyllama_raw.errors import PyllamaError


class Private:
    """The namespace of a single request. No caller can name it, so no caller shares it."""

    __slots__ = ()  # equal to itself only


class Adapted(NamedTuple):
    """The namespace of requests with the same adapters at the same scales."""

    digest: str  # of these
    salt: str | None


# A salt; of one request; of all without a salt.
Namespace = str | Private | Adapted | None


def is_of(namespace: Namespace, salt: str | Private | None) -> bool:
    """Whether the callers that give *salt* use *namespace*; None: any callers."""
    if isinstance(namespace, Adapted):
        namespace = namespace.salt
    return salt is None or namespace == salt


class Span(NamedTuple):
    """
    Rows that go together: memory has all of them for others, or none.

    In the tokens of a prompt a row is a number below 0, the same for all rows of the span.
    Numbers are of one engine, and stand for keys.
    """

    start: int  # index of the first row
    stop: int  # index after the last one
    n_pos: int  # positions they take together
    is_causal: bool = True  # if not, the rows see each other: one decode has them all
    key: bytes = b""  # of any engine: equal only if the rows are; empty: in no file


Spans = tuple[Span, ...]  # rising, and apart


def are_valid(spans: Spans, n_prompt: int) -> bool:
    """Whether a prompt can have them; it ends with text, because that is sampled from."""
    # Rising and apart is as much as sorted starts and stops.
    borders = [border for span in spans for border in span[:2]]
    return borders == sorted(borders) and all(
        0 <= span.start < span.stop < n_prompt
        and 1 <= span.n_pos <= span.stop - span.start
        for span in spans
    )


def text_of(tokens: array[int], spans: Spans) -> array[int]:
    """*tokens* without those that stand for rows: all that is text."""
    text, start = array("i"), 0
    for span in spans:
        text += tokens[start : span.start]
        start = span.stop
    return text + tokens[start:]


def position(spans: Spans, index: int) -> int:
    """The position of the row with *index*; inside a span it is that of the first row."""
    n_less = 0
    for start, stop, n_pos, *_ in spans:
        # It is in this span, or in the text before it.
        if index < stop:
            return min(index, start) - n_less
        n_less += stop - start - n_pos
    return index - n_less


def whole(spans: Spans, n_rows: int) -> int:
    """
    The most of the first *n_rows* that end with no part of a span.

    Nor do they leave a single token before one, of several: see core/sequence.py.
    """
    text = 0  # where the text before a span begins
    for start, stop, *_ in spans:
        # The end is in the text before this span.
        if n_rows <= start:
            leaves_one = text < n_rows == start - 1
            return n_rows - leaves_one
        # The end is inside of it, so all of it goes.
        if n_rows < stop:
            return start
        text = stop
    return n_rows


def border(spans: Spans, index: int) -> int | None:
    """The end of the text or the span of *index*; None: no span follows."""
    for start, stop, *_ in spans:
        if index < stop:
            return start if index < start else stop
    return None


def span_at(spans: Spans, index: int) -> int | None:
    """The span that has the row with *index*; None: it is text."""
    for number, span in enumerate(spans):
        if index < span.stop:
            return number if index >= span.start else None
    return None


Value = str | int | float | bool | None  # of policy_data


class FinishReason(StrEnum):
    """Why a request ended without an error."""

    STOP = "stop"
    """An end-of-generation token, a stop token or a stop string."""
    LENGTH = "length"
    """max_tokens is reached, or the slot is full."""
    CANCELLED = "cancelled"
    """The caller left."""
    DEADLINE = "deadline"
    """The deadline passed; what was generated until then is kept."""
    CLOSED = "closed"
    """The engine was closed first."""


@dataclass(frozen=True, slots=True)
class StopToken:
    """The output ended with this token: end of generation, or one of `stop_token_ids`."""

    token_id: int
    """The token; the result's token_ids end with it."""


@dataclass(frozen=True, slots=True)
class StopString:
    """The output ended before this text, one of `stop`; the longest, if several met."""

    text: str
    """The stop string as it was given."""


class LengthLimit(StrEnum):
    """The limit that ended the output."""

    MAX_TOKENS = "max_tokens"
    """The limit of the request."""
    SLOT = "slot"
    """Prompt and output fill the context of a slot."""


FinishDetail = StopToken | StopString | LengthLimit


class StopFinder(Protocol):
    """Looks for what ends one output, token by token."""

    def take(
        self, token: int, piece: bytes, *, is_last: bool
    ) -> StopString | StopToken | None:
        """
        Take the next token; what ends the output with it, if something does.

        Args:
            piece: bytes of the token that count as text.
            is_last: the output ends with it in any case.
        """


class CacheTier(StrEnum):
    """A place that cached tokens came from."""

    LIVE = "live"
    """The memory of a slot."""
    HOST = "host"
    """A snapshot in host memory."""
    DISK = "disk"
    """A snapshot in a file."""

    @property
    def is_file(self) -> bool:
        """What is saved there goes to a file; else an executor holds it in memory."""
        return self is CacheTier.DISK


# The adapters that products are computed with, by their numbers, and the scale of each.
AdapterSet = tuple[tuple[int, float], ...]


class Lot(NamedTuple):
    """A lot: sequences of equal lots may share a decode."""

    name: str = "tokens"
    is_single: bool = False  # at most one sequence a decode
    is_whole: bool = False  # of rows that see each other: a decode has one whole span
    adapters: AdapterSet = ()  # of all of them
    makes_vectors: bool = False  # of texts, in a context of its own


TOKENS = Lot()
SOURCES = Lot("sources")  # which an encoder reads all together
DRAFTS = Lot("drafts")  # which a draft model makes, in a context of its own


class Scoring(NamedTuple):
    """The tokens of a prompt whose log-probabilities are wanted: from *first* to the end."""

    first: int = 1  # index of a token; none is known of the token 0
    n_top: int = 0  # likely tokens that are listed at each place


@dataclass(frozen=True, slots=True)
class Request:
    """One checked request; tokens are inside the vocabulary and fit a slot."""

    request_id: int
    tokens: array[int]  # array("i"), never empty, never changed; see spans and source
    max_tokens: int  # >= 1
    sampling: object = None  # read by the executor only
    rules: object = None  # of the output; read by the executor only
    stop: StopStrings = NO_STOPS  # wherever they are
    # Makes what looks for stops instead, if they count in a part of the output only.
    find_stop: Callable[[], StopFinder] | None = None
    stop_token_ids: frozenset[int] = frozenset()  # end of generation included
    # Names of tokens without a piece that count as text.
    names: Mapping[int, bytes] = field(default_factory=dict)
    reply: object = None  # takes the output apart; read by the output's reader only
    priority: int = 0  # lower runs first
    deadline: float | None = None  # on the clock of schedule(now)
    max_wait_s: float | None = None  # from its submission until it has a slot
    namespace: Namespace = None  # of the requests that share cached prefixes
    cache_points: tuple[int, ...] = ()  # positions worth a snapshot
    scoring: Scoring | None = None  # None: no log-probability of the prompt is wanted
    slot: int | None = None  # to be had if it is idle; it need not be there
    speculates: bool = True  # whether steps may verify drafts of its output
    lot: Lot = TOKENS
    client: str | None = None  # the sender; read by policies only
    policy_data: Mapping[str, Value] | None = None  # likewise
    # Rows that are no text. They are there before the scheduler knows the request.
    spans: Spans = ()
    payloads: tuple[object, ...] = ()  # one a span; read by the executor only
    # What an encoder reads before anything is decoded; tokens then begin the output.
    source: array[int] | None = None

    @property
    def n_prompt(self) -> int:
        """Tokens that the caller gave."""
        return len(self.tokens if self.source is None else self.source)


@dataclass(frozen=True, slots=True)
class EmbedRequest(Request):
    """Texts, each of which becomes a vector; tokens are those of all texts, in their order."""

    max_tokens: int = 0  # nothing is sampled
    ends: tuple[int, ...] = ()  # where each text ends in tokens; none is empty
    may_cut: bool = False  # whether a text may be computed in several steps

    def text(self, index: int) -> array[int]:
        """Tokens of the text *index*."""
        return self.tokens[self.ends[index - 1] if index else 0 : self.ends[index]]


@dataclass(frozen=True, slots=True)
class Moments:
    """Moments on the engine clock, in seconds; None if it never came to that."""

    submitted: float
    admitted: float | None
    first_token: float | None
    finished: float
    itl: tuple[float, ...] = field(repr=False)  # gaps between the latest output tokens
    last_token: float | None = None


class TokenLogprobs(NamedTuple):
    """Natural logarithms of probabilities, at one place of a sequence."""

    token_id: int
    """The token that is there."""
    logprob: float
    """Natural logarithm of its probability."""
    top: tuple[tuple[int, float], ...]
    """(id, logprob) of the likely tokens, the best first."""
    piece: bytes = b""
    """The bytes of the token, part of a character perhaps; a control token has its name."""
    top_pieces: tuple[bytes, ...] = ()
    """The bytes of each token of `top`."""


class SamplerUse(NamedTuple):
    """Places where the tokens of a request were chosen; backend: all of them."""

    placement: Literal["backend", "host"]
    """backend if all tokens were chosen in the graph."""
    why: str
    """Why not on the backend; empty if they were."""


class NewTokens(NamedTuple):
    """
    Output tokens, one or several.

    Whoever reads them makes them text: the engine has no time to.
    """

    request_id: int
    tokens: tuple[int, ...]  # only the last one may end the request
    logprobs: tuple[TokenLogprobs, ...] = ()  # one a token, if asked for


@dataclass(frozen=True, slots=True)
class Embedded:
    """A text has become a vector."""

    request_id: int
    index: int  # of the text
    values: bytes  # floats of 32 bits


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of a request: a reason or an error, never both."""

    request_id: int
    reason: FinishReason | None
    error: PyllamaError | None
    n_prompt: int
    n_output: int
    n_cached: int  # prompt tokens that were not computed
    cache_tier: CacheTier | None  # where they came from
    n_preempted: int
    timings: Moments
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()  # of tokens from Scoring.first on
    sampler: SamplerUse | None = None  # written by the engine; None: no tokens
    detail: FinishDetail | None = None  # of STOP and LENGTH
    encode_s: float | None = None  # written by the engine; None: it has no media
    n_drafted: int = 0  # tokens that were computed before they were sampled
    n_accepted: int = 0  # of these, those that were sampled

    @property
    def why(self) -> str:
        """The finish reason, or the code of the error."""
        if self.error is not None:
            return self.error.code
        assert self.reason is not None
        return str(self.reason)


Event = NewTokens | Embedded | Finished
# A request gets a slot or its first step, or gives its slot up and will get another.
SlotChange = Literal["running", "preempted"]
