"""
Sampling parameters that a model file declares, for requests with `from_model`.

The keys are those of llama.h (llama_model_meta_key), the values what llama.cpp means by
them. What a request sets itself wins; the rest is checked like the words of a user.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from pyllama_raw.errors import ConfigError, Unsupported
from pyllama_raw.options.sampling import SamplingParams

PREFIX = "general.sampling."

# llama.cpp's names of stages where ours are others; adaptive_p is on by its target alone.
_STAGES = {"typ_p": "typical", "temp": "temperature"}
_IMPLIED = ("", "adaptive_p")


def _stages(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(";")]
    return tuple(_STAGES.get(name, name) for name in names if name not in _IMPLIED)


def _top_k(text: str) -> int:
    return max(int(text), 0)  # llama.cpp: below 1 is off


def _last_n(text: str) -> int | None:
    return None if int(text) == -1 else int(text)  # llama.cpp: -1 is the whole context


FIELDS: dict[str, tuple[str, Callable[[str], object]]] = {
    "sequence": ("stages", _stages),
    "top_k": ("top_k", _top_k),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "xtc_probability": ("xtc_probability", float),
    "xtc_threshold": ("xtc_threshold", float),
    "temp": ("temperature", float),
    "penalty_last_n": ("penalty_last_n", _last_n),
    "penalty_repeat": ("repeat_penalty", float),
    "mirostat": ("mirostat", int),
    "mirostat_tau": ("mirostat_tau", float),
    "mirostat_eta": ("mirostat_eta", float),
}


def declared(metadata: Mapping[str, str]) -> dict[str, str]:
    """Values that *metadata* declares, by the end of its keys; not checked."""
    return {key: metadata[PREFIX + key] for key in FIELDS if PREFIX + key in metadata}


def with_declared(
    params: SamplingParams, metadata: Mapping[str, str]
) -> SamplingParams:
    """
    *params*, completed by what the model file declares if they ask for it.

    Raises:
        Unsupported: a declared value that the request does not replace cannot be used.
    """
    if not params.from_model:
        return params
    values: dict[str, Any] = {}
    for key, text in declared(metadata).items():
        name, read = FIELDS[key]
        if name in params.model_fields_set:
            continue
        try:
            values[name] = read(text)
        except ValueError:
            raise _refusal(f"{PREFIX}{key}={text!r} is no number") from None
    given = {name: getattr(params, name) for name in params.model_fields_set}
    try:
        return SamplingParams(**(values | given))
    except ConfigError as error:
        raise _refusal(f"with {PREFIX}*: {error}") from None


def _refusal(reason: str) -> Unsupported:
    return Unsupported(
        "from_model",
        f"the sampling defaults in the model file cannot be used: {reason}. Set the "
        "field in the request, or leave from_model out",
    )
