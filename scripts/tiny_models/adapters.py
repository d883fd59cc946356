"""
The tiny adapters there are: what changes a tiny model, or another one, a little.

The shapes of an adapter are those of the products it changes, so they are read from the file
of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

import numpy as np

from scripts.mutations import gguf_file
from scripts.tiny_models import vocab, weights
from scripts.tiny_models.gguf_values import encode

F32 = 0  # ggml.h: enum ggml_type
QUERIES = ("*attn_q.weight", "*attn_v.weight")
INVOCATION = (
    vocab.IM_START,
    ord("a"),
)  # rare, and in the vocabulary of every tiny model

Named = tuple[str, tuple[int, ...]]  # a tensor and its shape


@dataclass(frozen=True, slots=True)
class Lora:
    """Products of two thin matrices, added to the products of the model."""

    name: str
    model: str  # whose shapes it has
    products: tuple[str, ...] = (*QUERIES, "*ffn_down*.weight")  # patterns of names
    rank: int = 4
    gain: float = 0.5  # of what is added, to what the product gives
    invocation: tuple[int, ...] = ()  # of an aLoRA: it is at work from these tokens on


@dataclass(frozen=True, slots=True)
class Control:
    """Vectors that are added to what the layers give."""

    name: str
    model: str
    gain: float = 1.0


Adapter = Lora | Control
ADAPTERS: dict[str, Adapter] = {
    adapter.name: adapter
    for adapter in (
        Lora("lora-a", "llama"),
        Lora("lora-b", "llama", QUERIES, rank=2),
        Lora("alora", "llama", invocation=INVOCATION),
        Lora("lora-moe", "llama-moe", ("*ffn_down_exps.weight",)),
        Lora("lora-words", "llama", ("token_embd.weight", "output.weight")),
        Lora("lora-qwen2", "qwen2"),
        Control("control", "llama"),
    )
}


def write(adapter: Adapter, model: Path, path: Path) -> None:
    """Write *adapter* for the file *model* to *path*."""
    base = gguf_file.read(model)
    file = gguf_file.File()
    for key, value in metadata(adapter, base).items():
        file.values[key.encode()] = encode(value)
    for name, shape in tensors(adapter, base):
        data = np.ascontiguousarray(draw(adapter, name, shape), np.float32)
        dims = list(reversed(shape))
        file.tensors.append(gguf_file.Tensor(name.encode(), dims, F32, data.tobytes()))
    path.write_bytes(file.encode())


def metadata(adapter: Adapter, base: gguf_file.File) -> dict[str, object]:
    """Every key of the file and its value."""
    arch = text(base, "general.architecture")
    if isinstance(adapter, Control):
        return {
            "general.architecture": "controlvector",
            "controlvector.model_hint": arch,
            "controlvector.layer_count": n_layer(base) - 1,
        }
    keys = {
        "general.type": "adapter",
        "general.architecture": arch,
        "general.name": f"tiny {adapter.name}",
        "adapter.type": "lora",
        "adapter.lora.alpha": float(2 * adapter.rank),
    }
    if adapter.invocation:
        keys |= {"adapter.alora.invocation_tokens": list(adapter.invocation)}
    return keys


def tensors(adapter: Adapter, base: gguf_file.File) -> Iterator[Named]:
    """Names and shapes; the last axis is the one a product sums over."""
    if isinstance(adapter, Control):
        n_embd = base.values[
            f"{text(base, 'general.architecture')}.embedding_length".encode()
        ]
        assert isinstance(n_embd.data, int)
        for layer in range(1, n_layer(base)):
            yield f"direction.{layer}", (n_embd.data,)
        return
    for tensor in base.tensors:
        name = tensor.name.decode()
        if any(fnmatch(name, pattern) for pattern in adapter.products):
            n_in, n_out, *further = tensor.dims
            if (
                name == "token_embd.weight"
            ):  # rows are looked up in it: it lies the other way
                n_in, n_out = n_out, n_in
                yield f"{name}.lora_a", (n_in, adapter.rank)
            else:
                yield f"{name}.lora_a", (*further, adapter.rank, n_in)
            yield f"{name}.lora_b", (*further, n_out, adapter.rank)


def draw(adapter: Adapter, name: str, shape: tuple[int, ...]) -> weights.Array:
    """Random numbers; those of two tensors make a product of the variance gain squared."""
    if isinstance(adapter, Control):
        return weights.draw(adapter.name, name, shape) * adapter.gain
    rng = weights.rng_of(adapter.name, name)
    if name.endswith("lora_b"):
        return weights.normal(0, adapter.gain / 2 * shape[-1] ** -0.5)(rng, shape)
    is_table = name == "token_embd.weight.lora_a"
    return weights.normal(0, 1.0 if is_table else shape[-1] ** -0.5)(rng, shape)


def text(base: gguf_file.File, key: str) -> str:
    value = base.values[key.encode()].data
    assert isinstance(value, bytes)
    return value.decode()


def n_layer(base: gguf_file.File) -> int:
    arch = text(base, "general.architecture")
    value = base.values[f"{arch}.block_count".encode()].data
    assert isinstance(value, int)
    return value
