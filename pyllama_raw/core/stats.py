"""
Figures of steps: counters of scheduler and executor, and speeds, by which a copy pays or not.

The frozen views of counters are what a caller gets.

A state is read from a device by copies that each take microseconds, however small. There is at
least one for each layer and each *run* of cells that lie side by side; without flash attention
values lie transposed, and there are hundreds. So `CopyPrice` is measured by small copies when the
context is made, before a large one is paid for. It is an estimate: a small copy says little of a
large one, and a busy machine makes it look dear. So the first captures are small, and later ones
are as large as the observed ones allow; where none is allowed a small one is tried now and then.

What was never measured is taken to pay, so that it is. A restore is judged by the fastest
one of its tier: a slow one says something about the moment, and a tier that is never used
could not be measured again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import ceil, inf
from typing import NamedTuple

from pyllama_raw.core.costs import SMOOTHING, CostHistory, StepCost
from pyllama_raw.core.request import FinishReason


@dataclass(slots=True)
class Counters:
    """Totals of SchedulerStats; the scheduler counts where it decides."""

    submitted: int = 0
    finished: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(map(str, FinishReason), 0)
    )
    failed: int = 0
    preempted: int = 0
    shifted: int = 0
    steps: int = 0
    aborted_steps: int = 0
    no_space_steps: int = 0
    failed_steps: int = 0
    rebuilds: int = 0
    computed_tokens: int = 0
    output_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Occupancy(NamedTuple):
    """Counts of what a scheduler has to do and holds, for records of steps."""

    n_running: int
    n_waiting: int
    n_cells_used: int
    n_host_bytes: int = 0  # of snapshots in host memory
    n_disk_bytes: int = 0  # of files
    budget: int | None = None  # of the last plan; None: it divided nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerStats:
    """The scheduler at one moment. Finished + failed + running + waiting = submitted."""

    n_slots: int
    """Requests that can run at a time."""
    running: int
    """Requests that have a slot, and those whose texts are becoming vectors."""
    waiting: int
    """Requests in the queue."""
    waiting_tokens: int
    """Prompt tokens of the requests in the queue."""
    n_cells: int
    """KV cells of the context."""
    n_cells_used: int = 0
    """KV cells that hold tokens."""
    kv_bytes_used: int = 0
    """Bytes of these, by the size that a state was measured to have; 0 if it has one size."""
    cache_bytes: int = 0
    """Bytes of snapshots in host memory, with those on their way."""
    disk_bytes: int = 0
    """Bytes of files of the cache."""
    submitted: int
    """Requests that came since the start."""
    finished: dict[str, int]
    """Requests that ended without an error, by finish reason."""
    failed: int
    """Requests that ended with an error."""
    policy_faults: int = 0
    """Times that a hook of the scheduling policy raised or returned what it must not."""
    preempted: int
    """Times that a request lost its slot."""
    swapped: int = 0
    """Times that host memory kept what such a request had; else it is computed again."""
    swapped_bytes: int = 0
    """Bytes that were kept so since the start."""
    shifted: int
    """Times that a full slot dropped its oldest tokens."""
    steps: int
    """Steps since the start."""
    aborted_steps: int
    """Steps that were stopped, because nobody wanted their result any more."""
    no_space_steps: int
    """Steps that found no free cells."""
    failed_steps: int
    """Decodes that libllama refused or could not do."""
    rebuilds: int
    """Failed steps after which the context was made anew."""
    computed_tokens: int
    """Tokens that went through a successful decode."""
    output_tokens: int
    """Tokens of all outputs."""
    drafted_tokens: int = 0
    """Tokens that were computed before they were sampled."""
    accepted_tokens: int = 0
    """Drafted tokens that were sampled; the others were computed in vain."""
    step_cost: StepCost | None = None
    """What a step takes, as learned from the steps; None before the first one."""


@dataclass(frozen=True, slots=True)
class SlotStats:
    """A slot that runs a request, at one moment."""

    slot: int
    """The number of the slot."""
    request_id: int
    """The request, as events and logs name it."""
    client: str | None
    """The sender of the request."""
    n_prompt: int
    """Tokens of its prompt."""
    n_cached: int
    """Prompt tokens that were not computed when it first got a slot."""
    n_computed: int
    """Tokens that the slot holds, of the prompt and of the output."""
    n_output: int
    """Tokens that were generated."""
    admitted_s: float
    """The time at which it first got a slot, on the engine clock."""


@dataclass(frozen=True, slots=True)
class SlotFile:
    """A file with the state of a slot, as it was written or read."""

    slot: int
    """The number of the slot."""
    n_tokens: int
    """Tokens of the state."""
    n_bytes: int
    """Bytes of the file."""
    seconds: float
    """The time that it took."""


class Eviction(StrEnum):
    """The reason for which an entry left."""

    SPACE = "space"  # another one needed the bytes or the place
    REPLACED = "replaced"  # a longer state of its lineage was stored
    DROPPED = "dropped"  # its restore failed, or that of one it builds on
    CLEARED = "cleared"


class Refusal(StrEnum):
    """The reason for which a snapshot was not stored."""

    TOO_BIG = "too big"  # more than the limits allow in an empty cache
    NO_ROOM = "no room"  # all others are pinned or reserved
    STALE = "stale"  # the cache changed between plan_store() and reserve()
    LOST = "lost"  # cleared, or its ground dropped, while it was captured
    COVERED = "covered"  # another one stored the same meanwhile
    ABANDONED = "abandoned"  # the capture failed


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts since the start, some of them of tokens, and what is held now."""

    n_queries: int
    """Prompts that the cache was asked for."""
    n_query_tokens: int
    """Tokens of these prompts."""
    n_hit_tokens_live: int
    """Tokens found in the memory of a slot."""
    n_hit_tokens_host: int
    """Tokens found in a snapshot; among files, those that were read."""
    n_sparse_tokens: int
    """Tokens that are known, but that no entry can restore."""
    n_stores: int
    """Snapshots that were stored."""
    n_stored_tokens: int
    """Tokens of these snapshots."""
    n_evictions: Mapping[Eviction, int]
    """Snapshots that left, by reason."""
    n_refusals: Mapping[Refusal, int]
    """Snapshots that were not stored, by reason."""
    n_entries: int
    """Snapshots held now."""
    n_pinned: int
    """Snapshots that are being restored."""
    n_reserved: int
    """Snapshots that are being captured."""
    n_bytes: int
    """Bytes of all snapshots, their tokens included."""
    n_reserved_bytes: int
    """Bytes promised to snapshots that are being captured."""
    n_lent_bytes: int
    """Bytes of states on their way to files."""
    max_entries: int
    """The limit of snapshots."""
    max_bytes: int
    """The limit of bytes."""
    disk: CacheStats | None = None
    """The same of files; None without a directory."""


