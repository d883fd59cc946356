"""Figures of steps: counters of scheduler and executor, and the views of them for callers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from pyllama_raw.core.costs import StepCost
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
