"""
Facts of a model and of an engine: what its file says, what can be done with it, what options came
to, and which state an engine is in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from pyllama_raw.errors import ModelLoadFailed, Unsupported
from pyllama_raw.native.gguf import NO_OVERRIDES, Header, Scalar, read_header

if TYPE_CHECKING:
    from pyllama_raw.options.config import EngineConfig


class EngineState(StrEnum):
    """What an engine does, and whether it takes requests."""

    IDLE = "idle"
    """It is not opened: the value of `AsyncEngine.open()` before anybody awaits it."""
    LOADING = "loading"
    """
    It is being opened, makes its context anew after a failure, or loads its weights after a
    sleep; requests wait.
    """
    READY = "ready"
    """It takes requests, and has none."""
    RUNNING = "running"
    """It has requests, and takes more."""
    SLEEPING = "sleeping"
    """Its memory is free for others; requests wait until `wake()`."""
    CLOSING = "closing"
    """It refuses new requests; those that run may go on."""
    CLOSED = "closed"
    """It was closed."""
    ERROR = "error"
    """It has ended by itself; `AsyncEngine.error` says why."""

    @property
    def has_ended(self) -> bool:
        """Whether no other state follows."""
        return self in (EngineState.CLOSED, EngineState.ERROR)


class ModelClass(StrEnum):
    """Way in which a model computes, which decides what it can be used for."""

    DECODER_ONLY = "decoder_only"
    """It goes on with a text, token by token."""
    ENCODER_ONLY = "encoder_only"
    """It makes vectors of texts."""
    ENCODER_DECODER = "encoder_decoder"
    """It reads one text and writes another."""
    DIFFUSION = "diffusion"
    """It writes all tokens at once, and mends them."""


class Pooling(StrEnum):
    """Way in which the vectors of the tokens of a text become one."""

    NONE = "none"
    """They do not: each token keeps its own."""
    MEAN = "mean"
    """Their mean."""
    CLS = "cls"
    """Vector of the first token."""
    LAST = "last"
    """Vector of the last token."""
    RANK = "rank"
    """A head makes scores of one."""


POOLINGS: Final = tuple(Pooling)  # llama.h: enum llama_pooling_type, from 0 on

# As libllama has them: those that keep no memory of their sequences, or have an encoder.
_CLASSES: Final = {
    ModelClass.ENCODER_ONLY: (
        "bert",
        "eurobert",
        "gemma-embedding",
        "jina-bert-v2",
        "jina-bert-v3",
        "modern-bert",
        "neo-bert",
        "nomic-bert",
        "nomic-bert-moe",
        "t5encoder",
        "wavtokenizer-dec",
    ),
    ModelClass.ENCODER_DECODER: ("bart", "dflash", "eagle3", "t5"),
    ModelClass.DIFFUSION: ("dream", "llada", "llada-moe", "rnd1"),
}

_CLASS_OF: Final = {name: kind for kind, names in _CLASSES.items() for name in names}

_NON_CAUSAL: Final = (ModelClass.ENCODER_ONLY, ModelClass.DIFFUSION)

# A head gives scores of options, whose places in the text no function of libllama's interface
# takes. What it gives without them is no vector, and has another width than the file states.
_DECIDING: Final = ("clef",)

# Their attention reads no memory, so a text is computed at once, whatever the file states.
_AT_ONCE: Final = (*_CLASSES[ModelClass.ENCODER_ONLY], "llama-embed")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """A model file; numbers that it does not state are 0."""

    architecture: str
    """As the file names it."""
    model_class: ModelClass
    """Way in which it computes."""
    pooling: Pooling | None
    """Way in which it makes vectors of texts; None: it states none."""
    is_causal: bool
    """Whether a token sees only those before it."""
    n_ctx_train: int
    """Most tokens of a text that it was trained for."""
    n_vocab: int
    """Tokens that it knows."""
    n_embd: int
    """Width of its layers, and numbers of a vector of a token."""
    embedding_dimensions: int
    """Numbers that it makes of a text: of a vector, or the scores of a model that ranks."""
    labels: tuple[str, ...]
    """Names of these scores, as far as the file has them."""
    n_layer: int
    """Its layers."""
    n_expert: int
    """Experts of a layer; 0: it has no mixture of experts."""
    n_files: int
    """Files that it is divided into."""
    has_rank_head: bool
    """Whether it can give scores to pairs of texts."""
    has_chat_template: bool
    """Whether the file has one."""
    decoder_start_token_id: int | None = None
    """The token that begins what it writes; None: it goes on with the prompt, or names none."""
    n_layer_nextn: int = 0
    """Layers of these that are heads: they predict further tokens (multi-token prediction)."""


def model_info(path: str, header: Header) -> ModelInfo:
    """The model of *header*. Raises ModelLoadFailed if it states a pooling that is none."""
    values = header.values
    arch = str(values.get("general.architecture", ""))
    kind = _CLASS_OF.get(arch, ModelClass.DECODER_ONLY)

    def number(key: str, default: int = 0) -> int:
        value = values.get(key, default)
        return value if isinstance(value, int) else default

    is_pair = kind is ModelClass.ENCODER_DECODER
    start = number(f"{arch}.decoder_start_token_id", -1)
    pooling = _pooling(path, arch, number(f"{arch}.pooling_type", -1))
    # Some models project their vectors to another width.
    n_embd = number(f"{arch}.embedding_length_out") or number(
        f"{arch}.embedding_length"
    )
    # A reranker gives scores in place of a vector.
    ranks = pooling is Pooling.RANK  # libllama: as many scores as labels, or one
    n_vocab = header.lengths.get("tokenizer.ggml.tokens", 0)
    return ModelInfo(
        architecture=arch,
        model_class=kind,
        pooling=pooling,
        is_causal=arch not in _AT_ONCE
        and values.get(f"{arch}.attention.causal", kind not in _NON_CAUSAL) is True,
        n_ctx_train=number(f"{arch}.context_length"),
        n_vocab=n_vocab or number(f"{arch}.vocab_size"),
        n_embd=n_embd,
        embedding_dimensions=(len(header.labels) or 1) if ranks else n_embd,
        labels=header.labels if ranks else (),
        n_layer=number(f"{arch}.block_count"),
        n_expert=number(f"{arch}.expert_count"),
        n_files=number("split.count", 1) or 1,
        has_rank_head=any(
            tensor.name == "cls.output.weight" for tensor in header.tensors
        ),
        has_chat_template="tokenizer.chat_template" in values,
        decoder_start_token_id=start if start >= 0 and is_pair else None,
        n_layer_nextn=number(f"{arch}.nextn_predict_layers"),
    )


def _pooling(path: str, arch: str, number: int) -> Pooling | None:
    """-1 is what libllama writes where a model states none; numbers are unsigned."""
    if number in (-1, 2**32 - 1):
        return None
    if not 0 <= number < len(POOLINGS):
        choices = ", ".join(f"{i} ({name})" for i, name in enumerate(POOLINGS))
        raise ModelLoadFailed(
            path,
            f"{arch}.pooling_type={number} is not allowed: "
            f"the file, or kv_overrides, must give one of {choices}",
        )
    return POOLINGS[number]


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
        return tuple(
            operation for operation in Operation if operation not in self.refusals
        )

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
    # Neither goes on with a text token by token.
    if kind is ModelClass.DIFFUSION or (is_pair and info.architecture != "t5"):
        is_what = (
            "has an encoder beside its decoder" if is_pair else "is a diffusion model"
        )
        reason = f"{name} {is_what}: give a decoder-only or encoder model"
        return dict.fromkeys(Operation, reason)
    if info.architecture in _DECIDING:
        reason = (
            f"{name} scores options of questions, which no function of libllama takes"
        )
        return dict.fromkeys(Operation, f"{reason}: give another model")
    refused = {}
    # Encoders write nothing.
    if kind is ModelClass.ENCODER_ONLY:
        refused[Operation.GENERATE] = f"{name} is an encoder: give a decoder-only model"
    # Neither can a model whose tokens see those after them.
    elif not info.is_causal:
        reason = "its tokens see those after them: give a model with causal attention"
        refused[Operation.GENERATE] = reason
    # Its encoder's vectors are for its decoder.
    if is_pair:
        reason = f"{name} has an encoder beside its decoder, and makes no vectors"
        refused[Operation.EMBED] = f"{reason}: give an encoder model"
        refused[Operation.RANK] = refused[Operation.EMBED]
    # Scores need a pooling that states them, and a head that makes them.
    elif info.pooling is not Pooling.RANK:
        reason = "the model is no reranker: its file states no pooling 'rank'"
        refused[Operation.RANK] = reason
    elif not info.has_rank_head:
        reason = "the file lacks the tensor 'cls.output.weight', which makes scores"
        refused[Operation.RANK] = reason
    return refused


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A token with a task of its own."""

    token_id: int
    """The token."""
    text: str
    """Its name, as chat templates write it."""


