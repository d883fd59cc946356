"""
Dataclasses whose fields are checked by their types when they are made.

They are plain data that is given by position, so they are no `Frozen`; a mistake is told in
the same words.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from numbers import Integral
from typing import Annotated, Any, ClassVar, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from pyllama_raw.errors import ConfigError, shown
from pyllama_raw.options.frozen import allowed

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
Whole = Annotated[int, Field(ge=0, le=2**31 - 1)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Factor = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]


class Checked:
    """
    A dataclass; all its fields are checked, but those of UNCHECKED.

    Raises:
        ConfigError: a field is not what its type allows.
    """

    __slots__ = ()
    UNCHECKED: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        kind: Any = type(self)
        for name in (field.name for field in fields(kind)):
            if name not in kind.UNCHECKED:
                place, value = f"{kind.__name__}.{name}", getattr(self, name)
                _check(place, value, _adapter(kind, name))


def check_value(name: str, value: object, kind: Any) -> None:
    """
    Check one value against *kind*, a type with limits.

    Raises:
        ConfigError: it does not allow *value*.
    """
    _check(name, value, TypeAdapter(kind))


@cache
def _adapter(kind: Any, name: str) -> TypeAdapter[Any]:
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