@dataclass(frozen=True)
class StepTimes:
    """Seconds of an executor since it was made, by what they went into."""

    decode_s: float = 0.0
    """Total seconds in llama_decode."""
    sample_s: float = 0.0
    """Total seconds of choosing tokens."""
    capture_s: float = 0.0
    """Total seconds of copying slots to host memory, for the cache."""
    restore_s: float = 0.0
    """Total seconds of copying snapshots back."""
    dropped_steps: int = 0
    """Steps that were begun ahead and not wanted; `steps` does not count them."""
    lane_fallbacks: int = 0
    """Requests that were sampled on the host although lanes were wanted."""
    adapter_switches: int = 0
    """Times that the context went from one set of adapters to another."""
    adapter_switch_s: float = 0.0
    """Total seconds that this took, by what one costs as measured."""
    decode_cpu_s: float = 0.0
    """Seconds of `decode_s` in which the computing thread had a CPU; 0: a GPU computes."""


@dataclass(frozen=True)
class MediaStats:
    """The encodes of images and sounds since the engine was opened."""

    encodes: int = 0
    """Images and sounds that were encoded."""
    encodes_shared: int = 0
    """Times that an image or a sound was wanted and needed no encode of its own."""
    encodes_failed: int = 0
    """Encodes that failed."""
    encodes_cancelled: int = 0
    """Encodes that ended early, because nobody wanted them any more."""
    encode_s: float = 0.0
    """Total seconds of all these, the steps in their midst included."""
    media_bytes: int = 0
    """Bytes of images, sounds and their rows that open requests hold."""
    row_bytes: int = 0
    """Bytes of all rows that are there."""


