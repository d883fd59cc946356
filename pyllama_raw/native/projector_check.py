"""
Projector files that mtmd would end the process with, refused before it opens them.

clip.cpp asks for most tensors only where a file has them, and its graphs then read some
without a look. Types are another matter: `_ffi/media/node_fault.h` sees what is computed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

from pyllama_raw.errors import ProjectorLoadFailed, Unsupported
from pyllama_raw.native.bitmap import MAX_SIDE
from pyllama_raw.native.demand import available_bytes
from pyllama_raw.native.gguf_check import check_gguf, n_bytes
from pyllama_raw.native.gguf_header import Header, Scalar
from pyllama_raw.native.params import INT32_MAX

# Numbers of each part of a file, with the largest one: clip.cpp divides by some of them.
_HEADS = "attention.head_count"
_SIZES = {_HEADS: INT32_MAX, "embedding_length": INT32_MAX}
_VISION_SIZES = {"image_size": MAX_SIDE, "patch_size": INT32_MAX}
# Kinds whose graph has no attention, or counts heads itself: head_count may be anything.
_HEADLESS = ("gemma3nv", "gemma4ua", "gemma4uv", "qwen3tts_spkenc", "yasa2")
_EPSILON = "attention.layer_norm_epsilon"
# Their rows depend on what stands before them in the prompt: not on the image alone.
_DEPENDENT = ("deepseek4v", "hunyuanvl")
# Kinds whose graph reads a tensor without a look whether it is there.
_NO_PATCHES = ("gemma3nv", "deepseekocr", "deepseekocr2")
_LLAVA = ("mlp", "ldp", "ldpv2", "adapter")
_RESIZED = ("lfm2", "phi4", "kimivl", "kimik25", "ling3vl", "paddleocr", "muse-glimmer")
_PLACED = (*_LLAVA, *_RESIZED, "resampler", "minicpmv4_6")
_WHISPER = ("ultravox", "voxtral", "qwen2a", "qwen2.5o", "qwen3a", "glma", "meralion")
_HEARD = (*_WHISPER, "musicflamingo")
_BIASED = ("qwen2vl_merger", "qwen2.5vl_merger", "qwen2.5o")
_LAYER = re.compile(r"([av]\.blk\.\d+\.)attn_out\.weight")


def check_projector(path: str, *, on_host: bool) -> None:
    """
    Args:
        on_host: whether mtmd copies the weights to host memory.

    Raises:
        ModelLoadFailed: there is no such file, or it is damaged.
        ProjectorLoadFailed: it is no projector, or mtmd would end the process with it.
        Unsupported: a kind that needs more than the image.
    """
    header = check_gguf(path)
    values = header.values
    arch = values.get("general.architecture")
    if arch != "clip":
        raise ProjectorLoadFailed(path, f"this is a file of {arch!r}, not a projector")
    kinds = {str(v) for k, v in values.items() if k.endswith("projector_type")}
    if dependent := kinds.intersection(_DEPENDENT):
        raise Unsupported(
            f"the projector {dependent.pop()}",
            "its rows depend on what stands before the image, which a cache cannot know",
        )
    for part in ("vision", "audio"):
        if values.get(f"clip.has_{part}_encoder"):
            _check_numbers(path, header, part)
    names = {tensor.name for tensor in header.tensors}
    for name in _needed(kinds, names, values):
        if name not in names:
            raise ProjectorLoadFailed(path, f"tensor {name!r} is missing")
    needed, available = sum(map(n_bytes, header.tensors)), available_bytes()
    if on_host and available is not None and needed > available:
        raise ProjectorLoadFailed(
            path,
            f"its weights have {needed / 2**30:.1f} GiB, "
            f"available are {available / 2**30:.1f} GiB",
        )


def _check_numbers(path: str, header: Header, part: str) -> None:
    sizes = _SIZES | (_VISION_SIZES if part == "vision" else {})
    of_all = header.values.get("clip.projector_type")
    kind = header.values.get(f"clip.{part}.projector_type", of_all)
    for name, most in sizes.items():
        if name == _HEADS and kind in _HEADLESS:
            continue
        value = header.values.get(f"clip.{part}.{name}", 1)
        if not (isinstance(value, int) and 0 < value <= most):
            raise ProjectorLoadFailed(
                path, f"clip.{part}.{name}={value!r} is not allowed: give 1 to {most}"
            )
    epsilon = header.values.get(f"clip.{part}.{_EPSILON}", 0.0)
    if not (isinstance(epsilon, float) and 0 <= epsilon < math.inf):
        raise ProjectorLoadFailed(
            path, f"clip.{part}.{_EPSILON}={epsilon!r} is not allowed: give 0 or more"
        )


def _needed(
    kinds: set[str], names: set[str], values: Mapping[str, Scalar]
) -> Iterator[str]:
    """Tensors that a graph of *kinds* reads, of those that mtmd does not ask for."""
    if values.get("clip.has_vision_encoder") and not kinds.intersection(_NO_PATCHES):
        yield "v.patch_embd.weight"
    for part, placed in (("vision", _PLACED), ("audio", _HEARD)):
        if values.get(f"clip.has_{part}_encoder") and kinds.intersection(placed):
            yield f"{part[0]}.position_embd.weight"
    if "mlp" in kinds:
        normed = "mm.3.weight" in names
        for number in "0134" if normed else "02" if "mm.2.weight" in names else "0":
            yield f"mm.{number}.weight"
            yield f"mm.{number}.bias"
    biased = bool(kinds.intersection(_BIASED))
    for layer in filter(None, map(_LAYER.fullmatch, names)):
        if f"{layer[1]}attn_qkv.weight" not in names:
            yield from _attention(layer[1], biased=biased and layer[1][0] == "v")


def _attention(layer: str, *, biased: bool) -> Iterator[str]:
    for which in "qkv":
        yield f"{layer}attn_{which}.weight"
        if biased:
            yield f"{layer}attn_{which}.bias"
