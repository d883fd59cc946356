"""
Models of some hundred megabytes, of the classes in scripts/tiny_models, for what a tiny one hides.

    python -m scripts.large_models DIRECTORY [NAME | NAME:TYPE ...]
    python -m scripts.large_models DIRECTORY --widen MODEL --factor 2

A type, as q4_k_m, makes a second file with such weights beside that of the name. Their weights are
small numbers of no meaning, the same in every place. A model is written in f32 and then quantized,
so a gigabyte is needed meanwhile.

--widen makes a model of several times the weights that says nearly what MODEL says, so the two are
a pair of a model and its draft model; see wider_model().
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from gguf import GGUFReader, GGUFWriter, dequantize

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
    parser.add_argument("--widen", type=Path, metavar="MODEL", help="a llama's GGUF")
    parser.add_argument("--factor", type=int, default=2, help="times as wide")
    options = parser.parse_args()
    if options.widen is not None:
        path = wider_model(options.widen, options.factor, options.directory)
        print(f"{path.name} {path.stat().st_size:,} bytes")
        return
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


# -- a larger model that says the same ----------------------------------------------------

WIDTHS = ("embedding_length", "feed_forward_length", "attention.head_count")
NOISE = 0.25  # of the deviation of a matrix


def wider_model(
    path: Path, factor: int, directory: Path, file_type: FileType = "q4_1"
) -> Path:
    """
    The llama at *path*, *factor* times as wide, in *directory*; made if it is not there.

    Its hidden state is that of the smaller one, *factor* times. A matrix has *factor* squared
    blocks, those of a row being the smaller matrix in sum: each has an equal part and noise
    of its own, so no two are alike. Before quantization it computes the same function, and
    afterwards it differs as two quantizations of a model do.

    Source: Chen, Goodfellow and Shlens, Net2Net, 2016.
    """
    target = directory / f"{path.stem}-x{factor}-{file_type}.gguf"
    unpacked = target.with_suffix(".f16")
    if target.exists():
        return target
    directory.mkdir(parents=True, exist_ok=True)
    reader, rng = GGUFReader(path), np.random.default_rng(0)
    is_tied = not any(tensor.name == "output.weight" for tensor in reader.tensors)
    writer = GGUFWriter(unpacked, "llama")
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name == "general.architecture":
            continue
        value, types = field.contents(), field.types
        is_width = name.removeprefix("llama.").removesuffix("_kv") in WIDTHS
        item_type = types[1] if len(types) > 1 else None
        writer.add_key_value(
            name, value * factor if is_width else value, types[0], item_type
        )
    for tensor in reader.tensors:
        weight = dequantize(tensor.data, tensor.tensor_type)
        if tensor.name == "token_embd.weight":
            weight = np.tile(weight, (1, factor))
        elif weight.ndim == 1 and tensor.name != "rope_freqs.weight":
            weight = np.tile(weight, factor)
            # Embeddings that make the logits, too, add them up *factor* times.
            if tensor.name == "output_norm.weight" and is_tied:
                weight /= factor
        elif weight.ndim == 2:
            n_times = 1 if tensor.name == "output.weight" else factor
            blocks = [_parts(weight, factor, rng) for _ in range(n_times)]
            weight = np.block(blocks)
        dtype = np.float16 if weight.ndim == 2 else np.float32
        writer.add_tensor(tensor.name, weight.astype(dtype))
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        quantize(unpacked, target, file_type)
    finally:
        unpacked.unlink(missing_ok=True)
    return target


def _parts(
    weight: weights.Array, n_parts: int, rng: np.random.Generator
) -> list[weights.Array]:
    """Matrices that are *weight* in sum: equal parts, but for noise."""
    scale = NOISE * weight.std()
    noise = rng.normal(0, scale, (n_parts, *weight.shape)).astype(np.float32)
    return list(weight / n_parts + noise - noise.mean(0))


def _numbers(_: Recipe, __: str, shape: Iterable[int]) -> weights.Array:
    shape = tuple(shape)
    block = np.random.default_rng(0).normal(0, 0.02, N_BLOCK).astype(np.float32)
    return np.resize(block, int(np.prod(shape))).reshape(shape)


if __name__ == "__main__":
    main()