FREE_S = 0.001  # a copy that takes less is not weighed: any step takes as long
SHARE = 0.5  # of `target_step_s`, the most that captures take of a step that others wait for
SLACK = 0.1  # of `target_step_s`, by which a step may be longer
CHUNK = 64  # tokens of a prompt in one run of cells, as a rule
MIN_PART = 16  # tokens; a smaller beginning is not worth a search
GROWTH = 4  # of what a step captures, over the largest capture that was observed
DOUBT = (
    0.1  # of the seconds of a small copy, by which the price of a token may be wrong
)
N_PROBED = 2  # tokens of a small copy
RELIEF = 0.9  # of the highest price, after a capture that it forbids
SLOW_RELIEF = 0.975  # of the lowest one, as long as it is not confirmed
MIN_OBSERVED_COPIES = 2  # that confirm it
MAX_REFUSALS = 16  # captures that do not pay before a small one is tried
ALONE = 10  # times `target_s`, what a trial may take where nobody waits
LEAST_TOKEN_S = 1e-9  # less is a price of 0
MIN_BYTES_PER_S = 2**30  # of a copy to fresh memory


@dataclass(frozen=True, slots=True)
class CopyPrice:
    """Seconds of copies between a context and host memory; 0: not measured, or nothing."""

    base_s: float = 0.0  # of a capture whose cells are one run
    run_s: float = 0.0  # of each further run
    token_s: float = 0.0  # of each cell
    restore_s: float = 0.0  # of filling a slot, however little


class CopySpeed:
    """
    Bytes a second of one tier, at best.

    Args:
        base_s: of a restore, however small it is.
    """

    def __init__(self, prefill: CostHistory, base_s: float = 0.0) -> None:
        self._prefill = prefill
        self._base_s = base_s if base_s > FREE_S else 0.0
        self._bytes_per_s = 0.0

    def observe(self, n_bytes: int, seconds: float) -> None:
        """Learn from a restore of *n_bytes* that took *seconds*."""
        # It may have taken less than the base as measured. A tenth of it at least was copying.
        copied_s = max(seconds - self._base_s, seconds / 10)
        if copied_s > 0:
            self._bytes_per_s = max(self._bytes_per_s, n_bytes / copied_s)

    def seconds(self, n_bytes: int) -> float:
        """Seconds that a restore of *n_bytes* takes at best."""
        copied_s = n_bytes / self._bytes_per_s if self._bytes_per_s else 0.0
        return self._base_s + copied_s

    def n_worth(self, n_bytes: int) -> int:
        """The least tokens that take as long to compute as *n_bytes* to restore."""
        return ceil(self.seconds(n_bytes) * (self._prefill.tokens_per_s or 0.0))


class Capture(NamedTuple):
    """A capture of a slot that pays."""

    stop: int  # of the tokens that are captured
    n_runs: int  # of cells, as a rule
    bound_s: float  # what it takes at most, of the time that a step has for captures


