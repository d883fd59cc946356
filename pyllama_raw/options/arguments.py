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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from pyllama_raw.errors import ConfigError, InvalidRequest, reading, shown

if TYPE_CHECKING:
    from pyllama_raw.options.requests import ChatOptions, RequestOptions, TextOptions
    from pyllama_raw.options.sampling import SamplingParams

T = TypeVar("T")

SINGLE = (str, bytes, bytearray, Mapping)  # iterable, but not a list of anything here


# -- values ---------------------------------------------------------------------


def checked_number(name: str, value: object, low: int, high: int) -> int:
    """A whole number; True is no number: a flag that was put in the wrong place is the likelier reason."""
    from pyllama_raw.options.requests import checked, whole

    return checked(whole(low, high), value, name)


def checked_top(value: object) -> int:
    """A number of likely tokens."""
    from pyllama_raw.options.sampling import MAX_TOP

    return checked_number("n_top", value, 0, MAX_TOP)


def checked_texts(texts: Iterable[str], name: str = "texts") -> list[str]:
    """Texts, at least one, none of them empty. Raises InvalidRequest; *name* is theirs."""
    from pyllama_raw.options.requests import TEXTS, checked

    return checked(TEXTS, texts, name)


def checked_texts_or_ids(
    texts: Iterable[str | Sequence[int]],
) -> list[str | Sequence[int]]:
    """As checked_texts(), where token ids may stand for a text."""
    from pyllama_raw.options.requests import TEXTS_OR_IDS, checked

    found: list[str | Sequence[int]] = checked(TEXTS_OR_IDS, texts, "texts")
    return found


def checked_text(name: str, value: object) -> str:
    """A text that is not empty."""
    from pyllama_raw.options.requests import TEXT, checked

    return checked(TEXT, value, name)


def checked_word(name: str, value: object, known: Iterable[str], allowed: str) -> str:
    """One of the words *known*, of which *allowed* tells."""
    if isinstance(value, str) and (word := str.__str__(value)) in known:
        return word
    raise InvalidRequest(name, value, allowed)


def checked_flag(name: str, value: object) -> bool:
    """Whether it counts as True."""
    with reading(name, value, "True or False"):
        return bool(value)


def checked_wait(name: str, value: object) -> float:
    """Seconds that somebody waits."""
    from pyllama_raw.options.requests import WAIT, checked

    return checked(WAIT, value, name)


def check_progress(value: object) -> None:
    """Raise InvalidRequest unless it is a function or None."""
    if not (value is None or callable(value)):
        raise InvalidRequest("progress", value, "a function, or None")


def checked_salt(value: object) -> str | None:
    """Text that a namespace can be named by."""
    from pyllama_raw.options.requests import SALT, checked

    return checked(SALT, value, "cache_salt")


def checked_adapter(value: object) -> str:
    """The name of an adapter."""
    from pyllama_raw.options.requests import NAME, checked

    return checked(NAME, value, "name")


def checked_file(name: str, value: object) -> str:
    """A path as text."""
    allowed = "the path of a file"
    with reading(name, value, allowed):
        if isinstance(value, str | os.PathLike):
            path = os.fspath(value)
            if isinstance(path, str) and path and os.fsencode(path):
                return str.__str__(path)
    raise InvalidRequest(name, value, allowed)


# -- of a request ---------------------------------------------------------------


def checked_options(options: Mapping[str, Any]) -> RequestOptions:
    """
    *options* as plain values.

    Raises:
        TypeError: a name is none of RequestOptions.
        InvalidRequest: a value is not allowed.
    """
    from pyllama_raw.options.requests import RequestOptions

    return _checked_all(RequestOptions, "a request", options)


def checked_chat(options: Mapping[str, Any]) -> ChatOptions:
    """Like checked_options(), for what only renders or counts."""
    from pyllama_raw.options.requests import ChatOptions

    return _checked_all(ChatOptions, "a chat", options)


def checked_serving(options: Mapping[str, Any]) -> TextOptions:
    """Like checked_options(), for what makes vectors."""
    from pyllama_raw.options.requests import TextOptions

    return _checked_all(TextOptions, "an embedding", options)


def _checked_all(kind: type[T], whose: str, options: Mapping[str, Any]) -> T:
    if not options:
        return kind()  # the dict of a TypedDict
    from pyllama_raw.options.requests import checked, options_of

    for name in options:
        if name not in kind.__annotations__:
            raise TypeError(_unknown_option(name, whose, kind.__annotations__))
    return checked(options_of(kind), options)


def _unknown_option(name: str, whose: str, known: Iterable[str]) -> str:
    from pyllama_raw.options.config import EngineConfig
    from pyllama_raw.options.frozen import places, suggestion
    from pyllama_raw.options.sampling import SamplingParams

    elsewhere = [
        *places(SamplingParams, "SamplingParams."),
        *places(EngineConfig, "EngineConfig."),
    ]
    told = f"{shown(name)} is no option of {whose}"
    found = suggestion(name, [*known, *elsewhere])
    return f"{told}{found}" if found else f"{told}; there are {', '.join(known)}"


def checked_params(params: object) -> SamplingParams:
    """*params*, or the default ones for None. Raises InvalidRequest for anything else."""
    from pyllama_raw.options.sampling import SamplingParams

    if params is None:
        return SamplingParams()
    if isinstance(params, SamplingParams):
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


@contextmanager
def reading_prompt(prompt: object) -> Iterator[None]:
    """Errors of the objects of a prompt while they are read make it a wrong prompt."""
    with reading("prompt", prompt, "text, token ids or chat messages"):
        yield


# -- of an engine ---------------------------------------------------------------


def check_opening(
    model: object, config: object, progress: object, needs: object
) -> None:
    """Raise ConfigError unless an engine can be opened with these."""
    if needs is not None:
        from pyllama_raw.options.requests import Need

        known = get_args(Need)
        fits = isinstance(needs, str) and str.__str__(needs) in known
        _check("needs", needs, fits, f"one of {', '.join(map(repr, known))}, or None")
    if config is not None:
        from pyllama_raw.options.config import EngineConfig

        allowed = "an EngineConfig, as EngineConfig(context=ContextConfig(n_ctx=4096))"
        _check("config", config, isinstance(config, EngineConfig), allowed)
    _check_source(model, progress)


def check_loading(model: object, config: object, progress: object) -> None:
    """Raise ConfigError unless a model can be loaded with these."""
    if config is not None:
        from pyllama_raw.options.config import ModelConfig

        allowed = "a ModelConfig, as ModelConfig(no_host=True)"
        _check("config", config, isinstance(config, ModelConfig), allowed)
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
