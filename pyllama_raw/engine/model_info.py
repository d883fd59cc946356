"""Facts of a model, as the header of its file says: no weight is read for them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from pyllama_raw.errors import ModelLoadFailed
from pyllama_raw.native.gguf_header import Header


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
    n_embd = number(f"{arch}.embedding_length_out") or number(
        f"{arch}.embedding_length"
    )
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
    )


def _pooling(path: str, arch: str, number: int) -> Pooling | None:
    """-1 is what libllama writes where a model states none; numbers are unsigned."""
    if number in (-1, 2**32 - 1):
        return None
    if not 0 <= number < len(POOLINGS):
        known = ", ".join(f"{i} ({name})" for i, name in enumerate(POOLINGS))
        raise ModelLoadFailed(
            path,
            f"{arch}.pooling_type={number} is not allowed: "
            f"the file, or kv_overrides, must give one of {known}",
        )
    return POOLINGS[number]
