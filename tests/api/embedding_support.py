"""Texts, and engines that make vectors of them."""

from pathlib import Path
from typing import Any

import numpy as np

from pyllama_raw import (
    AsyncEngine,
    ContextConfig,
    EngineConfig,
)
from scripts.mutations.gguf_file import read
from tests.support.tiny import tiny_model

TEXTS = [
    "hello world",
    "a",
    "the quick brown fox jumps over the lazy dog, twice: " * 2,
    "to be or not to be",
    *(f"text number {i} of many " + "and so on " * (i % 7) for i in range(60)),
]
POOLED = ["bert", "bert-cls", "nomic-bert-moe", "qwen3-embedding"]

OTHER_ENCODERS = [
    "jina-bert-v3",
    "llama-embed",
    "nomic-bert",
    "jina-bert-v2",
    "modern-bert",
    "neo-bert",
    "eurobert",
    "gemma-embedding",
    "t5encoder",
]


def config(**fields: Any) -> EngineConfig:
    return EngineConfig(context=ContextConfig(n_threads=1), **fields)


def open_engine(name: str, **fields: Any):
    return AsyncEngine.open(tiny_model(name), config(**fields))


def with_nan(path: Path, token: int) -> bytes:
    """The model with the vector of *token* at its entrance made of what is no number."""
    file = read(path)
    table = next(
        tensor for tensor in file.tensors if tensor.name == b"token_embd.weight"
    )
    rows = np.frombuffer(table.data, np.float32).reshape(-1, table.dims[0]).copy()
    rows[token] = np.nan
    table.data = rows.tobytes()
    return file.encode()
