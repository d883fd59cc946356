"""
Configuration fields (plain dicts of ModelConfig and ContextConfig) as C structs.

Every value is checked against the C type and the limits of libllama first: what C would
truncate, ignore or abort on is a ConfigError that names the knob. A field that is not given, or
is None, has libllama's default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_args

from pyllama_raw.errors import ConfigError
from pyllama_raw.native import (
    ContextType,
    FlashAttention,
    KVType,
    LazyMode,
    LoadMode,
    Pooling,
    RopeScaling,
    SplitMode,
)
from pyllama_raw.native.libllama import device_pointers, ffi, lib, need

INT32_MAX = 2**31 - 1

Check = Callable[[str, Any], Any]  # name and value of a field; returns what C takes


def model_params(fields: Mapping[str, Any], *, vocab_only: bool) -> tuple[Any, object]:
    """Return (llama_model_params *, what it points into). Raises ConfigError, Unsupported."""
    params = ffi.new("struct llama_model_params *")
    params[0] = lib.llama_model_default_params()
    params.vocab_only = vocab_only
    # llama.cpp before 0.5 reads all tensors before it computes.
    if not hasattr(params, "lazy_mode"):
        fields = dict(fields)
        if fields.pop("lazy_mode", None) == "on":
            need("lazy_mode='on'", "LLAMA_LAZY_MODE_ON")
    return params, _fill(params, "model", _MODEL, fields)


def context_params(fields: Mapping[str, Any], *, n_seq_max: int) -> Any:
    """
    Return llama_context_params *.

    There are as many output rows as asked for, but at least one a sequence, below which
    libllama would abort, and at most n_batch.
    """
    params = ffi.new("struct llama_context_params *")
    params[0] = lib.llama_context_default_params()
    n_seq_limit = lib.llama_max_parallel_sequences()
    params.n_seq_max = _integer("n_seq_max", n_seq_max, 1, n_seq_limit)
    # A field may ask for more output rows. libllama aborts below one a sequence.
    params.n_outputs_max = n_seq_max
    _fill(params, "context", _CONTEXT, {**_OURS, **fields})
    # A step has a token of each sequence that decodes, in one batch.
    if n_seq_max > params.n_batch:
        raise ConfigError(
            f"n_batch={params.n_batch} has no room for one token of each of the "
            f"n_seq_max={n_seq_max} sequences: raise n_batch or lower n_seq_max"
        )
    params.n_outputs_max = max(min(params.n_outputs_max, params.n_batch), n_seq_max)
    # libllama's own default is a number of threads, and not that of the other field.
    if fields.get("n_threads_batch") is None:
        params.n_threads_batch = params.n_threads
    params.embeddings = fields.get("pooling") is not None
    return params


def check_threads(name: str, value: object) -> int:
    """A thread count ggml can take."""
    return _integer(name, value, 1, lib.GGML_MAX_N_THREADS)


def _fill(
    params: Any, owner: str, checks: Mapping[str, Check], fields: Mapping[str, Any]
) -> list[object]:
    """Set *fields*; returns what C was given, which has to stay."""
    unknown = sorted(fields.keys() - checks.keys())
    if unknown:
        raise ConfigError(f"unknown {owner} options: {', '.join(unknown)}")
    values = []
    for name, value in fields.items():
        # None leaves libllama's default.
        if value is not None:
            values.append(checks[name](name, value))
            setattr(params, _C_NAMES.get(name, name), values[-1])
    return values


def _integer(name: str, value: object, low: int, high: int = INT32_MAX) -> int:
    if not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name}={value!r} must be an integer from {low} to {high}")
    return value


def _at_least(low: int) -> Check:
    return lambda name, value: _integer(name, value, low)


def _as(kind: Callable[[Any], Any]) -> Check:
    return lambda _, value: kind(value)


def _one_of(prefix: str, words: Any, **other: str) -> Check:
    """One of *words*; C has *prefix* before each, and *other* names for some."""
    allowed = get_args(words)

    def check(name: str, value: Any) -> Any:
        if value not in allowed:
            raise ConfigError(f"{name}={value!r} must be one of {', '.join(allowed)}")
        return getattr(lib, f"{prefix}_{other.get(value, value.upper())}")

    return check


def _devices(_: str, names: Sequence[str]) -> Any:
    pointers = device_pointers()
    for name in names:
        if name not in pointers:
            raise ConfigError(f"devices: no {name!r}, there are {', '.join(pointers)}")
    return ffi.new("ggml_backend_dev_t[]", [*(pointers[n] for n in names), ffi.NULL])


def _tensor_split(_: str, shares: Sequence[float]) -> Any:
    n_max = lib.llama_max_devices()
    if len(shares) > n_max:
        raise ConfigError(
            f"tensor_split has {len(shares)} shares, at most {n_max} are allowed"
        )
    # libllama reads a share of every device that there could be.
    array = ffi.new("float[]", n_max)
    array[0 : len(shares)] = list(shares)
    return array


def _overrides(_: str, pairs: Mapping[str, bool | int | float | str]) -> Any:
    if not pairs:
        return ffi.NULL
    # One more than given: an empty key ends the list.
    array = ffi.new("struct llama_model_kv_override[]", len(pairs) + 1)
    for item, (key, value) in zip(array, pairs.items(), strict=False):
        item.key = _chars("kv_overrides", key)
        # A bool is an int in Python, so it comes first.
        if isinstance(value, bool):
            item.tag, item.val_bool = lib.LLAMA_KV_OVERRIDE_TYPE_BOOL, value
        elif isinstance(value, int):
            limit = 2**63 - 1
            item.tag = lib.LLAMA_KV_OVERRIDE_TYPE_INT
            item.val_i64 = _integer(f"kv_overrides[{key}]", value, -limit - 1, limit)
        elif isinstance(value, float):
            item.tag, item.val_f64 = lib.LLAMA_KV_OVERRIDE_TYPE_FLOAT, value
        else:
            item.tag = lib.LLAMA_KV_OVERRIDE_TYPE_STR
            item.val_str = _chars(f"kv_overrides[{key}]", value)
    return array


def _chars(name: str, text: str) -> bytes:
    raw = text.encode("utf-8", "replace")
    if not raw or len(raw) > 127 or 0 in raw:
        raise ConfigError(f"{name}: {text!r} must be 1 to 127 bytes without a NUL")
    return raw


_MODEL: dict[str, Check] = {
    "n_gpu_layers": _at_least(-1),
    "devices": _devices,
    "split_mode": _one_of("LLAMA_SPLIT_MODE", SplitMode),
    "main_gpu": _at_least(0),
    "tensor_split": _tensor_split,
    "load_mode": _one_of("LLAMA_LOAD_MODE", LoadMode),
    "lazy_mode": _one_of("LLAMA_LAZY_MODE", LazyMode),
    "kv_overrides": _overrides,
    "check_tensors": _as(bool),
    "use_extra_bufts": _as(bool),
    "load_mtp": _as(bool),
    "no_host": _as(bool),
    "no_alloc": _as(bool),  # only to reckon: see memory_need.py
}
_CONTEXT: dict[str, Check] = {
    "ctx_type": _one_of("LLAMA_CONTEXT_TYPE", ContextType),
    "n_ctx": _at_least(1),
    "n_batch": _at_least(1),
    "n_ubatch": _at_least(1),
    "n_outputs_max": _at_least(1),
    "n_threads": check_threads,
    "n_threads_batch": check_threads,
    "kv_unified": _as(bool),
    "flash_attn": _one_of(
        "LLAMA_FLASH_ATTN_TYPE", FlashAttention, on="ENABLED", off="DISABLED"
    ),
    "type_k": _one_of("GGML_TYPE", KVType),
    "type_v": _one_of("GGML_TYPE", KVType),
    "swa_full": _as(bool),
    "offload_kqv": _as(bool),
    "op_offload": _as(bool),
    "rope_scaling": _one_of(
        "LLAMA_ROPE_SCALING_TYPE", RopeScaling, model="UNSPECIFIED"
    ),
    **dict.fromkeys(
        (
            "rope_freq_base",
            "rope_freq_scale",
            "yarn_ext_factor",
            "yarn_attn_factor",
            "yarn_beta_fast",
            "yarn_beta_slow",
        ),
        _as(float),
    ),
    "yarn_orig_ctx": _at_least(0),
    "pooling": _one_of("LLAMA_POOLING_TYPE", Pooling),  # makes vectors of texts
}
_C_NAMES = {
    "flash_attn": "flash_attn_type",
    "rope_scaling": "rope_scaling_type",
    "pooling": "pooling_type",
}
_OURS = {"n_ctx": 2048, "n_threads": 1, "kv_unified": True}  # defaults of ours
