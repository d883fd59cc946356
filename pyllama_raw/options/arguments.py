"""
Arguments of the public functions, checked in the caller's task before anything is posted.

Rules:
1. A name that no option has is a TypeError, as of any Python function. A wrong value is an
   InvalidRequest with the name of the argument; of an engine, a ConfigError.
2. What is handed on is a plain int, float, str or tuple. So no code of a caller's class
   runs in the engine thread.
3. An iterator is read once.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import islice, starmap
from numbers import Real
from operator import index
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

from pyllama_raw.errors import ConfigError, InvalidRequest, PyllamaError, cut, shown
from pyllama_raw.options.requests import (
    ChatOptions,
    Need,
    PolicyData,
    RequestOptions,
    TextOptions,
)

if TYPE_CHECKING:
    from pyllama_raw.options.sampling import SamplingParams

T = TypeVar("T")

MAX_PRIORITY = 2**31 - 1
MAX_DEADLINE_S = 1e9  # Python's waits take no more than some 9e9 seconds
MAX_SALT = 1024  # characters
MAX_CACHE_POINTS = 1024
MAX_POLICY_DATA = 32
MAX_POSITION = 2**31 - 1
MAX_ADAPTERS = 16  # of a request
MAX_SCALE = 100  # products with it stay finite
MAX_TOP = 20  # likely tokens listed at each place
SINGLE = (str, bytes, bytearray, Mapping)  # iterable, but not a list of anything here


# -- of a request ---------------------------------------------------------------


def checked_options(options: Mapping[str, Any]) -> RequestOptions:
    """
    *options* as plain values.

    Raises:
        TypeError: a name is none of RequestOptions.
        InvalidRequest: a value is not allowed.
    """
    for name in options:
        if name not in _OPTIONS:
            raise TypeError(_unknown_option(name))
    checked = {name: _OPTIONS[name](value) for name, value in options.items()}
    return cast(RequestOptions, checked)


def checked_chat(options: Mapping[str, Any]) -> ChatOptions:
    """Like checked_options(), for what only renders or counts."""
    return _checked_some(ChatOptions, "a chat", options)


def checked_serving(options: Mapping[str, Any]) -> TextOptions:
    """Like checked_options(), for what makes vectors."""
    return _checked_some(TextOptions, "an embedding", options)


def _checked_some(kind: type, whose: str, options: Mapping[str, Any]) -> RequestOptions:
    for name in options:
        if name not in kind.__annotations__:
            known = ", ".join(kind.__annotations__)
            raise TypeError(f"{shown(name)} is no option of {whose}; there are {known}")
    return checked_options(options)


def checked_params(params: object) -> SamplingParams:
    """*params*, or the default ones for None. Raises InvalidRequest for anything else."""
    from pyllama_raw.options.sampling import SamplingParams

    if params is None:
        return SamplingParams()
    if type(params) is SamplingParams:
        return params
    allowed = "a SamplingParams, as SamplingParams(max_tokens=16, temperature=0)"
    with _reading("params", params, allowed):
        if isinstance(params, SamplingParams):
            return params
    raise InvalidRequest("params", params, allowed)


def checked_prompts(prompts: Iterable[T]) -> Iterable[T]:
    """*prompts*, which can be iterated over. Raises InvalidRequest for a single prompt."""
    allowed = "a list of prompts; complete() takes a single one"
    with _reading("prompts", prompts, allowed):
        if not isinstance(prompts, SINGLE):
            iter(prompts)  # takes nothing out of it
            return prompts
    raise InvalidRequest("prompts", prompts, allowed)


def checked_texts(texts: Iterable[str], name: str = "texts") -> list[str]:
    """Texts, at least one, none of them empty. Raises InvalidRequest; *name* is theirs."""
    allowed = "a list of texts, at least one"
    with _reading(name, texts, allowed):
        if not isinstance(texts, SINGLE) and (checked := list(texts)):
            return [
                checked_text(f"{name}[{i}]", text) for i, text in enumerate(checked)
            ]
    raise InvalidRequest(name, texts, allowed)


def checked_text(name: str, value: object) -> str:
    """A text that is not empty."""
    if isinstance(value, str) and (text := str.__str__(value)):
        return text
    raise InvalidRequest(name, value, "a text of at least one character")


def checked_word(name: str, value: object, known: Iterable[str], allowed: str) -> str:
    """One of the words *known*, of which *allowed* tells."""
    if isinstance(value, str) and (word := str.__str__(value)) in known:
        return word
    raise InvalidRequest(name, value, allowed)


def checked_flag(name: str, value: object) -> bool:
    """Whether it counts as True."""
    with _reading(name, value, "True or False"):
        return bool(value)


def checked_wait(name: str, value: Any) -> float:
    """Seconds that somebody waits."""
    allowed = "seconds, 0 or more"
    with _reading(name, value, allowed):
        if isinstance(value, Real) and (seconds := float(value)) >= 0:  # not so for NaN
            return seconds
    raise InvalidRequest(name, value, allowed)


def check_progress(value: object) -> None:
    """Raise InvalidRequest unless it is a function or None."""
    if not (value is None or callable(value)):
        raise InvalidRequest("progress", value, "a function, or None")


def checked_salt(value: object) -> str | None:
    """Text that a namespace can be named by."""
    return _name("cache_salt", value)


def _name(option: str, value: object) -> str | None:
    allowed = f"text of 1 to {MAX_SALT} characters without lone surrogates, or None"
    if value is None:
        return None
    with _reading(option, value, allowed):
        if isinstance(value, str):
            name = str.__str__(value)  # plain, whatever its class overrides
            if 0 < len(name) <= MAX_SALT and name.encode():
                return name
    raise InvalidRequest(option, value, allowed)


def checked_adapter(value: object) -> str:
    """The name of an adapter."""
    name = _name("name", value)
    if name is None:
        raise InvalidRequest("name", value, f"text of 1 to {MAX_SALT} characters")
    return name


def checked_file(name: str, value: object) -> str:
    """A path as text."""
    allowed = "the path of a file"
    with _reading(name, value, allowed):
        if isinstance(value, str | os.PathLike):
            path = os.fspath(value)
            if isinstance(path, str) and path and os.fsencode(path):
                return str.__str__(path)
    raise InvalidRequest(name, value, allowed)


def _adapters(value: Any) -> Mapping[str, float] | None:
    allowed = (
        f"a mapping of at most {MAX_ADAPTERS} names to scales of -{MAX_SCALE} to "
        f"{MAX_SCALE}, or None"
    )
    return _mapping("adapters", value, allowed, MAX_ADAPTERS, _scaled)


def _scaled(name: object, value: Any) -> tuple[str, float]:
    if type(value) is not bool and isinstance(value, Real):
        scale = float(value)
        if abs(scale) <= MAX_SCALE:
            return checked_adapter(name), scale
    raise InvalidRequest("adapters", value, f"scales of -{MAX_SCALE} to {MAX_SCALE}")


def _policy_data(value: Any) -> PolicyData | None:
    allowed = (
        f"a mapping of at most {MAX_POLICY_DATA} names to numbers, True, False, None or "
        f"texts of at most {MAX_SALT} characters, or None"
    )
    return _mapping("policy_data", value, allowed, MAX_POLICY_DATA, _plain)


def _plain(name: Any, value: Any) -> tuple[str, Any]:
    """No code of the caller's runs when somebody reads the item."""
    if type(name) is str and len(name) <= MAX_SALT:
        if type(value) is str:
            is_plain = len(value) <= MAX_SALT
        elif type(value) is int:
            is_plain = value.bit_length() <= 64
        else:
            is_plain = value is None or type(value) in (bool, float)
        if is_plain:
            return name, value
    raise ValueError("not plain")