class Captures:
    """
    Decides which captures a step makes, by their price.

    Rules:
    1. What is dearer to capture than to compute again is not captured.
    2. Others who wait for a step wait for its captures, too. So these take no more than half of
       `target_s`, and no more than decodes leave of it; prompts get less of the step. What does
       not fit is captured in part, from its start on, or not at all.
    3. The price that rule 2 counts with is the highest one observed, which falls with each
       capture that is cheaper. A step captures in parts a few tokens at first, and then a few
       times what was observed, so a wrong price is noticed while it is small.
    4. A capture proves that none of its tokens took longer than all of it. After some captures
       that were not made for their price a few tokens are captured to see whether it is right,
       if they fit in a step by that price. So neither a busy moment nor a wrong
       first measure ends all captures.

    Outputs lie in cells one by one among those of other sequences, and prompts in runs. So an
    output is often not worth what its prompt is.

    Args:
        price: None: not measured, so all pays until a capture is observed.
        token_bytes: of a state, for each token of it.
    """

    def __init__(
        self,
        price: CopyPrice | None,
        prefill: CostHistory,
        target_s: float,
        token_bytes: int = 0,
    ) -> None:
        self.spent_s = 0.0  # of this step
        self._left_s = inf
        self._trial_s = 0.0
        self._n_left = inf  # tokens
        self._is_measured = price is not None
        price = price or CopyPrice()
        base_s, run_s, token_s = price.base_s, price.run_s, price.token_s
        # The base is that of a capture of several tokens, none of which took longer than all.
        if base_s:
            run_s, token_s = min(run_s, base_s), min(token_s, base_s)
        self._base_s, self._run_s, self._token_s = base_s, run_s, token_s
        self._prefill = prefill
        self._target_s = target_s
        # Of a token, in a run of its own: at least, and at most.
        self._least_s = token_s + run_s + DOUBT * base_s
        # Bytes alone have a price that small copies do not show.
        if self._is_measured:
            self._least_s += token_bytes / MIN_BYTES_PER_S
        self._worst_s = max(self._least_s, base_s / N_PROBED)
        self._n_observed = 0  # captures
        self._max_observed = 0  # tokens of one
        self._n_refused = 0  # captures since the last one
        self._decode_s = 0.0  # of a step without prompts

    def begin(self, *, others_wait: bool) -> None:
        """Begin a step; without others only rule 1 holds."""
        target_s, decode_s = self._target_s, self._decode_s
        self.spent_s, self._left_s, self._n_left = 0.0, inf, inf
        self._trial_s = ALONE * target_s
        if not others_wait:
            return
        self._trial_s = target_s - decode_s
        # Rule 2, with a little that is always allowed, or nothing would ever be captured.
        share_s = min(target_s * SHARE, target_s - decode_s)
        self._left_s = max(share_s, SLACK * max(target_s, decode_s))
        # Rule 3: a few tokens at first, then a few times as many as were observed.
        if self._is_measured:
            self._n_left = max(MIN_PART, GROWTH * self._max_observed)

    def reserve_slack(self) -> None:
        """Prompts have the rest of the step now: what else is captured is beyond the target."""
        if self._left_s != inf:
            self._left_s = min(self._left_s, SLACK * self._target_s)
            self._trial_s = min(self._trial_s, SLACK * self._target_s)

    def plan(
        self, start: int, stop: int, n_prompt: int, *, in_parts: bool
    ) -> Capture | None:
        """
        The capture of the tokens [start, stop) of a slot, or of their beginning.

        Args:
            n_prompt: tokens before that one were computed in chunks.
            in_parts: a beginning is of use, too.

        Returns:
            None if none pays, or there is no time for it. Call spend() with it else.
        """
        n_prompt = min(max(n_prompt, start), stop)
        if in_parts:
            capture = self._part(start, stop, n_prompt)
        else:
            capture = self._whole(start, stop, n_prompt)
        if capture is not None:
            return capture
        # Rule 4: after some refusals a few tokens are captured to see what they take.
        self._n_refused += 1
        if self._n_refused <= MAX_REFUSALS:
            return None
        return self._trial(start, stop, in_parts=in_parts)

    def _part(self, start: int, stop: int, n_prompt: int) -> Capture | None:
        """The prompt alone if its output does not pay, and what of it there is time for."""
        stops = (stop, n_prompt) if n_prompt > start else (stop,)
        end = max(stops, key=lambda end: self._gain_s(start, end, n_prompt))
        # The cells of a beginning may lie apart, so each token counts as a run.
        n_most = self._n_left
        if self._worst_s and self._left_s != inf:
            n_most = min(n_most, (self._left_s - self._base_s) / self._worst_s)
        if n_most < end - start:
            end = start + max(int(n_most), 0)
        if end < stop and end - start < MIN_PART:
            return None
        bound_s = self._bound_s(end - start)
        if bound_s > self._left_s or self._gain_s(start, end, n_prompt) <= 0:
            return None
        return Capture(end, _n_runs(start, end, n_prompt), bound_s)

    def _whole(self, start: int, stop: int, n_prompt: int) -> Capture | None:
        """All or nothing: no smaller capture can say what it takes, so the price is trusted."""
        bound_s = self._bound_s(stop - start)
        is_unpriced = self._is_measured and not bound_s and stop - start > self._n_left
        if bound_s > self._left_s or is_unpriced:
            # The highest price may be that of a busy moment, and no beginning can correct it. So
            # the lowest one counts in the end, which is doubted, too, before it is confirmed.
            self._worst_s = max(self._worst_s * RELIEF, self._least_s)
            if self._n_observed < MIN_OBSERVED_COPIES:
                self._least_s *= SLOW_RELIEF
            return None
        if self._gain_s(start, stop, n_prompt) <= 0:
            return None
        return Capture(stop, _n_runs(start, stop, n_prompt), bound_s)

    def _trial(self, start: int, stop: int, *, in_parts: bool) -> Capture | None:
        """A capture that need not pay, to learn what captures take."""
        left_s, n_tokens = self._trial_s - self.spent_s, stop - start
        # A beginning suffices, if it is of use. Else all of it is tried.
        if in_parts:
            n_tokens = min(n_tokens, MIN_PART)
            n_fit = (left_s - self._base_s) / max(self._worst_s, LEAST_TOKEN_S)
            n_tokens = min(n_tokens, max(int(n_fit), 1))
        bound_s = self._bound_s(n_tokens)
        if bound_s > left_s or n_tokens > self._n_left:
            return None
        return Capture(start + n_tokens, n_tokens, bound_s)

    def spend(self, capture: Capture, n_tokens: int) -> None:
        """The step makes *capture*, of *n_tokens*."""
        self._left_s -= capture.bound_s
        self._n_left -= n_tokens
        self.spent_s += capture.bound_s
        self._n_refused = 0

    def observe(self, n_tokens: int, n_runs: int, seconds: float) -> None:
        """Learn from a capture that took *seconds*."""
        if seconds <= 0 or n_tokens < 1:
            return
        # No part of a capture took longer than all of it.
        self._max_observed = max(self._max_observed, n_tokens)
        self._base_s = min(self._base_s, seconds)
        self._run_s = min(self._run_s, seconds)
        # What goes beyond the base is the price of tokens, at worst all of it.
        beyond_s, n_beyond = seconds - self._base_s, max(n_tokens - N_PROBED, 1)
        worst_s = beyond_s / n_beyond
        token_s = max(beyond_s - self._run_s * (n_runs - 1), 0.0) / n_beyond
        # The highest price rises at once, so that no step is too long twice, and falls slowly.
        self._worst_s = max(worst_s, min(self._worst_s * (1 - SMOOTHING), seconds))
        self._least_s = min(self._least_s, worst_s) if self._n_observed else worst_s
        self._n_observed += 1
        self._token_s = min(
            self._token_s + SMOOTHING * (token_s - self._token_s), seconds
        )

    def observe_decode(self, seconds: float) -> None:
        """Learn from a step without prompts and moves."""
        self._decode_s += SMOOTHING * (seconds - self._decode_s)

    def _bound_s(self, n_tokens: int) -> float:
        """What a capture takes at most."""
        return self._base_s + n_tokens * self._worst_s

    def _expected_s(self, start: int, stop: int, n_prompt: int) -> float:
        by_runs_s = self._run_s * (_n_runs(start, stop, n_prompt) - 1)
        return self._base_s + by_runs_s + self._token_s * (stop - start)

    def _gain_s(self, start: int, stop: int, n_prompt: int) -> float:
        """Seconds that a capture saves whoever computes its tokens again."""
        expected_s, speed = (
            self._expected_s(start, stop, n_prompt),
            self._prefill.tokens_per_s,
        )
        if speed is None or expected_s <= FREE_S:
            return stop - start  # the more the better
        return (stop - start) / speed - expected_s


def _n_runs(start: int, stop: int, n_prompt: int) -> int:
    """Runs of cells, as a rule: a chunk of a prompt is one, and each token of output."""
    n_in_chunks = min(stop, n_prompt) - start
    return max(ceil(n_in_chunks / CHUNK) + stop - max(n_prompt, start), 1)
