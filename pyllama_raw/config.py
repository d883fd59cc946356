"""
Options as users write them, checked once and then frozen.

Every field reaches something: tests/test_config.py shows where. Unknown keys and values
out of range are refused before anything native runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pyllama_raw import cpus
from pyllama_raw.frozen import Frozen, wrong

KVType = Literal["f32", "f16", "bf16", "q8_0", "q4_0", "q4_1", "iq4_nl", "q5_0", "q5_1"]
Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
MIN_CHUNK = 3  # tokens a step must take to divide any prompt and leave none alone


class ModelConfig(Frozen):
    """How the model file is loaded (llama.h: llama_model_params)."""

    n_gpu_layers: Annotated[int, Field(ge=-1)] = -1  # -1: all that fit the devices
    devices: tuple[str, ...] | None = None  # names as `info` lists them; None: all
    split_mode: Literal["none", "layer", "row", "tensor"] = "layer"
    main_gpu: Annotated[int, Field(ge=0)] = 0  # with split_mode "none"
    tensor_split: tuple[Annotated[Finite, Field(ge=0)], ...] | None = None
    load_mode: Literal["auto", "none", "mmap", "mlock", "mmap_mlock", "direct_io"] = (
        "auto"
    )
    lazy_mode: Literal["off", "auto", "on"] = "auto"
    kv_overrides: dict[str, bool | int | Finite | str] = Field(default_factory=dict)
    check_tensors: bool = False
    use_extra_bufts: bool = True  # repack weights for the CPU at hand
    no_host: bool = False
    load_mtp: bool = False


class ContextConfig(Frozen):
    """The memory and graph of the context (llama.h: llama_context_params)."""

    n_ctx: Count | None = None  # KV cells of all slots; None: 2048 a slot, or less
    n_batch: Count = 2048  # most tokens one llama_decode takes
    n_ubatch: Count = 512  # most tokens one graph computes
    n_outputs_max: Count | None = None  # rows of logits a step; None: 32, or n_slots
    n_threads: Count | None = None  # None: one a physical core, within the quota
    n_threads_batch: Count | None = None  # None: n_threads
    kv_unified: bool = True  # one pool of cells for all slots
    flash_attn: Literal["auto", "on", "off"] = "auto"
    type_k: KVType = "f16"
    type_v: KVType = "f16"
    swa_full: bool = True
    offload_kqv: bool = True
    op_offload: bool = True
    fast_kernels: bool = True  # our own: Q4_1, Q8_0, attention, where they run
    rope_scaling: Literal["model", "none", "linear", "yarn", "longrope"] = "model"
    rope_freq_base: Annotated[Finite, Field(ge=0)] = 0.0  # 0: from the model
    rope_freq_scale: Annotated[Finite, Field(ge=0)] = 0.0  # 0: from the model
    yarn_ext_factor: Finite = -1.0  # negative: from the model
    yarn_attn_factor: Finite = -1.0
    yarn_beta_fast: Finite = -1.0
    yarn_beta_slow: Finite = -1.0
    yarn_orig_ctx: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.n_ubatch > self.n_batch:
            raise wrong("n_ubatch", self.n_ubatch, f"at most n_batch ({self.n_batch})")
        if self.flash_attn == "off" and self.type_v not in ("f32", "f16", "bf16"):
            raise wrong(
                "type_v", self.type_v, "f32, f16 or bf16 without flash attention"
            )
        return self

    @property
    def threads(self) -> int:
        """Threads for one-token batches, resolved."""
        return self.n_threads or cpus.n_threads()


class SchedulerConfig(Frozen):
    """Who runs, when, and how much of it in one step."""

    n_slots: Annotated[int, Field(ge=1, le=256)] = 8
    token_budget: Count | None = None  # tokens a step; None: chosen from target_step_s
    target_step_s: Annotated[Finite, Field(gt=0)] = 0.3  # with streams running
    prefill_quantum: Count = 256  # tokens of one prompt before the next one's turn
    max_waiting: Annotated[int, Field(ge=0)] = 1024  # requests beyond the slots
    max_waiting_tokens: Annotated[int, Field(ge=0)] = 2**20  # prompt tokens of these
    max_overtakes: Annotated[int, Field(ge=0)] = 16  # of a blocked head of the queue
    context_full: Literal["stop", "shift"] = "stop"
    n_keep: Annotated[int, Field(ge=0)] = 4  # tokens a shift never drops


class CacheConfig(Frozen):
    """
    All callers share prefixes of prompts and outputs, unless `cache_salt` divides them.

    By time and `usage.cached_tokens` a caller can tell what others have sent. A request
    with a `cache_salt` shares with those of an equal one only; `scope="salt"` has a
    request without one share with nobody, and leaves no file of it.

    Only files of the process's user are read from `directory`, written and deleted there.
    """

    mode: Literal["off", "live", "snapshots"] = "snapshots"  # live: slots only
    snapshot_interval_tokens: Annotated[int, Field(ge=0)] = 256  # 0: none regular
    max_bytes: Annotated[int, Field(ge=0)] = 2**30  # of host memory, never exceeded
    max_entries: Annotated[int, Field(ge=0)] = 65536
    # Of files that outlive the process; a state waits for the disk within max_bytes.
    directory: Path | None = None
    max_disk_bytes: Annotated[int, Field(ge=0)] = 10 * 2**30  # in directory, of all
    eviction: Literal["lru", "lfu", "fifo", "size_aware", "cost_aware"] = "lru"
    scope: Literal["shared", "salt"] = "shared"  # salt: only requests with cache_salt
    parked_slots: Annotated[int, Field(ge=0, le=254)] | None = None  # None: by mode

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.directory is not None and not self.max_bytes:
            raise wrong(
                "max_bytes",
                self.max_bytes,
                "more than 0 with a directory: a state waits there for the disk",
            )
        return self


class EngineConfig(Frozen):
    """Everything an engine is made from."""

    model: ModelConfig = ModelConfig()
    context: ContextConfig = ContextConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    cache: CacheConfig = CacheConfig()
    # Where tokens are chosen: backend is in the graph, where that can be.
    sampler_placement: Literal["auto", "backend", "host"] = "auto"
    deterministic: bool = False  # outputs do not depend on what runs beside

    @model_validator(mode="after")
    def _check(self) -> Self:
        n_ctx, n_slots = self.context.n_ctx, self.scheduler.n_slots
        if n_ctx is not None and n_ctx < n_slots:
            allowed = f"at least n_slots ({n_slots}): it is the cells of all slots"
            raise wrong("context.n_ctx", n_ctx, allowed)
        if self.deterministic:
            self._check_chunks()
        return self

    def _check_chunks(self) -> None:
        """No chunk of a prompt may be a single token, and no rest of one."""
        context, scheduler = self.context, self.scheduler
        if context.n_ubatch < max(MIN_CHUNK, scheduler.n_slots):
            raise wrong(
                "context.n_ubatch",
                context.n_ubatch,
                f"at least {MIN_CHUNK} and n_slots ({scheduler.n_slots}), if deterministic",
            )
        limits = {
            "scheduler.token_budget": scheduler.token_budget,
            "context.n_outputs_max": context.n_outputs_max,
        }
        for name, value in limits.items():
            if value is not None and value < MIN_CHUNK:
                raise wrong(name, value, f"at least {MIN_CHUNK}, if deterministic")

    @property
    def resolved_context(self) -> ContextConfig:
        """The context with what `deterministic` pins (ARCHITECTURE.md, Exactness)."""
        if not self.deterministic:
            return self.context
        pinned = {"kv_unified": False, "flash_attn": "off", "swa_full": True}
        return ContextConfig(**(self.context.model_dump() | pinned))