@dataclass(frozen=True, slots=True)
class VocabInfo:
    """The vocabulary of a model; None stands for a token that it does not have."""

    n_tokens: int
    """Token ids are below this."""
    bos: SpecialToken | None
    """The token that begins a text."""
    eos: SpecialToken | None
    """The token that ends a text."""
    adds_bos: bool
    """Whether a prompt that is a text gets bos in front."""
    adds_eos: bool
    """Whether a prompt that is a text gets eos behind."""
    fill: Mapping[str, SpecialToken]
    """
    Tokens for a gap in a text: of "prefix", "suffix", "middle", "pad", "repo" and
    "separator" those that the model has; it can fill a gap if it has the first three.
    """
    decoder_start: SpecialToken | None = None
    """The token that begins an output, if the model reads the prompt with an encoder."""


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """One open engine; none of it changes."""

    model_path: str
    description: str  # of the model: architecture, size class and file type in words
    n_params: int  # of the model
    model_bytes: int  # of its tensors
    vocab: VocabInfo
    metadata: Mapping[str, str]  # of the model file
    n_slots: int
    n_ctx: int  # KV cells of all slots
    n_ctx_slot: int  # tokens of one request, prompt and output
    n_batch: int  # most tokens of a step
    n_ubatch: int  # most tokens of a graph
    n_threads: int
    n_threads_batch: int
    type_k: str
    type_v: str
    flash_attn: str  # as asked for: libllama decides by itself what "auto" is
    kv_unified: bool
    can_cut: bool  # the memory of a prefix can be cut anywhere; else snapshots are kept
    # Those of ours: the attention or weights, the CPU they are for.
    kernels: Mapping[str, str]
    devices: tuple[str, ...]  # that the model may use
    versions: Mapping[str, str]  # of pyllama_raw and llama_cpp
    config: EngineConfig
    # Where chats have their template from: "model", a name, a path or "text"; None: none.
    chat_template: str | None = None
    # The source of drafts, or "off", perhaps with the reason behind a colon.
    speculation: str = "off"


def operations(needs: str | None) -> Iterable[Operation]:
    """The operation that *needs* names; None: all, of which a model has to do any."""
    return Operation if needs is None else (Operation(needs),)
