"""
The tiny projectors there are: what makes rows of an image or a sound for a tiny model.

libllama cannot write such a file, because it has no recipe for one. So the tensors of each
kind are listed here, as tools/mtmd/clip.cpp asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from scripts.mutations import gguf_file
from scripts.tiny_models import vocab, weights
from scripts.tiny_models.gguf_values import encode
from scripts.tiny_models.recipe import Recipe
from scripts.tiny_models.recipes import LLAMA, RECIPES

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
    n_embd: int = 32  # of the encoder
    n_ff: int = 64
    n_head: int = 2
    width: int | None = None  # of a row; None: that of an embedding of the model

    @property
    def n_out(self) -> int:
        """Width of a row."""
        width = self.width or self.model.fields["embedding_length"]
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
        "embedding_length": projector.n_embd,
        "feed_forward_length": projector.n_ff,
        "block_count": projector.n_layer,
        "attention.head_count": projector.n_head,
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
        yield from layer(f"{projector.prefix}.blk.{index}", projector)
    yield from OUTPUTS[projector.name](projector)


def image_input(projector: Projector) -> Shapes:
    n_embd = projector.n_embd
    yield "v.patch_embd.weight", (n_embd, 3, PATCH, PATCH)
    if projector.name == "qwen2vl":  # two frames; positions are in the attention
        yield "v.patch_embd.weight.1", (n_embd, 3, PATCH, PATCH)
    else:
        yield "v.position_embd.weight", ((projector.size // PATCH) ** 2, n_embd)


def sound_input(projector: Projector) -> Shapes:
    n_embd = projector.n_embd
    yield "a.conv1d.1.weight", (n_embd, N_MEL, 3)
    yield "a.conv1d.1.bias", (n_embd, 1)
    yield "a.conv1d.2.weight", (n_embd, n_embd, 3)
    yield "a.conv1d.2.bias", (n_embd, 1)
    yield "a.position_embd.weight", (N_FRAMES, n_embd)


def layer(name: str, projector: Projector) -> Shapes:
    n_embd, n_ff = projector.n_embd, projector.n_ff
    for which in "qkv":
        yield f"{name}.attn_{which}.weight", (n_embd, n_embd)
        if which in projector.biases:
            yield f"{name}.attn_{which}.bias", (n_embd,)
    yield f"{name}.attn_out.weight", (n_embd, n_embd)
    for norm in ("ln1", "ln2"):
        yield f"{name}.{norm}.weight", (n_embd,)
        yield f"{name}.{norm}.bias", (n_embd,)
    yield f"{name}.ffn_up.weight", (n_ff, n_embd)
    yield f"{name}.ffn_down.weight", (n_embd, n_ff)


def two_products(n_in: int, n_out: int, n_between: int) -> Shapes:
    yield "mm.0.weight", (n_between, n_in)
    yield "mm.0.bias", (n_between,)
    yield "mm.2.weight", (n_out, n_between)
    yield "mm.2.bias", (n_out,)


def gemma3_output(projector: Projector) -> Shapes:
    n_embd = projector.n_embd
    yield "mm.soft_emb_norm.weight", (n_embd,)
    yield "mm.input_projection.weight", (n_embd, projector.n_out)  # the other way round


def ultravox_output(projector: Projector) -> Shapes:
    n_embd, n_ff = projector.n_embd, projector.n_ff
    yield "mm.a.norm_pre.weight", (4 * n_embd,)
    yield "mm.a.mlp.1.weight", (2 * n_ff, 4 * n_embd)
    yield "mm.a.norm_mid.weight", (n_ff,)
    yield "mm.a.mlp.2.weight", (projector.n_out, n_ff)


def qwen2a_output(projector: Projector) -> Shapes:
    yield "mm.a.fc.weight", (projector.n_out, projector.n_embd)
    yield "mm.a.fc.bias", (projector.n_out,)


OUTPUTS: dict[str, Callable[[Projector], Shapes]] = {
    "llava": lambda p: two_products(p.n_embd, p.n_out, p.n_out),
    "idefics3": lambda p: iter([("mm.model.fc.weight", (p.n_out, 4 * p.n_embd))]),
    "gemma3": gemma3_output,
    "qwen2vl": lambda p: two_products(4 * p.n_embd, p.n_out, 4 * p.n_embd),
    "ultravox": ultravox_output,
    "qwen2a": qwen2a_output,
}