def _mapping(
    name: str,
    value: Any,
    allowed: str,
    most: int,
    checked: Callable[[Any, Any], tuple[str, T]],
) -> Mapping[str, T] | None:
    """A copy that nobody can change, of items as *checked* returns them."""
    if value is None:
        return None
    with _reading(name, value, allowed):
        if isinstance(value, Mapping):
            items = tuple(islice(value.items(), most + 1))
            if len(items) <= most:
                return MappingProxyType(dict(starmap(checked, items)))
    raise InvalidRequest(name, value, allowed)


def checked_top(value: object) -> int:
    """A number of likely tokens."""
    return checked_number("n_top", value, 0, MAX_TOP)


@contextmanager
def reading_prompt(prompt: object) -> Iterator[None]:
    """What the objects of a prompt raise while they are read makes it a wrong prompt."""
    with _reading("prompt", prompt, "text, token ids or chat messages"):
        yield


def _kind(name: str, kind: type, allowed: str, value: object) -> object:
    """What is in it is looked at where it is copied, which may take long."""
    with _reading(name, value, allowed):
        is_single = kind is Sequence and isinstance(value, SINGLE)
        if value is None or (isinstance(value, kind) and not is_single):
            return value
    raise InvalidRequest(name, value, allowed)


def _deadline(value: Any) -> float | None:
    allowed = f"seconds above 0, at most {MAX_DEADLINE_S:g}, or None"
    if value is None:
        return None
    with _reading("deadline_s", value, allowed):
        if not isinstance(value, bool) and isinstance(value, Real):
            seconds = float(value)
            if 0 < seconds <= MAX_DEADLINE_S:  # not so for NaN
                return seconds
    raise InvalidRequest("deadline_s", value, allowed)


