"""
Writing a model with libllama: it is asked which tensors there are, and saves them.

llama_model_init_from_user builds a model from metadata alone and hands every tensor to a
callback; filled and added to the same GGUF context they are written beside the metadata,
which so stays exactly what the recipe says.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import numpy as np

from pyllama_raw.native import libllama
from pyllama_raw.native.libllama import ffi, lib
from scripts.tiny_models import weights
from scripts.tiny_models.recipe import Recipe

# Optional tensors of old or special files: libllama prefers them to what they stand for.
UNWANTED = (
    "dense_*",
    "cls*",
    "rope_freqs.weight",
    "*.scale",
    "*.input_scale",
    "*.ssm_in.weight/qwen3next",
    "*.time_mix_first.weight/rwkv6qwen2",
)
DEMANDED = ("rope_freqs.weight/gemma4",)  # of one architecture, by its loader


def write(recipe: Recipe, path: Path) -> None:
    """Write the model *recipe* to *path*."""
    gguf = ffi.gc(lib.gguf_init_empty(), lib.gguf_free)
    for key, value in recipe.metadata.items():
        set_value(gguf, key, value)
    model, tensors = build(recipe, gguf)
    try:
        for name, tensor in tensors.items():
            if is_wanted(recipe, name):
                lib.gguf_add_tensor(gguf, tensor)
        if not lib.gguf_write_to_file(gguf, str(path).encode(), False):
            raise OSError(f"cannot write {path}")
    finally:
        lib.llama_model_free(model)


def build(recipe: Recipe, gguf: Any) -> tuple[Any, dict[str, Any]]:
    """The model *gguf* describes, and its tensors by name; they live as long as it does."""
    tensors: dict[str, Any] = {}
    errors: list[Exception] = []

    def fill(tensor: Any, _: Any) -> None:
        """C calls this: an error is kept and raised after the call."""
        try:
            name = ffi.string(tensor.name).decode()
            if name not in tensors:  # some are made again for every layer
                tensors[name] = tensor
                fill_tensor(recipe, name, tensor)
        except Exception as error:  # noqa: BLE001
            errors.append(error)

    callback = ffi.callback("llama_model_set_tensor_data_t", fill)
    params = lib.llama_model_default_params()
    params.n_gpu_layers = 0
    params.load_mtp = True
    since = libllama.mark()
    model = lib.llama_model_init_from_user(gguf, callback, ffi.NULL, params)
    if errors:
        raise errors[0]
    if model == ffi.NULL:
        raise RuntimeError(f"{recipe.name}: {libllama.last_errors(since)}")
    return model, tensors


def is_wanted(recipe: Recipe, name: str) -> bool:
    if name.startswith("cls.output.") and recipe.ranks:
        return True
    full_name, patterns = f"{name}/{recipe.arch}", (*UNWANTED, *recipe.without)
    unwanted = any(
        fnmatch(name, pattern) or fnmatch(full_name, pattern) for pattern in patterns
    )
    return full_name in DEMANDED or not unwanted


def fill_tensor(recipe: Recipe, name: str, tensor: Any) -> None:
    """Give *tensor* its weights; its ne is in the opposite order of a numpy shape."""
    n_dims = lib.ggml_n_dims(tensor)
    shape = tuple(tensor.ne[i] for i in reversed(range(n_dims)))
    weight = np.ascontiguousarray(weights.make(recipe, name, shape))
    assert weight.nbytes == lib.ggml_nbytes(tensor)
    lib.ggml_backend_tensor_set(tensor, ffi.from_buffer(weight), 0, weight.nbytes)


def set_value(gguf: Any, key: str, value: object) -> None:
    """Set one key; numbers are 32 bits wide, as libllama reads them."""
    name = key.encode()
    if isinstance(value, bool):
        lib.gguf_set_val_bool(gguf, name, value)
    elif isinstance(value, int):
        lib.gguf_set_val_u32(gguf, name, value)
    elif isinstance(value, float):
        lib.gguf_set_val_f32(gguf, name, value)
    elif isinstance(value, str):
        lib.gguf_set_val_str(gguf, name, value.encode())
    elif isinstance(value, Sequence):
        set_array(gguf, name, value)
    else:
        raise TypeError(f"{key}: {type(value).__name__} has no place in GGUF")


def set_array(gguf: Any, name: bytes, values: Sequence[Any]) -> None:
    if isinstance(values[0], str):
        strings = [ffi.new("char[]", value.encode()) for value in values]
        lib.gguf_set_arr_str(gguf, name, ffi.new("char *[]", strings), len(strings))
    else:
        data = ffi.from_buffer(np.array(values, np.int32))
        lib.gguf_set_arr_data(gguf, name, lib.GGUF_TYPE_INT32, data, len(values))
