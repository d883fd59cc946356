"""
Arguments of the public functions, checked in the caller's task before anything is posted.

Rules:
1. A name that no option has is a TypeError, as of any Python function. A wrong value is an
   InvalidRequest with the name of the argument; of an engine, a ConfigError.
2. What is handed on is plain (requests.py). An iterator is read once.
3. Pydantic is imported by the first argument that it checks, because C loads the model
   meanwhile.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from pyllama_raw.errors import ConfigError, InvalidRequest, reading, shown


class LateModule:
    """A module that is imported when somebody asks for a name in it (rule 3)."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        value = getattr(import_module(self._name), name)
        setattr(self, name, value)  # from now on it is a plain attribute
        return value


if TYPE_CHECKING:
    from pyllama_raw.options import config as configs
    from pyllama_raw.options import frozen, requests, sampling
else:
    configs = LateModule("pyllama_raw.options.config")
    frozen = LateModule("pyllama_raw.options.frozen")
    requests = LateModule("pyllama_raw.options.requests")
    sampling = LateModule("pyllama_raw.options.sampling")

# The client of work that names none, such as a count of tokens: clients take turns.
SENDER: ContextVar[str | None] = ContextVar("SENDER", default=None)

T = TypeVar("T")

SINGLE = (str, bytes, bytearray, Mapping)  # iterable, but not a list of anything here


# -- values ---------------------------------------------------------------------


def checked_number(name: str, value: object, low: int, high: int) -> int:
    """A whole number; True is no number: a flag that was put in the wrong place is the likelier reason."""
    return requests.checked(requests.whole(low, high), value, name)


def checked_top(value: object) -> int:
    """A number of likely tokens."""
    return checked_number("n_top", value, 0, sampling.MAX_PROMPT_TOP)


def scoring(n_top: object) -> sampling.SamplingParams:
    """Parameters of a request that scores its prompt, with *n_top* likely tokens a place."""
    n_listed = checked_top(n_top)
    return sampling.SamplingParams(
        max_tokens=1, temperature=0, prompt_logprobs=n_listed
    )


def checked_texts(texts: Iterable[str], name: str = "texts") -> list[str]:
    """Texts, at least one, none of them empty. Raises InvalidRequest; *name* is theirs."""
    return requests.checked(requests.TEXTS, texts, name)


def checked_texts_or_ids(
    texts: Iterable[str | Sequence[int]], name: str = "texts"
) -> list[str | Sequence[int]]:
    """As checked_texts(), where token ids may stand for a text."""
    checked: list[str | Sequence[int]] = requests.checked(
        requests.TEXTS_OR_IDS, texts, name
    )
    return checked


def checked_text(name: str, value: object) -> str:
    """A text that is not empty."""
    return requests.checked(requests.TEXT, value, name)


def checked_word(name: str, value: object, words: Iterable[str], allowed: str) -> str:
    """One of *words*, of which *allowed* tells."""
    if isinstance(value, str) and (word := str.__str__(value)) in words:
        return word
    raise InvalidRequest(name, value, allowed)


def checked_flag(name: str, value: object) -> bool:
    """Whether it counts as True."""
    with reading(name, value, "True or False"):
        return bool(value)


def check_specials(
    prompt: object, chat: Mapping[str, Any], *, adds: bool, parses: bool
) -> None:
    """Raise InvalidRequest if flags are given for what is no text without chat options."""
    with reading_prompt(prompt):
        is_text = isinstance(prompt, str)
    if not (adds and parses) and (not is_text or chat):
        allowed = "a text without chat options, or leave add_special and parse_special"
        raise InvalidRequest("prompt", prompt, allowed)


def checked_wait(name: str, value: object) -> float:
    """Seconds that somebody waits."""
    return requests.checked(requests.WAIT, value, name)


def check_progress(value: object) -> None:
    """Raise InvalidRequest unless it is a function or None."""
    if not (value is None or callable(value)):
        raise InvalidRequest("progress", value, "a function, or None")


def checked_salt(value: object) -> str | None:
    """Text that a namespace can be named by."""
    return requests.checked(requests.SALT, value, "cache_salt")


def checked_adapter(value: object) -> str:
    """The name of an adapter."""
    return requests.checked(requests.NAME, value, "name")