def _cache_points(value: Any) -> tuple[int, ...]:
    allowed = f"at most {MAX_CACHE_POINTS} positions from 1, as whole numbers"
    with _reading("cache_points", value, allowed):
        if not isinstance(value, SINGLE):
            points = tuple(islice(value, MAX_CACHE_POINTS + 1))
            if len(points) <= MAX_CACHE_POINTS:
                return tuple(
                    checked_number("cache_points", p, 1, MAX_POSITION) for p in points
                )
    raise InvalidRequest("cache_points", value, allowed)


_OPTIONS: dict[str, Callable[[object], object]] = {
    "priority": lambda value: checked_number(
        "priority", value, -MAX_PRIORITY, MAX_PRIORITY
    ),
    "deadline_s": _deadline,
    "cache_salt": checked_salt,
    "cache_points": _cache_points,
    "client": partial(_name, "client"),
    "policy_data": _policy_data,
    "adapters": _adapters,
    "tools": partial(_kind, "tools", Sequence, "a list of mappings, or None"),
    "template_kwargs": partial(_kind, "template_kwargs", Mapping, "a mapping, or None"),
    "chat_template": partial(
        _kind, "chat_template", str, "the text of a Jinja template, or None"
    ),
}
assert _OPTIONS.keys() == RequestOptions.__annotations__.keys()


def checked_number(name: str, value: Any, low: int, high: int) -> int:
    """A whole number; True is no number: a flag that was put in the wrong place is the likelier reason."""
    allowed = f"a whole number from {low} to {high}"
    with _reading(name, value, allowed):
        if not isinstance(value, bool):
            number = index(value)  # plain, whatever the class of *value* overrides
            if low <= number <= high:
                return number
    raise InvalidRequest(name, value, allowed)


@contextmanager
def _reading(name: str, value: object, allowed: str) -> Iterator[None]:
    """Whatever *value* raises while it is looked at, the caller is told what is allowed."""
    try:
        yield
    except PyllamaError:
        raise
    except Exception as error:
        raise InvalidRequest(name, value, allowed) from error


def _unknown_option(name: str) -> str:
    from difflib import get_close_matches

    from pyllama_raw.options.config import EngineConfig  # noqa: F401 - home_of() knows it then
    from pyllama_raw.options.frozen import home_of
    from pyllama_raw.options.sampling import SamplingParams

    home = home_of(name)
    if home is not None:
        return f"{name} goes into {home}, as {home}({name}=...)"
    fields = SamplingParams.model_fields
    known = ", ".join(_OPTIONS)
    close = get_close_matches(cut(name, 80), [*_OPTIONS, *fields], n=1)
    text = f"{shown(name)} is no option of a request; there are {known}"
    if not close:
        return text
    where = " of SamplingParams" if close[0] in fields else ""
    return f"{text}. Did you mean {close[0]}{where}?"


# -- of an engine ---------------------------------------------------------------

_NEEDS = get_args(Need)


def check_opening(
    model: object, config: object, progress: object, needs: object
) -> None:
    """Raise ConfigError unless an engine can be opened with these."""
    if not (needs is None or (isinstance(needs, str) and str.__str__(needs) in _NEEDS)):
        known = ", ".join(map(repr, _NEEDS))
        raise ConfigError(f"needs={shown(needs)}: give one of {known}, or None")
    if config is not None:
        from pyllama_raw.options.config import EngineConfig

        example = "an EngineConfig, as EngineConfig(context=ContextConfig(n_ctx=4096))"
        _check_config(config, EngineConfig, example)
    _check_source(model, progress)


def check_loading(model: object, config: object, progress: object) -> None:
    """Raise ConfigError unless a model can be loaded with these."""
    if config is not None:
        from pyllama_raw.options.config import ModelConfig

        _check_config(
            config, ModelConfig, "a ModelConfig, as ModelConfig(no_host=True)"
        )
    _check_source(model, progress)


def _check_source(model: object, progress: object) -> None:
    if not (model is None or _is_path(model)):
        raise ConfigError(
            f"model={shown(model)}: give the path of a GGUF file, hf:OWNER/REPO/FILE, "
            "or None for the default model"
        )
    if not (progress is None or callable(progress)):
        raise ConfigError(f"progress={shown(progress)}: give a function, or None")


def _check_config(config: object, kind: type, allowed: str) -> None:
    if not isinstance(config, kind):
        raise ConfigError(f"config={shown(config)}: give {allowed}")


def _is_path(value: Any) -> bool:
    try:
        return isinstance(os.fspath(value), str)
    except Exception:  # noqa: BLE001 - the value is a stranger's
        return False
