"""
What a tiny model is: the sizes of an architecture, and what libllama must report of it.

Only sizes are stated; libllama says which tensors follow from them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from scripts.tiny_models import vocab

Memory = Literal["attention", "swa", "recurrent", "hybrid", "none"]
Output = Literal["printable", "bytes", "ends"]

N_CTX_TRAIN = 2048
N_EMBD = 64


@dataclass(frozen=True, slots=True)
class Recipe:
    """One tiny model."""

    name: str
    arch: str
    fields: Mapping[str, object]  # metadata of the architecture, without its prefix
    memory: Memory = "attention"
    n_swa: int = 0
    mrope: bool = False
    encoder: bool = False  # has one beside the decoder
    diffusion: bool = False
    has_vocab: bool = True
    miscomputed: bool = False  # libllama answers wrongly: an engine must refuse it
    embedding_scale: float = 1.0  # what libllama multiplies embeddings by
    deviation: float | None = None  # of all weights alike; None: by rules
    without: tuple[str, ...] = ()  # patterns of optional tensors that its file lacks
    output: Output = "printable"  # which tokens it says; "ends": often stops by itself
    more: Mapping[str, object] = field(default_factory=dict)  # metadata, by whole keys

    @property
    def generates(self) -> bool:
        """True for a plain left-to-right language model that is made for texts."""
        misfit = self.encoder or self.miscomputed or "pooling_type" in self.fields
        return self.memory != "none" and not misfit

    @property
    def ranks(self) -> bool:
        """Whether it has a head that gives scores."""
        return self.fields.get("pooling_type") == 4  # LLAMA_POOLING_TYPE_RANK

    @property
    def metadata(self) -> dict[str, object]:
        """Every key of the GGUF file and its value."""
        own = {f"{self.arch}.{key}": value for key, value in self.fields.items()}
        if self.has_vocab:
            tokens = vocab.metadata()
        else:
            tokens = {"tokenizer.ggml.model": "none"}
        return {
            "general.architecture": self.arch,
            "general.name": f"tiny {self.name}",
            f"{self.arch}.vocab_size": vocab.N_VOCAB,
            **own,
            **tokens,
            **self.more,
        }


def sizes(
    n_head: int | list[int],
    n_head_kv: int | list[int],
    *,
    n_embd: int = N_EMBD,
    n_layer: int = 2,
    n_ff: int | list[int] = 2 * N_EMBD,
    **more: object,
) -> dict[str, object]:
    """What every architecture states; in *more* a double underscore means a dot."""
    return {
        "context_length": N_CTX_TRAIN,
        "embedding_length": n_embd,
        "feed_forward_length": n_ff,
        "block_count": n_layer,
        "attention.head_count": n_head,
        "attention.head_count_kv": n_head_kv,
        "attention.layer_norm_rms_epsilon": 1e-5,
    } | {key.replace("__", "."): value for key, value in more.items()}


def state_space(**more: int) -> dict[str, int]:
    """What an architecture with a recurrent mixer adds."""
    fields = {
        "conv_kernel": 4,
        "inner_size": 2 * N_EMBD,
        "state_size": 16,
        "time_step_rank": 4,
    }
    return {f"ssm.{key}": value for key, value in (fields | more).items()}


def experts(n_expert: int = 4, n_used: int = 2) -> dict[str, int]:
    """What a mixture of experts adds."""
    return {
        "expert_count": n_expert,
        "expert_used_count": n_used,
        "expert_feed_forward_length": N_EMBD,
    }
