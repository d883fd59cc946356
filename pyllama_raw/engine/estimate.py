"""Memory that an engine will take, reckoned before a weight is read."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pyllama_raw.engine.build import context_fields, layout_of
from pyllama_raw.engine.build_embedder import text_fields
from pyllama_raw.engine.capabilities import Capabilities, Operation, probe
from pyllama_raw.engine.model_info import Pooling
from pyllama_raw.engine.sources import checked_config
from pyllama_raw.native.memory_need import HOST, NO_WEIGHTS, Breakdown, breakdown_of
from pyllama_raw.native.model import Model
from pyllama_raw.native.projector import projector_bytes
from pyllama_raw.options.config import EngineConfig

TOKEN_TEXT_BYTES = 256  # of a vocabulary, as measured: texts, and maps to and from ids


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

    @property
    def total_bytes(self) -> int:
        """All of it."""
        parts = self.weights_bytes, self.kv_bytes, self.compute_bytes
        return sum(parts) + self.projector_bytes


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
        return sum(one.total_bytes for one in self.devices)


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
        wanted = config.resolved_model.loading
        self.model = Model.load(path, **(wanted | NO_WEIGHTS))
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
        if not self.generates:
            pooling = (self.capabilities.model.pooling or Pooling.NONE).value
            fields = text_fields(model, config)
            return breakdown_of(model, pooling=pooling, mapped=mapped, **fields)
        config = checked_config(self.capabilities.model, config)
        n_slots, wanted = config.scheduler.n_slots, config.resolved_context
        fields = context_fields(wanted, n_slots, model.n_ctx_train)
        n_seq_max = layout_of(model, config).n_seq_max
        return breakdown_of(model, n_seq_max=n_seq_max, mapped=mapped, **fields)

    def memory(self, config: EngineConfig) -> MemoryEstimate:
        """Memory of an engine of *config*."""
        found = self.context(config)
        found.weights[HOST] += self.model.n_vocab * TOKEN_TEXT_BYTES
        parts = found.weights, found.kv, found.compute, self._projector
        names = dict.fromkeys(name for part in parts for name in part)
        devices = (
            DeviceMemory(name, *(part.get(name, 0) for part in parts)) for name in names
        )
        return MemoryEstimate(tuple(devices), found.n_ctx)

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
