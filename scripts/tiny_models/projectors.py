"""
The tiny projectors there are: what makes rows of an image or a sound for a tiny model.

libllama cannot write such a file, because it has no recipe for one. So the tensors of each
kind are listed here, as tools/mtmd/clip.cpp asks for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from scripts.mutations import gguf_file
from scripts.tiny_models import vocab, weights
from scripts.tiny_models.gguf_values import encode
from scripts.tiny_models.recipe import Recipe
from scripts.tiny_models.recipes import LLAMA, RECIPES

N_EMBD, N_FF, N_HEAD = 32, 64, 2  # of all encoders
PATCH = 14  # pixels, each way
N_MEL, N_FRAMES = 80, 1500
F32, F16 = 0, 1  # ggml.h: enum ggml_type

Shapes = Iterator[tuple[str, tuple[int, ...]]]

# A llama with the words that SmolVLM writes around the slices of an image.
LLAMA_WORDS = Recipe(
    "llama-words",
    "llama",
    LLAMA,
    more=vocab.with_words("<fake_token_around_image>", "<global-img>", "\n\n"),
)


@dataclass(frozen=True, slots=True)
class Projector:
    """One tiny projector; the numbers are those of clip.cpp."""

    name: str
    type: str  # clip.projector_type
    model: Recipe  # the text model that takes its rows
    size: int = 0  # of an image, in pixels each way; 0: it hears
    n_layer: int = 1
    biases: str = ""  # of q, k, v: those that there are
    more: Mapping[str, int] = field(default_factory=dict)  # keys below clip.vision

    @property
    def n_out(self) -> int:
        """Width of a row: that of an embedding of the model."""
        width = self.model.fields["embedding_length"]
        assert isinstance(width, int)
        return width

    @property
    def prefix(self) -> str:
        return "v" if self.size else "a"

    @property
    def part(self) -> str:
        return "vision" if self.size else "audio"


GEMMA3, QWEN2VL = RECIPES["gemma3"], RECIPES["qwen2vl"]
PROJECTORS = {
    projector.name: projector
    for projector in (
        Projector("llava", "mlp", RECIPES["llama"], 28, n_layer=2),  # leaves one out
        Projector(
            "idefics3",
            "idefics3",
            LLAMA_WORDS,
            28,
            more={"projector.scale_factor": 2, "preproc_image_size": 56},
        ),
        Projector("gemma3", "gemma3", GEMMA3, 56, more={"projector.scale_factor": 2}),
        Projector("qwen2vl", "qwen2vl_merger", QWEN2VL, 56, biases="qkv"),
        Projector(
            "ultravox",
            "ultravox",
            RECIPES["llama"],
            biases="qv",
            more={"projector.stack_factor": 4},
        ),
        Projector("qwen2a", "qwen2a", QWEN2VL, biases="qv"),
    )
}


def write(projector: Projector, path: Path) -> None:
    """Write *projector* to *path*."""
    file = gguf_file.File()
    for key, value in metadata(projector).items():
        file.values[key.encode()] = encode(value)
    for name, shape in tensors(projector):
        data = weights.draw(projector.name, name, shape)
        is_filter = "conv1d" in name and name.endswith("weight")
        kind, width = (F16, np.float16) if is_filter else (F32, np.float32)
        content = np.ascontiguousarray(data, width).tobytes()
        dims = list(reversed(shape))
        file.tensors.append(gguf_file.Tensor(name.encode(), dims, kind, content))
    path.write_bytes(file.encode())


def metadata(projector: Projector) -> dict[str, object]:
    """Every key of the file and its value."""
    part = {
        "embedding_length": N_EMBD,
        "feed_forward_length": N_FF,
        "block_count": projector.n_layer,
        "attention.head_count": N_HEAD,
        "attention.layer_norm_epsilon": 1e-5,
        "projection_dim": projector.n_out,
        **projector.more,
    }
    if projector.size:
        part |= {"image_size": projector.size, "patch_size": PATCH}
        part |= {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
    else:
        part |= {"num_mel_bins": N_MEL}
    return {
        "general.architecture": "clip",
        "general.name": f"tiny {projector.name}",
        f"clip.has_{projector.part}_encoder": True,
        "clip.projector_type": projector.type,
        **{f"clip.{projector.part}.{key}": value for key, value in part.items()},
    }


def tensors(projector: Projector) -> Shapes:
    """Names and shapes; the last axis is the one a product sums over."""
    yield from (image_input if projector.size else sound_input)(projector)
    for index in range(projector.n_layer):
        yield from layer(f"{projector.prefix}.blk.{index}", projector.biases)
    yield from OUTPUTS[projector.name](projector.n_out)


def image_input(projector: Projector) -> Shapes:
    yield "v.patch_embd.weight", (N_EMBD, 3, PATCH, PATCH)
    if projector.name == "qwen2vl":  # two frames; positions are in the attention
        yield "v.patch_embd.weight.1", (N_EMBD, 3, PATCH, PATCH)
    else:
        yield "v.position_embd.weight", ((projector.size // PATCH) ** 2, N_EMBD)


def sound_input(_: Projector) -> Shapes:
    yield "a.conv1d.1.weight", (N_EMBD, N_MEL, 3)
    yield "a.conv1d.1.bias", (N_EMBD, 1)
    yield "a.conv1d.2.weight", (N_EMBD, N_EMBD, 3)
    yield "a.conv1d.2.bias", (N_EMBD, 1)
    yield "a.position_embd.weight", (N_FRAMES, N_EMBD)


def layer(name: str, biases: str) -> Shapes:
    for which in "qkv":
        yield f"{name}.attn_{which}.weight", (N_EMBD, N_EMBD)
        if which in biases:
            yield f"{name}.attn_{which}.bias", (N_EMBD,)
    yield f"{name}.attn_out.weight", (N_EMBD, N_EMBD)
    for norm in ("ln1", "ln2"):
        yield f"{name}.{norm}.weight", (N_EMBD,)
        yield f"{name}.{norm}.bias", (N_EMBD,)
    yield f"{name}.ffn_up.weight", (N_FF, N_EMBD)
    yield f"{name}.ffn_down.weight", (N_EMBD, N_FF)


def two_products(n_in: int, n_out: int, n_between: int) -> Shapes:
    yield "mm.0.weight", (n_between, n_in)
    yield "mm.0.bias", (n_between,)
    yield "mm.2.weight", (n_out, n_between)
    yield "mm.2.bias", (n_out,)


def gemma3_output(n_out: int) -> Shapes:
    yield "mm.soft_emb_norm.weight", (N_EMBD,)
    yield "mm.input_projection.weight", (N_EMBD, n_out)  # the other way round


def ultravox_output(n_out: int) -> Shapes:
    yield "mm.a.norm_pre.weight", (4 * N_EMBD,)
    yield "mm.a.mlp.1.weight", (2 * N_FF, 4 * N_EMBD)
    yield "mm.a.norm_mid.weight", (N_FF,)
    yield "mm.a.mlp.2.weight", (n_out, N_FF)


def qwen2a_output(n_out: int) -> Shapes:
    yield "mm.a.fc.weight", (n_out, N_EMBD)
    yield "mm.a.fc.bias", (n_out,)


OUTPUTS = {
    "llava": lambda n_out: two_products(N_EMBD, n_out, n_out),
    "idefics3": lambda n_out: iter([("mm.model.fc.weight", (n_out, 4 * N_EMBD))]),
    "gemma3": gemma3_output,
    "qwen2vl": lambda n_out: two_products(4 * N_EMBD, n_out, 4 * N_EMBD),
    "ultravox": ultravox_output,
    "qwen2a": qwen2a_output,
}
