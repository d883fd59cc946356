"""
Models of some hundred megabytes, of the classes in scripts/tiny_models, for what a tiny one hides.

    python -m scripts.large_models DIRECTORY [NAME | NAME:TYPE ...]

A type, as q4_k_m, makes a second file with such weights beside that of the name. Their weights are small numbers of no meaning, the same in every place. A model is written in f32
and then quantized, so a gigabyte is needed meanwhile.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np

from pyllama_raw.native.model import FileType, quantize
from scripts.tiny_models import gguf, projectors, vocab, weights
from scripts.tiny_models.projectors import PROJECTORS
from scripts.tiny_models.recipe import Recipe, sizes, state_space
from scripts.tiny_models.recipes import LAST, MEAN, RECIPES

N_VOCAB = 32000
N_EMBD = 1024
N_BLOCK = 4099  # numbers that are repeated


@dataclass(frozen=True, slots=True)
class Large:
    """A large model: the recipe of a tiny one, and the sizes that it has instead."""

    recipe: str
    fields: dict[str, object]
    file_type: FileType = "f16"
    n_vocab: int = N_VOCAB
    without: tuple[str, ...] = ()  # as of Recipe


def wide(n_head: int, n_head_kv: int, n_layer: int, **more: Any) -> dict[str, object]:
    fields: dict[str, Any] = {"n_embd": N_EMBD, "n_ff": 4 * N_EMBD} | more
    return sizes(n_head, n_head_kv, n_layer=n_layer, **fields)


EXPERTS: dict[str, object] = {
    "expert_count": 16,
    "expert_used_count": 4,
    "expert_feed_forward_length": N_EMBD // 2,
}
MIXER = {"inner_size": 2 * N_EMBD, "state_size": 128, "time_step_rank": 32}
SECTIONS = [11, 11, 10, 0]
BERT: dict[str, Any] = {
    "attention__layer_norm_epsilon": 1e-5,
    "attention__causal": False,
    "pooling_type": MEAN,
}
RWKV = {
    "attention__layer_norm_epsilon": 1e-5,
    "attention__decay_lora_rank": 64,
    "attention__iclr_lora_rank": 64,
    "attention__value_residual_mix_lora_rank": 32,
    "attention__gate_lora_rank": 128,
    "wkv__head_size": 64,
}
WINDOW = {"attention__sliding_window": 512, "attention__sliding_window_pattern": 6}
TIED = ("output.weight",)  # embeddings make the logits, too
DELTA = {"full_attention_interval": 4, "rope__dimension_sections": SECTIONS}

LARGE = {
    "llama": Large("llama", wide(16, 4, 12)),
    "llama-q8": Large("llama", wide(16, 4, 16), "q8_0"),
    "llama-230m": Large(
        "llama", wide(16, 4, 16, n_ff=2816), n_vocab=49152, without=TIED
    ),
    "llama-1b": Large("llama", wide(32, 8, 16, n_embd=2048, n_ff=8192), without=TIED),
    "qwen3moe": Large("qwen3moe", wide(16, 4, 8) | EXPERTS, "q8_0"),
    "gemma3": Large("gemma3", wide(8, 2, 12, **WINDOW)),
    "mamba2": Large("mamba2", wide(0, 0, 24) | state_space(group_count=1, **MIXER)),
    "rwkv7": Large("rwkv7", wide(0, 0, 12, **RWKV)),
    "falcon-h1": Large(
        "falcon-h1", wide(16, 4, 10) | state_space(group_count=1, **MIXER)
    ),
    "qwen35": Large(
        "qwen35",
        wide(16, 4, 12, **DELTA)
        | state_space(group_count=16, **MIXER | {"inner_size": 4 * N_EMBD}),
    ),
    "bert": Large("bert", wide(16, 16, 16, **BERT)),
    "jina-bert-v2": Large("jina-bert-v2", wide(16, 16, 12, **BERT)),
    "qwen3-embedding": Large("qwen3-embedding", wide(16, 4, 12, pooling_type=LAST)),
    "qwen2vl": Large("qwen2vl", wide(16, 4, 8, rope__dimension_sections=SECTIONS)),
    "t5": Large(
        "t5",
        wide(
            16,
            16,
            8,
            attention__relative_buckets_count=32,
            decoder_start_token_id=vocab.PAD,
        ),
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(LARGE))
    options = parser.parse_args()
    for name in options.names or LARGE:
        model, _, file_type = name.partition(":")
        path = (
            typed_model(model, file_type, options.directory)
            if file_type
            else large_model(model, options.directory)
        )
        print(f"{name:16} {path.stat().st_size:13,} bytes")


def large_model(name: str, directory: Path) -> Path:
    """The file of *name* in *directory*, made if it is not there."""
    path, unpacked = directory / f"{name}.gguf", directory / f"{name}.f32"
    if path.exists():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    try:
        with patch.object(weights, "make", _numbers):
            gguf.write(recipe_of(name), unpacked)
        quantize(unpacked, path, LARGE[name].file_type)
    finally:
        unpacked.unlink(missing_ok=True)
    return path


def typed_model(name: str, file_type: FileType, directory: Path) -> Path:
    """The model *name* with weights of *file_type*, made of its own file if it is not there."""
    path = directory / f"{name}-{file_type}.gguf"
    if not path.exists():
        quantize(large_model(name, directory), path, file_type)
    return path


def large_projector(name: str, directory: Path) -> Path:
    """The projector *name* for the large model of its text model, made if it is not there."""
    path = directory / f"{name}-projector.gguf"
    if not path.exists():
        tiny = PROJECTORS[name]
        sizes = {"n_embd": N_EMBD, "n_ff": 4 * N_EMBD, "n_head": 16, "n_layer": 8}
        projectors.write(replace(tiny, width=N_EMBD, **sizes), path)
    return path


def recipe_of(name: str) -> Recipe:
    """The recipe of the large model *name*."""
    tiny = RECIPES[LARGE[name].recipe]
    large = LARGE[name]
    words = vocab.extended(large.n_vocab) | {f"{tiny.arch}.vocab_size": large.n_vocab}
    more, without = {**tiny.more, **words}, (*tiny.without, *large.without)
    return replace(tiny, name=name, fields=large.fields, more=more, without=without)


def _numbers(_: Recipe, __: str, shape: Iterable[int]) -> weights.Array:
    shape = tuple(shape)
    block = np.random.default_rng(0).normal(0, 0.02, N_BLOCK).astype(np.float32)
    return np.resize(block, int(np.prod(shape))).reshape(shape)


if __name__ == "__main__":
    main()
