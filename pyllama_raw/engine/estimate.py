"""
What a model will need, found out before its weights are read.

`probe_model()` reads the header, `estimate()` has libllama reckon the memory of an engine, and
`fitted()` chooses a context that fits what is free. `kernels_used()` makes a context for a moment.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from logging import getLogger
from pathlib import Path
from typing import Self

from pyllama_raw.engine.draft_executor import N_BATCH, draft_fields, head_fields
from pyllama_raw.engine.info import Capabilities, ModelInfo, Operation, Pooling, probe
from pyllama_raw.engine.layout import (
    checked_config,
    context_fields,
    expected_kind,
    layout_of,
    speculation_of,
    text_fields,
)
from pyllama_raw.engine.shared_models import ModelUse
from pyllama_raw.errors import (
    ConfigError,
    ContextFailed,
    NativeError,
    ProjectorLoadFailed,
    Unsupported,
    shown,
)
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context
from pyllama_raw.native.gguf import read_header
from pyllama_raw.native.kernels import Watch
from pyllama_raw.native.libllama import Device, check_decode, devices, last_error
from pyllama_raw.native.memory import (
    HOST,
    NO_WEIGHTS,
    Breakdown,
    available_bytes,
    breakdown_of,
)
from pyllama_raw.native.model import Model
from pyllama_raw.native.projector import projector_bytes
from pyllama_raw.options.config import EngineConfig, ModelConfig
from pyllama_raw.options.models import resolve_model, with_projector

__all__ = ["Device", "ModelProbe", "devices", "probe_model"]
TOKEN_TEXT_BYTES = 256  # of a vocabulary, as measured: texts, and maps to and from ids
MARGIN_BYTES = 2**30  # of a device, or a 16th of a small one
CELLS = 256  # llama.cpp rounds n_ctx to these, of each slot if kv_unified is off
PLENTY_BYTES = 2**30  # beside weights, cells and rows
Room = dict[str, int]  # bytes by device
Fits = Callable[[EngineConfig], bool]
_log = getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelProbe:
    """A model, with the options of an engine."""

    capabilities: Capabilities
    """Its class, sizes and pooling, and what it can be used for."""
    n_params: int
    """Numbers that it has learnt."""
    weights_bytes: int
    """Bytes of all its tensors in the file."""
    n_swa: int
    """Tokens of a sliding window; 0: it has none."""
    is_recurrent: bool
    """Whether it keeps a state of its texts in place of cells."""
    is_hybrid: bool
    """Whether it keeps such a state beside cells."""
    can_cut: bool
    """Whether the end of a text can be cut off, and the rest be used again."""
    can_shift: bool
    """Whether the oldest tokens of a full slot can be shifted out."""
    images: bool
    """Whether its projector sees."""
    sounds: bool
    """Whether its projector hears."""


def probe_model(path: Path, config: EngineConfig) -> ModelProbe:
    """
    Facts of the model at *path*; no weight is read.

    Raises:
        ModelLoadFailed, ContextFailed, ProjectorLoadFailed: a file or an option is wrong.
        Unsupported: the model is of no use here.
    """
    images, sounds = _senses(config.media.mmproj)
    with Outline(path, config) as outline:
        model, generates = outline.model, outline.generates
        kind = expected_kind(model, config.resolved_context)
        is_whole = not (generates and kind.can_cut)
        return ModelProbe(
            capabilities=outline.capabilities,
            n_params=model.n_params,
            weights_bytes=model.size_bytes,
            n_swa=model.n_swa,
            is_recurrent=model.is_recurrent,
            is_hybrid=model.is_hybrid,
            can_cut=not is_whole,
            can_shift=not (is_whole or model.reads_sources)
            and outline.context(config).can_shift,
            images=images,
            sounds=sounds,
        )


def _senses(projector: str | Path | None) -> tuple[bool, bool]:
    """Whether the projector sees, and hears, by its header."""
    if projector is None:
        return False, False
    values = read_header(str(projector)).values
    if values.get("general.architecture") != "clip":
        raise ProjectorLoadFailed(str(projector), "this is no projector")
    vision, audio = (f"clip.has_{part}_encoder" for part in ("vision", "audio"))
    return values.get(vision) is True, values.get(audio) is True


@dataclass(frozen=True, slots=True)
class DeviceMemory:
    """Bytes that an engine takes of one device; of the host, named CPU, too."""

    device: str
    """Its name, as `info` lists it."""
    weights_bytes: int
    """Weights, once more where they are put into another order, and the vocabulary."""
    kv_bytes: int
    """Cells of all slots, when all are used, and recurrent states."""
    compute_bytes: int
    """What a step computes in, its graphs, and the rows that it gives out."""
    projector_bytes: int
    """Weights and buffers of the projector; an image beyond its usual size takes more."""
    draft_bytes: int = 0
    """All that the draft model takes: weights, cells and buffers."""

    @property
    def total_bytes(self) -> int:
        """All of it."""
        parts = self.weights_bytes, self.kv_bytes, self.compute_bytes
        return sum(parts) + self.projector_bytes + self.draft_bytes


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """
    Memory that an engine takes, without snapshots and Python, within a twentieth of it.

    Of a model that generates texts and embeds, the context that generates is in here.
    """

    devices: tuple[DeviceMemory, ...]
    """Each device that has a part of it."""
    n_ctx: int
    """Cells of all slots, as libllama rounds them."""

    @property
    def total_bytes(self) -> int:
        """Bytes of all devices."""
        return sum(device.total_bytes for device in self.devices)


class Outline:
    """
    A model without weights, on which contexts can be tried. Close it, or leave its block.

    Raises:
        ModelLoadFailed, ConfigError: as opening it would.
        Unsupported: the model is of no use here.
    """

    def __init__(self, path: Path, config: EngineConfig) -> None:
        self.capabilities: Capabilities = probe(path, config.model.kv_overrides)
        self.capabilities.check(*Operation)
        # libllama reads the header and lays out tensors, but no weight.
        loading = config.resolved_model.loading
        self.model = Model.load(path, **(loading | NO_WEIGHTS))
        try:
            self._projector = _projector(config)
        except BaseException:
            self.model.close()
            raise

    @property
    def generates(self) -> bool:
        """Whether it goes on with texts; others only make vectors."""
        return Operation.GENERATE in self.capabilities.operations

    def context(self, config: EngineConfig) -> Breakdown:
        """A context of *config*, whose model options are those of this one."""
        model = self.model
        mapped = config.model.load_mode in ("auto", "mmap", "mmap_mlock")
        # A model that only embeds has contexts of texts.
        if not self.generates:
            pooling = (self.capabilities.model.pooling or Pooling.NONE).value
            fields = text_fields(model, config)
            return breakdown_of(model, pooling=pooling, mapped=mapped, **fields)
        config = checked_config(self.capabilities.model, config)
        n_slots, options = config.scheduler.n_slots, config.resolved_context
        fields = context_fields(options, n_slots, model.n_ctx_train)
        n_seq_max = layout_of(model, config).n_seq_max
        return breakdown_of(model, n_seq_max=n_seq_max, mapped=mapped, **fields)

    def memory(self, config: EngineConfig) -> MemoryEstimate:
        """Memory of an engine of *config*."""
        breakdown = self.context(config)
        # libllama does not count the vocabulary.
        breakdown.weights[HOST] += self.model.n_vocab * TOKEN_TEXT_BYTES
        drafts = self._drafts(config, breakdown.n_ctx) if self.generates else {}
        parts = (
            breakdown.weights,
            breakdown.kv,
            breakdown.compute,
            self._projector,
            drafts,
        )
        names = dict.fromkeys(name for part in parts for name in part)
        devices = (
            DeviceMemory(name, *(part.get(name, 0) for part in parts)) for name in names
        )
        return MemoryEstimate(tuple(devices), breakdown.n_ctx)

    def _drafts(self, config: EngineConfig, n_ctx: int) -> dict[str, int]:
        """Bytes of the draft model by device, beside a context with *n_ctx* cells."""
        draft, layout = config.speculation.draft_model, layout_of(self.model, config)
        if config.speculation.mode == "mtp":
            return self._heads(config, n_ctx, layout.scratch)
        # Nor is it loaded beside a model that makes no use of it.
        if draft is None or speculation_of(self.model, config, layout.kind) != "draft":
            return {}
        n_seq_max = layout.scratch
        mapped = draft.load_mode in ("auto", "mmap", "mmap_mlock")
        path = resolve_model(draft.path)
        with Model.load(path, **(draft.loading | NO_WEIGHTS)) as model:
            fields = draft_fields(config, n_ctx, n_seq_max)
            parts = breakdown_of(model, n_seq_max=n_seq_max, mapped=mapped, **fields)
            parts.weights[HOST] += model.n_vocab * TOKEN_TEXT_BYTES
        # Two engines, or both models of one, share the weights of one file.
        is_same = (
            path == Path(self.model.path) and draft.loading == config.model.loading
        )
        weights = {} if is_same else parts.weights
        total = Counter[str]()
        for part in (weights, parts.kv, parts.compute):
            total.update(part)
        return total

    def _heads(
        self, config: EngineConfig, n_ctx: int, n_seq_max: int
    ) -> dict[str, int]:
        """Bytes of the context of heads, whose weights are among those of the model."""
        fields = head_fields(config, n_ctx, n_seq_max)
        parts = breakdown_of(self.model, n_seq_max=n_seq_max, **fields)
        total = Counter(parts.kv)
        total.update(parts.compute)
        # Hidden states of a step, and of what heads have not read: libllama's, and ours.
        n_states = min(config.context.n_batch, n_ctx) + N_BATCH + 2 * n_seq_max
        total[HOST] += 2 * n_states * 4 * self.model.n_embd_out
        return total

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.model.close()


def _projector(config: EngineConfig) -> dict[str, int]:
    media = config.media
    if media.mmproj is None:
        return {}
    return projector_bytes(
        media.mmproj,
        use_gpu=config.projector_on_device,
        min_tokens=media.image_min_tokens,
        max_tokens=media.image_max_tokens,
    )


def estimate(path: Path, config: EngineConfig) -> MemoryEstimate:
    """Memory of an engine on the file at *path*. Raises as Outline does."""
    with Outline(path, config) as outline:
        return outline.memory(config)


def checked_and_fitted(
    path: Path, model: ModelInfo, config: EngineConfig
) -> EngineConfig:
    """Return *config* as fitted(). Raises ConfigError if it is of no use for *model*."""
    checked_config(model, config)
    return fitted(path, config)


def on_loaded(
    use: ModelUse, loaded: ModelConfig, config: EngineConfig | None
) -> EngineConfig:
    """
    The *config* of an engine on a model that was loaded with the options *loaded*.

    Raises:
        ConfigError: it wants the model loaded in another way.
    """
    path = Path(use.model.path)
    config = with_projector(config, None, path)
    if config is not None and "model" in config.model_fields_set:
        _check_equal(loaded, config.model)
    config = (config or EngineConfig()).model_copy(update={"model": loaded})
    if config.speculation.mode == "mtp" and not loaded.load_mtp:
        raise ConfigError(
            "speculation.mode='mtp' needs the heads of the model: open the Model with "
            "load_mtp=True"
        )
    if config.resolved_model != loaded:
        raise ConfigError(
            "deterministic=True needs weights in the order of the file: open the Model "
            "with use_extra_bufts=False"
        )
    # The weights are there, so only cells can be fewer where memory is short.
    return fitted(path, config, has_weights=True)


def _check_equal(has: ModelConfig, wants: ModelConfig) -> None:
    differing = [
        f"{name}={shown(getattr(wants, name))}, not {shown(getattr(has, name))}"
        for name in type(has).model_fields
        if getattr(has, name) != getattr(wants, name)
    ]
    if differing:
        raise ConfigError(
            f"EngineConfig.model wants {', '.join(differing)} as the model was loaded: "
            "leave `model` out, or open another Model with these options"
        )


def resolved(
    model: str | Path | None, config: EngineConfig | None
) -> tuple[Path, EngineConfig]:
    """The file that *model* means, and *config* with the projector that belongs to it."""
    path = resolve_model(model)
    return path, with_projector(config, model, path) or EngineConfig()


def fitted(
    path: Path,
    config: EngineConfig,
    *,
    has_weights: bool = False,
    room: Room | None = None,
) -> EngineConfig:
    """
    Return *config*, with fewer cells and layers where memory asks for that.

    Args:
        has_weights: the model is loaded already, so its layers stay where they are.
        room: bytes of each device that may be used. None: what is free now.
    """
    if not config.fit_ctx:
        return config
    try:
        # Most machines have plenty, and then no context is tried.
        room = _free(config.fit_margin_bytes) if room is None else room
        if _is_plenty(path, config, room):
            return config
        fitting = _fitted(path, config, room, has_weights)
    # Whatever is wrong, opening the model says it better.
    except (NativeError, Unsupported):
        return config
    changes = []
    if fitting.context != config.context:
        changes.append(f"n_ctx={fitting.context.n_ctx}")
    if fitting.model != config.model:
        changes.append(f"n_gpu_layers={fitting.model.n_gpu_layers}")
    if changes:
        _log.warning("memory is short: %s", ", ".join(changes))
    return fitting


def _fitted(
    path: Path, config: EngineConfig, room: Room, has_weights: bool
) -> EngineConfig:
    with Outline(path, config) as outline:

        def fits(tried: EngineConfig) -> bool:
            with suppress(ContextFailed):  # not even the list of cells fits
                return _fits(outline.memory(tried), room, has_weights=has_weights)
            return False

        if fits(config):
            return config
        # First fewer cells, because layers on a device are worth more.
        if outline.generates:
            config = _fewer_cells(config, outline.model.n_ctx_train, fits)
        if has_weights or fits(config):
            return config
        # Then fewer layers, each tried on another outline.
        n_layer = outline.model.n_layer
    return _fewer_layers(path, config, n_layer, room)


def _fewer_cells(config: EngineConfig, n_ctx_train: int, fits: Fits) -> EngineConfig:
    n_slots, options = config.scheduler.n_slots, config.resolved_context
    n_ctx = context_fields(options, n_slots, n_ctx_train)["n_ctx"]
    # Cells come in units, as libllama rounds them.
    unit = CELLS if options.kv_unified else CELLS * n_slots
    all_units = -(-n_ctx // unit)
    least = min(-(-config.fit_ctx // unit), all_units)

    def with_units(n: int) -> EngineConfig:
        if n == all_units:
            return config
        context = config.context.model_copy(update={"n_ctx": n * unit})
        return config.model_copy(update={"context": context})

    return with_units(_most(least, all_units, lambda n: fits(with_units(n))))


def _fewer_layers(
    path: Path, config: EngineConfig, n_layer: int, room: Room
) -> EngineConfig:
    # Layers that leave a device go to the host, whose room is not asked for.
    places = {name: n_bytes for name, n_bytes in room.items() if name != HOST}
    requested, all_layers = config.model.n_gpu_layers, n_layer + 1  # and the output
    n_max = min(requested, all_layers) if requested >= 0 else all_layers
    if not places:
        return config

    def with_layers(n: int) -> EngineConfig:
        if n == n_max:
            return config
        model = config.model.model_copy(update={"n_gpu_layers": n})
        return config.model_copy(update={"model": model})

    def fits(n: int) -> bool:
        with suppress(ContextFailed):
            return _fits(estimate(path, with_layers(n)), places)
        return False

    return with_layers(_most(0, n_max, fits))


def _most(lowest: int, highest: int, fits: Callable[[int], bool]) -> int:
    """
    The largest number up to *highest* that fits; *lowest* where none above it does.

    From below, because each try of many cells costs the memory of their list.
    """
    low, high = lowest, min(max(2 * lowest, 1), highest)
    while low < high and fits(high):
        low, high = high, min(2 * high, highest)
    between = range(low + 1, high)
    return low + bisect_right(between, False, key=lambda n: not fits(n))


def _is_plenty(path: Path, config: EngineConfig, room: Room) -> bool:
    """
    Whether half of the host's memory is more than an engine can take, if it has no device.

    That is each weight twice, since some are put in another order, cells of 32 bits as wide as
    the model, two rows of the vocabulary for each token of a step, and what is left besides.
    """
    model = probe(path, config.model.kv_overrides).model
    # What cannot be said from the header needs a real estimate.
    extras = config.media.mmproj, config.speculation.draft_model
    if set(room) != {HOST} or model.n_files > 1 or extras != (None, None):
        return False
    n_slots, options = config.scheduler.n_slots, config.resolved_context
    n_ctx: int = context_fields(options, n_slots, model.n_ctx_train)["n_ctx"]
    cells = 2 * 4 * n_ctx * model.n_layer * model.n_embd
    rows = 2 * 4 * max(options.n_ubatch, options.n_outputs_max or 0) * model.n_vocab
    needed = 2 * path.stat().st_size + cells + rows + PLENTY_BYTES
    return needed < room[HOST] // 2


def _fits(memory: MemoryEstimate, room: Room, *, has_weights: bool = False) -> bool:
    return all(
        device.total_bytes - has_weights * device.weights_bytes <= room[device.device]
        for device in memory.devices
        if device.device in room
    )


def _free(margin_bytes: int | None) -> Room:
    """Free bytes by device, without the margin; None is the usual one."""
    room = {}
    for device in devices():
        if device.kind in ("cpu", "gpu", "igpu"):
            free, total = device.memory_free_bytes, device.memory_total_bytes
            # The system gives a process less than what is free, in a container.
            usable = available_bytes() if device.name == HOST else None
            free = free if usable is None else min(free, usable)
            usual = min(MARGIN_BYTES, total // 16)
            room[device.name] = free - (usual if margin_bytes is None else margin_bytes)
    return room


def kernels_used(model: Model, config: EngineConfig) -> str:
    """
    Name them for attention and for each type of weights: "attention ours; q4_1 AMX 97.0%".

    Numbers are shares of all multiply-adds with weights. Two tokens are decoded, because some
    kernels of ours leave products with a single one to libllama.
    """
    options = config.resolved_context
    fields = context_fields(options, 1, model.n_ctx_train)
    fields |= {"n_outputs_max": 2, "deterministic": config.deterministic}
    watch = Watch()
    with Context(model, n_seq_max=1, watch=watch, **fields) as context:
        batch = Batch(context.max_tokens)
        if model.reads_sources:  # decodes need one
            batch.add_scored([0], 0, 0)
            check_decode(context.read_sources(batch).code, last_error())
            batch.clear()
        # Two rows: some kernels of ours leave a single one to libllama.
        tokens = range(min(2, context.max_tokens))
        batch.add_rows([0 for _ in tokens], list(tokens), [0 for _ in tokens])
        context.decode(batch)
        products, attentions = watch.products, ", ".join(watch.attentions)
    n_all = sum(n for counts in products.values() for n in counts.values())
    parts = [f"attention {attentions}"] if attentions else []
    for name, counts in products.items():
        shares = (f"{whose} {n / n_all:.1%}" for whose, n in counts.items())
        parts.append(f"{name} {', '.join(shares)}")
    return "; ".join(parts)
