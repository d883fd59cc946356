"""
Dataclasses whose fields are checked by their types when they are made.

They are plain data that is given by position, so they are no `Frozen`; a mistake is told in
the same words.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from numbers import Integral
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from pyllama_raw.errors import ConfigError, shown
from pyllama_raw.options.frozen import allowed

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Whole = Annotated[int, Field(ge=0, le=2**31 - 1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Factor = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]


def check_fields(thing: DataclassInstance, *names: str) -> None:
    """
    Check the fields *names* of *thing*; without names all of them.

    Raises:
        ConfigError: a field is not what its type allows.
    """
    kind = type(thing)
    for name in names or [field.name for field in fields(thing)]:
        _check(f"{kind.__name__}.{name}", getattr(thing, name), _adapter(kind, name))


def check_value(name: str, value: object, kind: Any) -> None:
    """
    Check one value against *kind*, a type with limits.

    Raises:
        ConfigError: it does not allow *value*.
    """
    _check(name, value, TypeAdapter(kind))


@cache
def _adapter(kind: type[DataclassInstance], name: str) -> TypeAdapter[Any]:
    return TypeAdapter(get_type_hints(kind, include_extras=True)[name])


def _check(name: str, value: Any, adapter: TypeAdapter[Any]) -> None:
    """Without conversions, but whole numbers of other libraries are fine."""
    is_other = isinstance(value, Integral) and not isinstance(value, int)
    try:
        adapter.validate_python(int(value) if is_other else value, strict=True)
    except ValidationError as error:
        words = allowed(error.errors(include_url=False)[0])
        text, place = shown(value), name.rpartition(".")[2]
        raise ConfigError(
            f"{name}={text}: give {words}", ((place, text, words),)
        ) from None
