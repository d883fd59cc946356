"""Operations that a model can be used for; for the rest, why not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType

from pyllama_raw.engine.model_info import ModelClass, ModelInfo, Pooling, model_info
from pyllama_raw.errors import Unsupported
from pyllama_raw.native.gguf_header import NO_OVERRIDES, Scalar, read_header


class Operation(StrEnum):
    """A kind of work that an engine can be asked for."""

    GENERATE = "generate"
    """Go on with texts."""
    EMBED = "embed"
    """Make vectors of texts."""
    RANK = "rank"
    """Say how well documents answer a query."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """The abilities of a model."""

    model: ModelInfo
    """The model."""
    refusals: Mapping[Operation, str]
    """Why it cannot do the operations that are in here."""
    prints_tools: Callable[[], bool] = field(
        default=lambda: False, repr=False, compare=False
    )
    """Tries the chat template; of an engine only."""
    images: bool = False
    """Whether the projector of the engine sees."""
    sounds: bool = False
    """Whether it hears."""

    @property
    def operations(self) -> tuple[Operation, ...]:
        """Operations that it can do."""
        return tuple(one for one in Operation if one not in self.refusals)

    @property
    def tools(self) -> bool:
        """Whether chats of the engine may have tools; the first answer takes a moment."""
        return self.prints_tools()

    def without(self, why: str, *operations: Operation) -> Capabilities:
        """The same, but for *operations*, which the model cannot do."""
        refusals = dict.fromkeys(operations, why) | dict(self.refusals)
        return replace(self, refusals=MappingProxyType(refusals))

    def check(self, *operations: Operation) -> None:
        """Raise Unsupported if the model can do none of *operations*."""
        for operation in operations:
            if operation not in self.refusals:
                return
        raise Unsupported(operations[0].value, self.refusals[operations[0]])


def capabilities_of(info: ModelInfo) -> Capabilities:
    """Capabilities of the model of *info*."""
    return Capabilities(info, MappingProxyType(_refusals(info)))


def probe(
    path: str | Path, overrides: Mapping[str, Scalar] = NO_OVERRIDES
) -> Capabilities:
    """Capabilities of the model at *path*, by its header. Raises ModelLoadFailed."""
    header = read_header(str(path)).overridden(overrides)
    return capabilities_of(model_info(str(path), header))


def _refusals(info: ModelInfo) -> dict[Operation, str]:
    kind, name = info.model_class, repr(info.architecture)
    is_pair = kind is ModelClass.ENCODER_DECODER
    if kind is ModelClass.DIFFUSION or (is_pair and info.architecture != "t5"):
        is_what = (
            "has an encoder beside its decoder" if is_pair else "is a diffusion model"
        )
        reason = f"{name} {is_what}: give a decoder-only or encoder model"
        return dict.fromkeys(Operation, reason)
    refused = {}
    if kind is ModelClass.ENCODER_ONLY:
        refused[Operation.GENERATE] = f"{name} is an encoder: give a decoder-only model"
    elif not info.is_causal:
        reason = "its tokens see those after them: give a model with causal attention"
        refused[Operation.GENERATE] = reason
    if is_pair:
        reason = f"{name} has an encoder beside its decoder, and makes no vectors"
        refused[Operation.EMBED] = f"{reason}: give an encoder model"
        refused[Operation.RANK] = refused[Operation.EMBED]
    elif info.pooling is not Pooling.RANK:
        reason = "the model is no reranker: its file states no pooling 'rank'"
        refused[Operation.RANK] = reason
    elif not info.has_rank_head:
        reason = "the file lacks the tensor 'cls.output.weight', which makes scores"
        refused[Operation.RANK] = reason
    return refused
