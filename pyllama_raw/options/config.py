"""
Options as users write them, checked once and then frozen.

Every field reaches something: tests/test_config.py shows where. Unknown keys and values
out of range are refused before anything native runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from pyllama_raw.native import (
    FlashAttention,
    KVType,
    LazyMode,
    LoadMode,
    RopeScaling,
    SplitMode,
)
from pyllama_raw.options import chat_templates
from pyllama_raw.options.frozen import AnyPath, Frozen, Listed, Mapped
from pyllama_raw.options.machine import n_threads
from pyllama_raw.policy import allowed_names, is_known

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
ImageRows = Annotated[int, Field(ge=1, le=2**16)]  # their pixels fit 32 bits
Token = Annotated[int, Field(ge=0, le=2**31 - 1)]
Finite = Annotated[float, Field(allow_inf_nan=False)]
MIN_CHUNK = 3  # tokens a step must take to divide any prompt and leave none alone


OF_CHATS = (
    "chat_template",
    "template_process",
)  # options that no load of a model reads


class LeaseConfig(Frozen):
    """Slots of devices, so that no more models are loaded to one than it can bear."""

    max_models: Annotated[int, Field(ge=1, le=256)] = 1
    """Models that a device holds at most, of all processes that take leases."""
    margin_bytes: Annotated[int, Field(ge=0)] = 2**29
    """Bytes that must be free on a device before a model is loaded to it."""
    directory: AnyPath | None = None
    """The directory of the slots. None: one of this user, among temporary files."""


class ModelConfig(Frozen):
    """Options of loading the model file (llama.h: llama_model_params)."""

    n_gpu_layers: Annotated[int, Field(ge=-1)] = -1
    """Layers that devices compute; -1 is all that fit."""
    devices: Listed[str] | None = None
    """Devices to use, named as `info` lists them. None: all."""
    split_mode: SplitMode = "layer"
    """The way that several devices share the model."""
    main_gpu: Annotated[int, Field(ge=0)] = 0
    """The device that has the whole model if split_mode is none."""
    tensor_split: Listed[Annotated[Finite, Field(ge=0)]] | None = None
    """The share of each device in the model. None: by free memory."""
    load_mode: LoadMode = "auto"
    """
    The way that the model file is read into memory. Kernels of ours that weave weights (AVX2) need
    them mapped, as auto and mmap do: mmap_mlock holds them twice, and with the others libllama
    multiplies, slower on such CPUs and with other last digits.
    """
    lazy_mode: LazyMode = "auto"
    """Whether weights may be read from the file when they are first used."""
    kv_overrides: Mapped[str, bool | int | Finite | str] = Field(default_factory=dict)
    """Metadata of the model file that is replaced, by key."""
    check_tensors: bool = False
    """Whether every weight is checked to be a finite number while it loads."""
    use_extra_bufts: bool | None = None
    """
    Whether libllama may keep weights in an order that suits this CPU. None: unless kernels of
    ours multiply all weights of the model here, which are faster and keep an order of their own.
    """
    load_mtp: bool = False
    """
    Whether heads of multi-token prediction are loaded, if the file has some. speculation.mode mtp
    loads them without being told; a Model that is opened before its engine has to be told.
    """
    no_host: bool = False
    """Whether host memory of devices is avoided, so that extra buffers are used."""
    lease: LeaseConfig | None = None
    """Slots that the model takes on its devices while it is loaded. None: it takes none."""
    chat_template: str | None = None
    """
    The chat template, as Jinja text, a name such as chatml, or the path of a file. None: the
    model's own; auto: that, or chatml where the file has none.
    """
    template_process: bool = True
    """
    Whether chat templates run in a process of their own, with limits of time and memory. False:
    they run in this process, for templates that you trust.
    """

    @property
    def loading(self) -> dict[str, Any]:
        """Fields that libllama reads."""
        return self.model_dump(exclude={"path", "lease", *OF_CHATS})

    @property
    def opening(self) -> dict[str, Any]:
        """Fields for whoever loads the model: those that are not the default; a lease as it is."""
        excluded = {"path", "lease", *OF_CHATS}
        fields = self.model_dump(exclude_defaults=True, exclude=excluded)
        return fields if self.lease is None else {**fields, "lease": self.lease}

    def _misfits(self) -> Iterator[tuple[str, str]]:
        if self.chat_template is not None and self.chat_template != chat_templates.AUTO:
            try:
                chat_templates.given_template(self.chat_template)
            except ValueError as error:
                yield "chat_template", f"{chat_templates.ALLOWED} ({error})"


class ContextConfig(Frozen):
    """The memory and graph of the context (llama.h: llama_context_params)."""

    n_ctx: Count | None = None
    """
    KV cells of all slots together, in multiples of 256. None: 2048 a slot, or less.
    """
    n_batch: Count = 2048
    """Most tokens that one call of llama_decode takes."""
    n_ubatch: Count = 512
    """Most tokens that one graph computes."""
    n_outputs_max: Count | None = None
    """Rows of logits in one step. None: 32, or n_slots."""
    n_threads: Count | None = None
    """Threads that compute the next tokens of streams. None: one a core."""
    n_threads_batch: Count | None = None
    """Threads that compute prompts. None: n_threads."""
    kv_unified: bool = True
    """One pool of cells for all slots; otherwise each slot has its own part."""
    flash_attn: FlashAttention = "auto"
    """Flash attention; auto uses it where the device can."""
    type_k: KVType = "f16"
    """Type of the keys in a cell."""
    type_v: KVType = "f16"
    """Type of the values in a cell; all but f32, f16 and bf16 need flash attention."""
    swa_full: bool = True
    """Whether layers with a sliding window keep cells of the whole context."""
    offload_kqv: bool = True
    """Whether devices hold the KV cells and compute attention."""
    op_offload: bool = True
    """Whether devices compute large products of weights that the host holds."""
    fast_kernels: bool = True
    """Whether kernels of our own compute products of quantised weights and attention where they can."""
    rope_scaling: RopeScaling = "model"
    """Scaling of positions beyond the training length; model is its own way."""
    rope_freq_base: Annotated[Finite, Field(ge=0)] = 0.0
    """Base frequency of RoPE; 0 is that of the model."""
    rope_freq_scale: Annotated[Finite, Field(ge=0)] = 0.0
    """Frequency scale of RoPE; 0 is that of the model."""
    yarn_ext_factor: Finite = -1.0
    """Extrapolation mix of YaRN; negative is that of the model."""
    yarn_attn_factor: Finite = -1.0
    """Scale of attention of YaRN; negative is that of the model."""
    yarn_beta_fast: Finite = -1.0
    """Low correction dimension of YaRN; negative is that of the model."""
    yarn_beta_slow: Finite = -1.0
    """High correction dimension of YaRN; negative is that of the model."""
    yarn_orig_ctx: Annotated[int, Field(ge=0)] = 0
    """Context length that YaRN scales from; 0 is that of the model."""

    def _misfits(self) -> Iterator[tuple[str, str]]:
        if self.n_ubatch > self.n_batch:
            yield "n_ubatch", f"at most n_batch ({self.n_batch})"
        if self.flash_attn == "off" and self.type_v not in ("f32", "f16", "bf16"):
            yield "type_v", "f32, f16 or bf16 without flash attention"

    @property
    def threads(self) -> int:
        """Threads for one-token batches, resolved."""
        return self.n_threads or n_threads()


class SchedulerConfig(Frozen):
    """Rules of the scheduler: the requests that run, when, and their share of a step."""

    n_slots: Annotated[int, Field(ge=1, le=256)] = 8
    """Requests that run at the same time."""
    token_budget: Count | None = None
    """Tokens in one step. None: as many as target_step_s allows."""
    target_step_s: Annotated[Finite, Field(gt=0)] | None = None
    """
    Seconds that a step may take while streams run. None: 0.1, or twice the fixed time of a step if that
    is more (docs/policies.md).
    """
    prefill_order: Literal["shortest", "turns"] = "shortest"
    """
    The prompt that goes on: the one with the fewest tokens left, and each fifth step the one that
    came first; or each in turn.
    """
    prefill_quantum: Count = 256
    """Tokens of one prompt before the next one has its turn, where they take turns."""
    max_waiting: Annotated[int, Field(ge=0)] = 1024
    """Requests that may wait beyond those that fill the slots."""
    max_waiting_tokens: Annotated[int, Field(ge=0)] = 2**20
    """Prompt tokens of all requests that wait."""
    max_overtakes: Annotated[int, Field(ge=0)] = 16
    """Requests that may pass the first one while it does not fit, or by a policy."""
    preempt: Literal["memory", "priority"] = "memory"
    """
    Reasons to take the slot of a running request, which continues later: short memory, or also
    a more urgent request that waits, which needs the policy fcfs.
    """
    victim: Literal["latest", "largest", "smallest"] = "latest"
    """
    The request that loses its slot: the last by priority and arrival, or the one that holds
    most tokens, or fewest. A policy with a victim_key decides itself.
    """
    context_full: Literal["stop", "shift"] = "stop"
    """
    The end of a full slot: the output stops, or its oldest tokens are shifted out.
    """
    n_keep: Annotated[int, Field(ge=0)] = 4
    """Tokens at the beginning of a prompt that a shift never drops."""
    policy: str = "fcfs"
    """
    The order of requests: fcfs, priority, sjf, lpm, edf, vtc, hrrn, spf, a registered name, or
    module:Class.
    """
    budget_mode: Literal["balanced", "latency_first", "throughput_first"] = "balanced"
    """The shares of streams and prompts in a step; balanced serves all streams, then prompts."""

    def _misfits(self) -> Iterator[tuple[str, str]]:
        if self.preempt == "priority" and self.policy != "fcfs":
            yield "preempt", "memory with a policy other than fcfs"

    @field_validator("policy")
    @classmethod
    def _check_policy(cls, name: str) -> str:
        if name != "fcfs" and not is_known(name):
            raise ValueError(allowed_names())
        return name


class CacheConfig(Frozen):
    """
    All callers share prefixes of prompts and outputs, unless `cache_salt` divides them.

    By time and `usage.cached_tokens` a caller can tell what others have sent. A request
    with a `cache_salt` shares with those of an equal one only; `scope="salt"` has a
    request without one share with nobody, and leaves no file of it.

    Whoever may write to `directory` is trusted, so give one that only you write to.
    """

    mode: Literal["off", "live", "snapshots"] = "snapshots"
    """Reuse of earlier work. off: none; live: that in slots; snapshots: that in host memory, too."""
    snapshot_interval_tokens: Annotated[int, Field(ge=0)] = 256
    """
    Tokens between snapshots where memory cannot be cut; 0 makes none at regular places.
    """
    max_bytes: Annotated[int, Field(ge=0)] = 2**30
    """Host memory for snapshots, in bytes, which is never exceeded."""
    max_entries: Annotated[int, Field(ge=0)] = 65536
    """Snapshots kept at most."""
    directory: AnyPath | None = None
    """The directory of files that keep slots for later processes. None: no files."""
    max_disk_bytes: Annotated[int, Field(ge=0)] = 10 * 2**30
    """Bytes of all files in the directory, those of other processes included."""
    scope: Literal["shared", "salt"] = "shared"
    """
    The requests that share prefixes: all without a cache_salt, or only those with an equal one.
    """
    parked_slots: Annotated[int, Field(ge=0, le=254)] | None = None
    """Slots beyond n_slots that only keep prefixes. None: as the mode needs."""

    def _misfits(self) -> Iterator[tuple[str, str]]:
        if self.directory is not None and not self.max_bytes:
            allowed = "more than 0 with a directory: a state waits there for the disk"
            yield "max_bytes", allowed


class LogConfig(Frozen):
    """Logs of steps and requests, without any text; by default none."""

    max_steps: Annotated[int, Field(ge=0)] = 0
    """Steps kept in memory, the latest ones, for `step_log()`."""
    max_requests: Annotated[int, Field(ge=0)] = 0
    """Requests kept in memory once they have ended, for `request_log()`."""
    step_log: AnyPath | None = None
    """
    A file that gets a line of JSON for each step; an older such log is emptied. None: none.
    """
    request_log: AnyPath | None = None
    """
    A file that gets a line of JSON for each request that has ended; an older such log is
    emptied. None: none.
    """


class EmbeddingConfig(Frozen):
    """Limits of a step that makes vectors of texts."""

    max_step_tokens: Count = 2048
    """
    Most tokens of a step, and of a text that must be computed at once; above 64 it is
    rounded down to a multiple of that.
    """
    max_step_bytes: Count = 2**29
    """
    Bytes that libllama may reserve for what a step gives out: for each of its tokens a
    float of every token of the vocabulary, although nobody reads them.
    """


class MediaConfig(Frozen):
    """Images and sounds in prompts."""

    mmproj: AnyPath | None = None
    """
    The projector of the model: a GGUF file, hf:OWNER/REPO/FILE, or auto, which is the file
    mmproj*.gguf beside the model. None: prompts are text.
    """
    image_min_tokens: ImageRows | None = None
    """Fewest rows of an image, of projectors that can choose. None: as the file says."""
    image_max_tokens: ImageRows | None = None
    """Most rows of an image, of projectors that can choose. None: as the file says."""
    on_device: bool | None = None
    """Whether a device computes the projector. None: if layers of the model are on one."""
    max_parts: Count = 32
    """Images and sounds in a prompt."""
    max_upload_bytes: Count = 2**25
    """Bytes of an image or a sound as it is given."""
    max_pixels: Count = 2**25
    """Pixels of an image."""
    max_seconds: Annotated[Finite, Field(gt=0)] = 600.0
    """Seconds of a sound."""
    max_open_bytes: Count = 2**30
    """Bytes of images, sounds and their rows that requests hold until they end."""
    max_kept_bytes: Annotated[int, Field(ge=0)] = 2**28
    """Bytes of rows that are kept for later requests."""

    def _misfits(self) -> Iterator[tuple[str, str]]:
        low, high = self.image_min_tokens, self.image_max_tokens
        if low is not None and high is not None and low > high:
            yield "image_min_tokens", f"at most image_max_tokens ({high})"


class DraftConfig(ModelConfig):
    """A second, smaller model of the same vocabulary, whose next tokens are drafts."""

    path: AnyPath
    """The model file, or hf:OWNER/REPO/FILE."""

    def _misfits(self) -> Iterator[tuple[str, str]]:
        if self.chat_template is not None:
            yield "chat_template", "None: a draft model has no chats of its own"


class SpeculationConfig(Frozen):
    """Drafts of outputs, which a step verifies: they change speed only (docs/speculation.md)."""

    mode: Literal["auto", "off", "lookup", "draft", "mtp"] = "auto"
    """
    The source of drafts: lookup takes what followed the same tokens earlier in a request or in others
    that share prefixes with it, and what a constraint lets follow; draft takes these and those of a
    draft model; mtp takes these and those of heads of the model itself, which predict several tokens
    (multi-token prediction). auto is lookup where kernels of ours compute each row as if it were alone, so drafts
    change no bit of an output, and off elsewhere. On CPUs with AMX a row also depends on whether a prompt is beside
    it, unless deterministic="fast". With a draft model it is draft if nothing is given.
    """
    draft: AnyPath | DraftConfig | None = None
    """The draft model: its file, or options of loading it. None: there is none."""

    @model_validator(mode="before")
    @classmethod
    def _use_draft(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("draft") is not None:
            return {"mode": "draft"} | values
        return values

    def _misfits(self) -> Iterator[tuple[str, str]]:
        if self.mode == "draft" and self.draft is None:
            yield "draft", "the file of one, if mode is 'draft'"
        if self.mode in ("auto", "lookup", "mtp") and self.draft is not None:
            yield "mode", "'draft', if draft is given; 'off' leaves it unused"

    @property
    def draft_model(self) -> DraftConfig | None:
        """The draft model with its options; None: there is none."""
        if self.mode != "draft" or self.draft is None:
            return None
        if isinstance(self.draft, DraftConfig):
            return self.draft
        return DraftConfig(path=self.draft)


class EngineConfig(Frozen):
    """Everything an engine is made from."""

    model: ModelConfig = ModelConfig()
    """Options of loading the model file."""
    context: ContextConfig = ContextConfig()
    """The memory and the graph."""
    scheduler: SchedulerConfig = SchedulerConfig()
    """Rules of the scheduler: the requests that run, and their share of a step."""
    cache: CacheConfig = CacheConfig()
    """The cache of earlier requests, and the requests that may use it."""
    embedding: EmbeddingConfig = EmbeddingConfig()
    """Limits of a step that makes vectors of texts."""
    log: LogConfig = LogConfig()
    """Logs of steps and requests."""
    media: MediaConfig = MediaConfig()
    """The projector for images and sounds, and how much of them prompts may have."""
    speculation: SpeculationConfig = SpeculationConfig()
    """Drafts of outputs, which a step verifies."""
    sampler_placement: Literal["auto", "backend", "host"] = "auto"
    """
    The place where tokens are chosen: backend is in the graph where that can be; auto is host,
    because that is faster wherever it was measured.
    """
    fit_ctx: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """
    Cells that n_ctx may shrink to where memory is short, before layers leave devices; 0 leaves
    all as it is.
    """
    fit_margin_bytes: Annotated[int, Field(ge=0, le=2**50)] | None = None
    """
    Bytes of each device that fit_ctx leaves free. None: 1 GiB, or a 16th of a device that is
    smaller than 16 GiB.
    """
    max_adapter_bytes: Annotated[int, Field(ge=0)] = 2**30
    """Bytes of the files of all adapters that are loaded; what nobody uses gives way."""
    max_restarts: Annotated[int, Field(ge=0, le=1000)] = 0
    """
    Failures of the engine in a minute after which its context is made anew and all requests go
    on; the next one ends it. 0: the first one does (docs/life.md).
    """
    warm_up: bool = False
    """
    Compute a micro-batch and a token of each slot before the engine is open, so the first
    request waits for nothing that a device does once.
    """
    deterministic: Literal[False, True, "fast"] = False
    """
    Outputs do not depend on other requests (docs/exactness.md). True costs speed, and gives the
    tokens of llama-server with most types of weights; fast gives tokens of its own, where kernels
    of ours multiply all weights, and leaves memory and flash attention as they are.
    """

    @property
    def projector_on_device(self) -> bool:
        """Whether a device computes the projector, if there is one."""
        on_device = self.media.on_device
        return self.model.n_gpu_layers != 0 if on_device is None else on_device

    def _misfits(self) -> Iterator[tuple[str, str]]:
        n_ctx, n_slots = self.context.n_ctx, self.scheduler.n_slots
        if n_ctx is not None and n_ctx < n_slots:
            allowed = f"at least n_slots ({n_slots}): it is the cells of all slots"
            yield "context.n_ctx", allowed
        if self.speculation.mode in ("lookup", "draft", "mtp"):
            if self.deterministic is True:
                yield (
                    "speculation.mode",
                    "off, if deterministic is True; fast allows it",
                )
            if self.sampler_placement == "backend":
                yield "speculation.mode", "off, if sampler_placement is backend"
        if self.deterministic == "fast":
            if not self.context.fast_kernels:
                yield "context.fast_kernels", "True, if deterministic is fast"
            if self.scheduler.context_full == "shift":
                yield "scheduler.context_full", "stop, if deterministic is fast"
        if self.deterministic is not True:
            return
        # No chunk of a prompt may be a single token, and no rest of one.
        if self.context.n_ubatch < max(MIN_CHUNK, n_slots):
            allowed = f"at least {MIN_CHUNK} and n_slots ({n_slots}), if deterministic"
            yield "context.n_ubatch", allowed
        for name in ("scheduler.token_budget", "context.n_outputs_max"):
            if (attrgetter(name)(self) or MIN_CHUNK) < MIN_CHUNK:
                yield name, f"at least {MIN_CHUNK}, if deterministic"

    @property
    def resolved_model(self) -> ModelConfig:
        """The model with what `deterministic` pins (docs/exactness.md), and with its heads."""
        pinned = {"use_extra_bufts": False} if self.deterministic is True else {}
        if self.speculation.mode == "mtp":
            pinned["load_mtp"] = True
        return self.model.model_copy(update=pinned)

    @property
    def resolved_context(self) -> ContextConfig:
        """The context with what `deterministic` pins (docs/exactness.md)."""
        pinned: dict[str, Any] = {}
        if self.deterministic:
            pinned = {"swa_full": True}
        if self.deterministic is True:
            pinned |= {"kv_unified": False, "flash_attn": "off"}
        return self.context.model_copy(update=pinned)