def checked_file(name: str, value: object) -> str:
    """A path as text."""
    allowed = "the path of a file"
    with reading(name, value, allowed):
        if isinstance(value, str | os.PathLike):
            path = os.fspath(value)
            if isinstance(path, str) and path and b"\0" not in os.fsencode(path):
                return str.__str__(path)
    raise InvalidRequest(name, value, allowed)


# -- of a request ---------------------------------------------------------------


def checked_options(options: Mapping[str, Any]) -> requests.RequestOptions:
    """
    *options* as plain values.

    Raises:
        TypeError: a name is none of RequestOptions.
        InvalidRequest: a value is not allowed.
    """
    return _checked_all(requests.RequestOptions, "a request", options)


def checked_chat(options: Mapping[str, Any]) -> requests.ChatOptions:
    """Like checked_options(), for what only renders or counts."""
    return _checked_all(requests.ChatOptions, "a chat", options)


def checked_serving(options: Mapping[str, Any]) -> requests.TextOptions:
    """Like checked_options(), for what makes vectors."""
    return _checked_all(requests.TextOptions, "an embedding", options)


def _checked_all(kind: type[T], whose: str, options: Mapping[str, Any]) -> T:
    if not options:
        return kind()  # the dict of a TypedDict
    for name in options:
        if name not in kind.__annotations__:
            raise TypeError(_unknown_option(name, whose, kind.__annotations__))
    return requests.checked(requests.options_of(kind), options)


def _unknown_option(name: str, whose: str, fields: Iterable[str]) -> str:
    elsewhere = [
        *frozen.places(sampling.SamplingParams, "SamplingParams."),
        *frozen.places(configs.EngineConfig, "EngineConfig."),
    ]
    message = f"{shown(name)} is no option of {whose}"
    hint = frozen.suggestion(name, [*fields, *elsewhere])
    return f"{message}{hint}" if hint else f"{message}; there are {', '.join(fields)}"


def checked_params(params: object) -> sampling.SamplingParams:
    """*params*, or the default ones for None. Raises InvalidRequest for anything else."""
    if params is None:
        return sampling.SamplingParams()
    if isinstance(params, sampling.SamplingParams):
        return params
    allowed = "a SamplingParams, as SamplingParams(max_tokens=16, temperature=0)"
    raise InvalidRequest("params", params, allowed)


def checked_prompts(prompts: Iterable[T]) -> Iterable[T]:
    """*prompts*, which can be iterated over. Raises InvalidRequest for a single prompt."""
    allowed = "a list of prompts; complete() takes a single one"
    with reading("prompts", prompts, allowed):
        if not isinstance(prompts, SINGLE):
            iter(prompts)  # takes nothing out of it
            return prompts
    raise InvalidRequest("prompts", prompts, allowed)


# Errors of the objects of a prompt while they are read make it a wrong prompt.
reading_prompt = partial(reading, "prompt", allowed="text, token ids or chat messages")


# -- of an engine ---------------------------------------------------------------


def check_opening(
    model: object, config: object, progress: object, needs: object
) -> None:
    """Raise ConfigError unless an engine can be opened with these."""
    if needs is not None:
        words = get_args(requests.Need)
        fits = isinstance(needs, str) and str.__str__(needs) in words
        _check("needs", needs, fits, f"one of {', '.join(map(repr, words))}, or None")
    if config is not None:
        allowed = "an EngineConfig, as EngineConfig(context=ContextConfig(n_ctx=4096))"
        _check("config", config, isinstance(config, configs.EngineConfig), allowed)
    _check_source(model, progress)


def check_loading(model: object, config: object, progress: object) -> None:
    """Raise ConfigError unless a model can be loaded with these."""
    if config is not None:
        allowed = "a ModelConfig, as ModelConfig(no_host=True)"
        _check("config", config, isinstance(config, configs.ModelConfig), allowed)
    _check_source(model, progress)


def _check_source(model: object, progress: object) -> None:
    allowed = (
        "the path of a GGUF file, hf:OWNER/REPO/FILE, or None for the default model"
    )
    _check("model", model, model is None or _is_path(model), allowed)
    is_function = progress is None or callable(progress)
    _check("progress", progress, is_function, "a function, or None")


def _check(name: str, value: object, fits: bool, allowed: str) -> None:
    if not fits:
        raise ConfigError(f"{name}={shown(value)}: give {allowed}")


def _is_path(value: Any) -> bool:
    try:
        return isinstance(os.fspath(value), str)
    except Exception:  # noqa: BLE001 - the value is a stranger's
        return False
