"""
Values that pydantic reads for a type, with the error that names a wrong one.

What is given may be any object of a stranger: whatever it raises, the caller is told.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Annotated, Any, TypeVar

from pydantic import Field, Strict, TypeAdapter, ValidationError, WrapValidator

from pyllama_raw.errors import InvalidRequest, reading
from pyllama_raw.options.frozen import allowed, place
from pyllama_raw.options.requests import Name, Whole

T = TypeVar("T")

_Text = Annotated[str, Strict(), Field(min_length=1)]


def _ids_or(value: Any, read_text: Callable[[Any], str]) -> Any:
    """Token ids are checked where they are copied, because that may take long."""
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return value
    return read_text(value)


NAME: TypeAdapter[str] = TypeAdapter(Name)
SALT: TypeAdapter[str | None] = TypeAdapter(Name | None)
TEXT: TypeAdapter[str] = TypeAdapter(_Text)
TEXTS: TypeAdapter[list[str]] = TypeAdapter(Annotated[list[_Text], Field(min_length=1)])
_TextOrIds = Annotated[_Text, WrapValidator(_ids_or)]
TEXTS_OR_IDS: TypeAdapter[Any] = TypeAdapter(
    Annotated[list[_TextOrIds], Field(min_length=1)]
)
WAIT: TypeAdapter[float] = TypeAdapter(Annotated[float, Strict(), Field(ge=0)])
_OPTIONS: dict[type, TypeAdapter[Any]] = {}


@cache
def whole(low: int, high: int) -> TypeAdapter[int]:
    """Whole numbers from *low* to *high*."""
    return TypeAdapter(Annotated[Whole, Field(ge=low, le=high)])


def options_of(kind: type[T]) -> TypeAdapter[T]:
    """The options that a TypedDict lists; its rules are made once."""
    if kind not in _OPTIONS:
        _OPTIONS[kind] = TypeAdapter(kind)
    return _OPTIONS[kind]


def checked(kind: TypeAdapter[T], value: object, *names: str) -> T:
    """
    *value* as pydantic reads it.

    Args:
        names: of the argument; where *value* holds options, they have names of their own.

    Raises:
        InvalidRequest: the first mistake.
    """
    with reading(".".join(names) or "options", value, "a value that can be read"):
        try:
            return kind.validate_python(value)
        except ValidationError as error:
            item = error.errors(include_url=False)[0]
        name = place((*names, *item["loc"]))
        raise InvalidRequest(name, item["input"], allowed(item))
