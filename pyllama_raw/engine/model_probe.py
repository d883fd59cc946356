"""Facts of a model that is not loaded: those of its header, and what libllama says of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pyllama_raw.engine.capabilities import Capabilities
from pyllama_raw.engine.estimate import Outline
from pyllama_raw.engine.probe import expected_kind
from pyllama_raw.errors import ProjectorLoadFailed
from pyllama_raw.native.gguf_header import read_header
from pyllama_raw.native.libllama import Device, devices
from pyllama_raw.options.config import EngineConfig

__all__ = ["Device", "ModelProbe", "devices", "probe_model"]


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
