"""
A request in progress: its tokens so far, what a slot has of them while it runs, the queue in which
it waits, and how much of it may be taken over or computed at once.

Rules that a plan keeps so that equal requests have equal last digits: libllama computes a single
token by another kernel than several, which gives it other last digits. So of every engine:
- A prompt is never computed in single tokens: not at its end (N_FRESH), not in chunks and not in
  what micro-batches leave (core/scheduling/packer.py), not before a span (`Sequence.whole`) unless
  there is one only.

Of one that is `deterministic`, whose outputs must not depend on what ran before or beside
(`ContextLimits` has those that are not here):
- A lot is streams or one prompt (`divided` of core.scheduling.lots): split memory cuts the first
  row off a prompt that shares a batch with streams.
- Others may take over prompts, not outputs, which were computed token by token (n_kept).
- Output that is computed again is computed token by token again (n_chunked).
- What is moved in a window is moved by a multiple of ALIGN (n_movable).
- A sequence that was shifted keeps its slot, whoever is more urgent (is_repeatable).
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterator
from collections.abc import Sequence as Items
from operator import sub
from typing import Protocol

from pyllama_raw.core.lookup import Drafting, Lookup
from pyllama_raw.core.request import (
    CacheTier,
    EmbedRequest,
    FinishDetail,
    Finished,
    FinishReason,
    Moments,
    Request,
    Scoring,
    StopFinder,
    StopString,
    TokenLogprobs,
    position,
    whole,
)
from pyllama_raw.core.stats import SlotStats
from pyllama_raw.core.text import NO_STOPS, Detokenizer
from pyllama_raw.errors import PyllamaError

NO_LIMIT = 2**31
HEADROOM = 64  # output tokens a running sequence is promised cells for
N_FRESH = 2  # tokens of a prompt that are always computed; one has to be sampled from
ALIGN = 64  # cells that no sum over cells divides: CPUs add 4 to 64 side by side


class TextStops:
    """Looks for the stop strings of a request in all of its text."""

    __slots__ = ("_detokenizer", "_ends")

    def __init__(self, request: Request) -> None:
        self._detokenizer = Detokenizer(request.stop)
        self._ends = request.stop_token_ids

    def take(self, token: int, piece: bytes, *, is_last: bool) -> StopString | None:  # noqa: ARG002
        """See StopFinder; a token that ends the output has no text."""
        if token in self._ends:
            return None
        self._detokenizer.push(piece)
        stop = self._detokenizer.stop
        return None if stop is None else StopString(stop.decode("utf-8", "replace"))


class Sequence:
    """
    A request in progress; as such it waits.

    `tokens` is what a slot holds or will hold: the prompt, then the output, less what
    a context shift dropped. The last sampled token is in `tokens`, not yet computed.

    Args:
        n_chunked: so many first tokens are computed in chunks, those after them one by
            one, also if they are known.
    """

    __slots__ = (
        "admitted",
        "cache_tier",
        "detail",
        "drafting",
        "first_token",
        "forced",
        "forces",
        "is_shifted",
        "lookup",
        "n_accepted",
        "n_cached",
        "n_chunked",
        "n_complete",
        "n_drafted",
        "n_held",
        "n_overtaken",
        "n_preempted",
        "n_source",
        "prompt_logprobs",
        "rank",
        "request",
        "stop_finder",
        "submitted",
        "token_times",
        "tokens",
    )

    def __init__(
        self, request: Request, order: int, now: float, n_chunked: int = NO_LIMIT
    ) -> None:
        self.request = request
        # The order of sequences, kept through preemption: low priority number, then arrival.
        self.rank = (request.priority, order)
        self.tokens: array[int] = array("i", request.tokens)
        # Tokens that an encoder reads.
        self.n_source = 0 if request.source is None else len(request.source)
        self.n_chunked = n_chunked
        # Tokens that it has with all of its output.
        self.n_complete = len(self.tokens) + request.max_tokens
        self.n_overtaken = 0
        self.n_held = 0  # steps in a row that a policy gave its prompt no token
        self.n_preempted = 0
        self.n_cached = 0
        self.cache_tier: CacheTier | None = None
        # Of tokens from Scoring.first on.
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.forced: tuple[int, ...] = ()  # what a constraint lets follow `tokens`
        self.forces = False  # whether one has left no choice before
        self.lookup: Lookup | None = None  # what may follow, by what did before
        self.drafting: Drafting | None = None  # likewise, by a draft model
        self.n_drafted = self.n_accepted = 0  # tokens
        self.is_shifted = False  # a context shift made `tokens` no prefix of anything
        # A caller's own finder, or one for its stop strings, which sees each token.
        self.stop_finder: StopFinder | None = None
        if request.find_stop is not None:
            self.stop_finder = request.find_stop()
        elif request.stop is not NO_STOPS:
            self.stop_finder = TextStops(request)
        self.detail: FinishDetail | None = None  # once its own end is known
        self.submitted = now
        self.admitted: float | None = None
        self.first_token: float | None = None  # once token_times has lost it
        # Of output tokens; after a shift of the latest ones, as many as `tokens` has.
        self.token_times: list[float] = []

    def position(self, index: int) -> int:
        """The position of the row with *index*, in the context."""
        spans = self.request.spans
        return position(spans, index) if spans else index  # mostly all is text

    def whole(self, n_rows: int) -> int:
        """The most of the first *n_rows* that can be kept, or had by others."""
        spans = self.request.spans
        return whole(spans, n_rows) if spans else n_rows

    @property
    def n_output(self) -> int:
        """Tokens of the output so far, also those that a context shift dropped."""
        return self.request.max_tokens - (self.n_complete - len(self.tokens))

    @property
    def n_in_chunks(self) -> int:
        """Tokens to be computed in chunks; others may share these only."""
        return min(len(self.tokens), self.n_chunked)

    @property
    def is_scoring(self) -> bool:
        """Whether log-probabilities of the prompt are missing."""
        scoring, n_scored = self.request.scoring, len(self.prompt_logprobs)
        return scoring is not None and scoring.first + n_scored < self.request.n_prompt

    @property
    def n_unscored(self) -> int:
        """
        First tokens of which no row is needed: those after them have one each.

        The row of a token tells the log-probability of the next one.
        """
        scoring = self.request.scoring
        if scoring is None or not self.is_scoring:
            return len(self.tokens)
        return scoring.first - 1 + len(self.prompt_logprobs)

    def drop(self, n_keep: int, n_discard: int) -> None:
        """
        Forget *n_discard* tokens after the first *n_keep*, and times of as many tokens as went.

        An output may never end, so nothing that is kept of it may grow with it.
        """
        assert not self.request.spans
        self.is_shifted = True
        # Positions have moved, so it can never be computed as at first.
        self.n_chunked = NO_LIMIT
        self.lookup = self.drafting = None
        del self.tokens[n_keep : n_keep + n_discard]
        self.n_complete -= n_discard
        # The first time outlives the others, because it is what a caller waited for.
        times = self.token_times
        if self.first_token is None and times:
            self.first_token = times[0]
        del times[: -len(self.tokens)]

    def finish(
        self, reason: FinishReason | None, error: PyllamaError | None, now: float
    ) -> Finished:
        """Make the last event."""
        times = self.token_times
        first = times[0] if self.first_token is None and times else self.first_token
        return Finished(
            request_id=self.request.request_id,
            reason=reason,
            error=error,
            n_prompt=self.request.n_prompt,
            n_output=self.n_output,
            n_cached=self.n_cached,
            cache_tier=self.cache_tier,
            n_preempted=self.n_preempted,
            timings=Moments(
                submitted=self.submitted,
                admitted=self.admitted,
                first_token=first,
                finished=now,
                itl=tuple(map(sub, times[1:], times)),
                last_token=times[-1] if times else None,
            ),
            prompt_logprobs=tuple(self.prompt_logprobs),
            detail=self.detail,
            n_drafted=self.n_drafted,
            n_accepted=self.n_accepted,
        )


class TextSequence(Sequence):
    """
    A request for vectors in progress: its texts are computed in their order.

    A text has no memory once it is computed, so its request takes no slot.
    """

    __slots__ = ("has_failed", "n_done", "start")
    request: EmbedRequest

    def __init__(self, request: EmbedRequest, order: int, now: float) -> None:
        super().__init__(request, order, now)
        self.tokens = request.tokens  # no copy, because nothing follows them
        self.n_done = 0  # texts that have a vector
        self.start = 0  # tokens of the next one that are computed
        self.has_failed = False  # the next one has, alone

    @property
    def is_done(self) -> bool:
        """Whether every text has a vector."""
        return self.n_done == len(self.request.ends)

    def tokens_of(self, n_ahead: int) -> array[int] | None:
        """Tokens to compute of the text after *n_ahead* others; None: there is none."""
        index = self.n_done + n_ahead
        if index == len(self.request.ends):
            return None
        return self.request.text(index)[0 if n_ahead else self.start :]

    def complete(self) -> int:
        """Note that the next text has its vector; returns the index of that text."""
        self.n_done += 1
        self.start = 0
        self.has_failed = False
        return self.n_done - 1


def growth(sequence: Sequence, n_computed: int = 0) -> int:
    """Cells to promise *sequence*: its tokens behind and some output."""
    n_output = sequence.request.max_tokens - sequence.n_output
    return len(sequence.tokens) - n_computed + min(n_output, HEADROOM)


class WaitingQueue:
    """
    Sequences that hold no slot, best rank first: by priority, then arrival, as `fcfs` has it.

    A sorted list: insertion moves pointers only, and the order can be read in place.
    """

    def __init__(self) -> None:
        self.n_tokens = 0  # that there are of them, and of their sources
        self._items: list[tuple[tuple[int, int], Sequence]] = []

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return (sequence for _, sequence in self._items)

    @property
    def head(self) -> Sequence:
        """The first of those that wait."""
        return self._items[0][1]

    def candidates(self) -> Iterator[Sequence]:
        """
        Sequences to be admitted, the best first; those that were may be gone meanwhile.
        """
        return (sequence for _, sequence in tuple(self._items))

    def note_overtaken(self, by: Sequence, blocked: Sequence | None) -> None:  # noqa: ARG002
        """*by* was admitted, although *blocked* was before it."""
        if blocked is not None:
            blocked.n_overtaken += 1

    def push(self, sequence: Sequence) -> None:
        insort(self._items, (sequence.rank, sequence))
        self.n_tokens += len(sequence.tokens) + sequence.n_source

    def remove(self, sequence: Sequence) -> None:
        index = bisect_left(self._items, (sequence.rank,))
        assert self._items[index][1] is sequence
        del self._items[index]
        self.n_tokens -= len(sequence.tokens) + sequence.n_source

    def discard(self, sequences: Items[Sequence]) -> None:
        """Take out those of *sequences* that are here."""
        gone = set(map(id, sequences))
        self._items = [item for item in self._items if id(item[1]) not in gone]
        self.n_tokens = sum(len(s.tokens) + s.n_source for s in self)

    def check_integrity(self) -> None:
        """Sorted, and the tokens add up."""
        ranks = [rank for rank, _ in self._items]
        assert ranks == sorted(ranks)
        assert self.n_tokens == sum(len(s.tokens) + s.n_source for s in self)


class Running:
    """
    A sequence in a slot, until it ends or is preempted.

    `request` and `tokens` are those of the sequence: every step looks at them.
    """

    __slots__ = (
        "deficit",
        "fetch_id",
        "fork_at",
        "is_read",
        "lag",
        "leader",
        "max_rows",
        "n_computed",
        "n_full",
        "points",
        "request",
        "sequence",
        "slot",
        "tokens",
    )

    def __init__(
        self,
        sequence: Sequence,
        slot: int,
        n_computed: int = 0,
        n_ctx_slot: int = NO_LIMIT,
    ) -> None:
        self.sequence = sequence
        self.request = sequence.request
        self.tokens = sequence.tokens
        self.slot = slot
        self.n_computed = n_computed
        # Tokens with which its output is complete, or its slot full.
        self.n_full = min(sequence.n_complete, n_ctx_slot)
        # How far positions are behind indices, once all of the prompt is computed.
        self.lag = len(self.tokens) - sequence.position(len(self.tokens))
        # Whether decodes see its source, if it has one.
        self.is_read = self.request.source is None
        self.deficit = 0  # prefill tokens left of this turn
        self.fetch_id: int | None = None  # a file that is read for it right now
        self.leader: Running | None = None  # computes its prefix right now
        self.fork_at = 0  # tokens to take over from the leader
        self.points: list[int] = []  # where chunks end, rising; all are ahead
        self.max_rows = 1  # of the next step, while prompt_logprobs is incomplete

    @property
    def n_behind(self) -> int:
        """Tokens not computed; 1 means decode."""
        return len(self.tokens) - self.n_computed

    @property
    def scoring(self) -> Scoring | None:
        """The tokens of it that have scores; None: none of them."""
        return self.request.scoring

    @property
    def scores(self) -> Items[TokenLogprobs]:
        """Scores that there are by now."""
        return self.sequence.prompt_logprobs

    @property
    def stats(self) -> SlotStats:
        """The slot at this moment."""
        sequence = self.sequence
        assert sequence.admitted is not None
        return SlotStats(
            slot=self.slot,
            request_id=self.request.request_id,
            client=self.request.client,
            n_prompt=self.request.n_prompt,
            n_cached=sequence.n_cached,
            n_computed=self.n_computed,
            n_output=sequence.n_output,
            admitted_s=sequence.admitted,
        )

    def note_cached(self, tier: CacheTier | None) -> None:
        """Note that the slot was filled from *tier*; it counts at the first start."""
        # What a preempted sequence gets back was computed for it before, and is no hit.
        sequence = self.sequence
        if not (sequence.n_output or sequence.n_preempted):
            sequence.n_cached = self.n_computed
            sequence.cache_tier = tier if self.n_computed else None


class ScoredSlot(Protocol):
    """A slot that has scores of its tokens, perhaps."""

    @property
    def scoring(self) -> Scoring | None:
        """The tokens of it that have scores; None: none of them."""

    @property
    def scores(self) -> Items[TokenLogprobs]:
        """Scores that there are by now."""


# Scores go along with tokens. The row of a token tells how likely the next one is, so a token that
# is not computed tells nothing. A sequence that is scored may take over tokens as far as it needs
# no rows of them: those before its first score, and those whose successors the slot has scored.


def n_scored_by(place: ScoredSlot, sequence: Sequence, n_same: int) -> tuple[int, int]:
    """
    How many of *n_same* common tokens *sequence* may have: by now, and in the end.

    Fewer if it needs rows of them, because *place* has no scores of what follows.
    """
    own, scoring = sequence.request.scoring, place.scoring
    n_own = min(sequence.n_unscored, n_same)
    if own is None or n_own == n_same:
        return n_same, n_same
    # Other scores are of no use: they begin too late, or list more or less.
    n_after = n_own + 1
    if scoring is None or scoring.n_top != own.n_top or scoring.first > n_after:
        return n_own, n_own
    # What follows the last common token differs, so its row is needed in any case.
    n_now = min(scoring.first - 1 + len(place.scores), n_same - 1)
    n_later = n_same - 1 if isinstance(place, Running) else n_now
    return max(n_own, n_now), max(n_own, n_later)


def take_scores(place: ScoredSlot, sequence: Sequence, n_tokens: int) -> None:
    """Give *sequence*, which has the first *n_tokens* of *place*, the scores that it has of them."""
    scoring, n_own = place.scoring, sequence.n_unscored
    if n_own < n_tokens:
        assert scoring is not None, "see n_scored_by()"
        first = n_own + 1 - scoring.first
        sequence.prompt_logprobs += place.scores[first : n_tokens + 1 - scoring.first]


# -- equal last digits ---------------------------------------------------------------


def n_reusable(sequence: Sequence) -> int:
    """
    Tokens of *sequence* that may be taken over; those after are computed.

    Of slots that have scores it may have more: see n_scored_by().
    """
    if sequence.is_scoring:
        return min(n_shareable(sequence), sequence.n_unscored)
    return sequence.whole(max(sequence.n_in_chunks - N_FRESH, 0))


def n_shareable(sequence: Sequence) -> int:
    """Likewise, whether it needs scores of them or not; such a prompt has no spans."""
    return max(sequence.n_in_chunks - N_FRESH, 0)


# If deterministic.


def n_kept(sequence: Sequence) -> int:
    """
    Tokens of *sequence* that others may take over, once they are computed.

    A prompt of one token was computed like output.
    """
    n_prompt = sequence.request.n_prompt
    return n_prompt if n_prompt >= N_FRESH else 0


def n_movable(n_tokens: int, n_swa: int) -> int:
    """
    The most of a slot's first *n_tokens* that others may get a copy of.

    libllama saves what is in the window and restores it to the first cells. Moved by less
    than ALIGN, sums over cells are made in another order.
    """
    n_moved = max(n_tokens - n_swa, 0) if n_swa else 0
    return n_tokens - n_moved % ALIGN
