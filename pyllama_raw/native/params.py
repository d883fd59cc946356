"""
Configuration fields (plain dicts of ModelConfig and ContextConfig) as C structs.

Every value is checked against the C type and the limits of libllama first: what C would
truncate, ignore or abort on is a ConfigError that names the knob.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args

from pyllama_raw.errors import ConfigError
from pyllama_raw.native import kinds
from pyllama_raw.native.libllama import device_pointers, ffi, lib

INT32_MAX = 2**31 - 1

_SPLIT_MODES = get_args(kinds.SplitMode)
_LOAD_MODES = get_args(kinds.LoadMode)
_LAZY_MODES = get_args(kinds.LazyMode)
_FLASH_ATTN = dict(
    zip(get_args(kinds.FlashAttention), ("AUTO", "ENABLED", "DISABLED"), strict=True)
)
_ROPE_SCALINGS = get_args(kinds.RopeScaling)
_KV_TYPES = get_args(kinds.KVType)
_POOLINGS = ("none", "mean", "cls", "last", "rank")

_MODEL_DEFAULTS: dict[str, Any] = {
    "n_gpu_layers": -1,
    "devices": None,
    "split_mode": "layer",
    "main_gpu": 0,
    "tensor_split": None,
    "load_mode": "auto",
    "lazy_mode": "auto",
    "kv_overrides": {},
    "check_tensors": False,
    "use_extra_bufts": True,
    "no_host": False,
}
_CONTEXT_DEFAULTS: dict[str, Any] = {
    "n_ctx": 2048,
    "n_batch": 2048,
    "n_ubatch": 512,
    "n_outputs_max": None,
    "n_threads": 1,
    "n_threads_batch": None,
    "kv_unified": True,
    "flash_attn": "auto",
    "type_k": "f16",
    "type_v": "f16",
    "swa_full": True,
    "offload_kqv": True,
    "op_offload": True,
    "rope_scaling": "model",
    "rope_freq_base": 0.0,
    "rope_freq_scale": 0.0,
    "yarn_ext_factor": -1.0,
    "yarn_attn_factor": -1.0,
    "yarn_beta_fast": -1.0,
    "yarn_beta_slow": -1.0,
    "yarn_orig_ctx": 0,
    "pooling": None,  # makes vectors of texts; None: logits of tokens
}


def model_params(fields: Mapping[str, Any], *, vocab_only: bool) -> tuple[Any, object]:
    """Return (llama_model_params *, what it points into)."""
    values = _complete("model", _MODEL_DEFAULTS, fields)
    params = ffi.new("struct llama_model_params *")
    params[0] = lib.llama_model_default_params()
    devices = _devices(values["devices"])
    splits = _tensor_split(values["tensor_split"])
    overrides = _overrides(values["kv_overrides"])
    params.devices, params.tensor_split = devices, splits
    params.kv_overrides = overrides
    params.n_gpu_layers = _integer("n_gpu_layers", values["n_gpu_layers"], -1)
    params.main_gpu = _integer("main_gpu", values["main_gpu"], 0)
    params.split_mode = _enum("LLAMA_SPLIT_MODE", values, "split_mode", _SPLIT_MODES)
    params.load_mode = _enum("LLAMA_LOAD_MODE", values, "load_mode", _LOAD_MODES)
    params.lazy_mode = _enum("LLAMA_LAZY_MODE", values, "lazy_mode", _LAZY_MODES)
    params.vocab_only = vocab_only
    for name in ("check_tensors", "use_extra_bufts", "no_host"):
        setattr(params, name, bool(values[name]))
    return params, (devices, splits, overrides)


def context_params(fields: Mapping[str, Any], *, n_seq_max: int) -> Any:
    """
    Return llama_context_params *.

    There are as many output rows as asked for, but at least one a sequence, below which
    libllama would abort, and at most n_batch.
    """
    values = _complete("context", _CONTEXT_DEFAULTS, fields)
    params = ffi.new("struct llama_context_params *")
    params[0] = lib.llama_context_default_params()
    n_seq_limit = lib.llama_max_parallel_sequences()
    params.n_seq_max = _integer("n_seq_max", n_seq_max, 1, n_seq_limit)
    for name in ("n_ctx", "n_batch", "n_ubatch"):
        setattr(params, name, _integer(name, values[name], 1))
    if n_seq_max > params.n_batch:
        raise ConfigError(
            f"n_batch={params.n_batch} has no room for one token of each of the "
            f"n_seq_max={n_seq_max} sequences: raise n_batch or lower n_seq_max"
        )
    n_outputs_max = values["n_outputs_max"] or n_seq_max
    wanted = _integer("n_outputs_max", n_outputs_max, 1)
    params.n_outputs_max = max(min(wanted, params.n_batch), n_seq_max)
    _set_threads(params, values)
    params.yarn_orig_ctx = _integer("yarn_orig_ctx", values["yarn_orig_ctx"], 0)
    params.flash_attn_type = _flash_attn(values["flash_attn"])
    params.rope_scaling_type = _rope_scaling(values)
    params.type_k, params.type_v = kv_type(values, "type_k"), kv_type(values, "type_v")
    for name in ("rope_freq_base", "rope_freq_scale", "yarn_ext_factor"):
        setattr(params, name, values[name])
    for name in ("yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"):
        setattr(params, name, values[name])
    for name in ("kv_unified", "swa_full", "offload_kqv", "op_offload"):
        setattr(params, name, bool(values[name]))
    if values["pooling"] is not None:
        params.embeddings = True
        params.pooling_type = _enum("LLAMA_POOLING_TYPE", values, "pooling", _POOLINGS)
    return params


def check_threads(name: str, value: object) -> int:
    """A thread count ggml can take."""
    return _integer(name, value, 1, lib.GGML_MAX_N_THREADS)


def kv_type(values: Mapping[str, Any], name: str) -> int:
    """The ggml_type of a KV type by its name."""
    return _enum("GGML_TYPE", values, name, _KV_TYPES)


def _complete(
    owner: str, defaults: Mapping[str, Any], fields: Mapping[str, Any]
) -> dict[str, Any]:
    unknown = sorted(fields.keys() - defaults.keys())
    if unknown:
        raise ConfigError(f"unknown {owner} options: {', '.join(unknown)}")
    return {**defaults, **fields}


def _integer(name: str, value: object, low: int, high: int = INT32_MAX) -> int:
    if not isinstance(value, int) or not low <= value <= high:
        raise ConfigError(f"{name}={value!r} must be an integer from {low} to {high}")
    return value


def _enum(
    prefix: str, values: Mapping[str, Any], name: str, allowed: Sequence[str]
) -> int:
    value = values[name]
    if value not in allowed:
        raise ConfigError(f"{name}={value!r} must be one of {', '.join(allowed)}")
    found: int = getattr(lib, f"{prefix}_{value.upper()}")
    return found


def _set_threads(params: Any, values: Mapping[str, Any]) -> None:
    n_threads = check_threads("n_threads", values["n_threads"])
    n_batch = values["n_threads_batch"]
    params.n_threads = n_threads
    params.n_threads_batch = (
        n_threads if n_batch is None else check_threads("n_threads_batch", n_batch)
    )


def _flash_attn(value: str) -> int:
    if value not in _FLASH_ATTN:
        raise ConfigError(
            f"flash_attn={value!r} must be one of {', '.join(_FLASH_ATTN)}"
        )
    found: int = getattr(lib, f"LLAMA_FLASH_ATTN_TYPE_{_FLASH_ATTN[value]}")
    return found


def _rope_scaling(values: Mapping[str, Any]) -> int:
    if values["rope_scaling"] == "model":
        unspecified: int = lib.LLAMA_ROPE_SCALING_TYPE_UNSPECIFIED
        return unspecified
    return _enum("LLAMA_ROPE_SCALING_TYPE", values, "rope_scaling", _ROPE_SCALINGS)


def _devices(names: Sequence[str] | None) -> Any:
    if names is None:
        return ffi.NULL
    known = device_pointers()
    for name in names:
        if name not in known:
            raise ConfigError(f"devices: no {name!r}, there are {', '.join(known)}")
    return ffi.new("ggml_backend_dev_t[]", [*(known[n] for n in names), ffi.NULL])


def _tensor_split(shares: Sequence[float] | None) -> Any:
    if shares is None:
        return ffi.NULL
    n_max = lib.llama_max_devices()
    if len(shares) > n_max:
        raise ConfigError(
            f"tensor_split has {len(shares)} shares, at most {n_max} are allowed"
        )
    array = ffi.new("float[]", n_max)
    array[0 : len(shares)] = list(shares)
    return array


def _overrides(pairs: Mapping[str, bool | int | float | str]) -> Any:
    if not pairs:
        return ffi.NULL
    # One more than given: an empty key ends the list.
    array = ffi.new("struct llama_model_kv_override[]", len(pairs) + 1)
    for item, (key, value) in zip(array, pairs.items(), strict=False):
        item.key = _chars("kv_overrides", key)
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
