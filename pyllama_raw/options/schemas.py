"""
Schemas are rewritten where llguidance reads them otherwise than JSON Schema says.

- It reads all numbers as doubles, and those of more than 15 digits not always as the nearest
  one. A bound that it would not keep is a narrower one, and such a value is refused.
- Above an excluded whole number it allows that number, too. So the bound is a number beside
  it, 14 places or fewer behind the point: no output lies between the two.
- It refuses a format that it does not know. The standard says to ignore it.
- It allows white space without an end, which some models write until their last token.
- It makes a state of each remainder of `multipleOf`.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from logging import getLogger
from typing import Any, TypeGuard

from pyllama_raw.errors import BadSchema

MOST = 2**53  # the doubles hold every whole number up to it
N_DIGITS = 15  # that a double keeps, and llguidance's reader of numbers
N_PLACES = 22  # behind the point
MAX_MULTIPLE = 10_000  # takes 0.1 s; ten times as much takes ten times as long

# Between two parts of an output: nothing, a space, or a line break and some indentation.
OPTIONS = {"whitespace_pattern": r"( |\n[ \t]{0,20})"}

FORMATS = frozenset(
    [
        "date",
        "date-time",
        "duration",
        "email",
        "hostname",
        "ipv4",
        "ipv6",
        "time",
        "unknown",
        "uri",
        "uuid",
    ]
)
NAMED = frozenset(
    {"$defs", "definitions", "dependentSchemas", "patternProperties", "properties"}
)
UPWARDS = {"minimum": 1, "exclusiveMinimum": 1, "maximum": -1, "exclusiveMaximum": -1}
EXACT = frozenset({"const", "enum", "multipleOf"})
UNREAD = frozenset({"default", "examples"})  # values that limit nothing
EXCLUDING = {"exclusiveMinimum": "minimum", "exclusiveMaximum": "maximum"}

_log = getLogger(__name__)


def for_llguidance(schema: Any) -> Any:
    """
    The same schema for llguidance, with the options that hold for all schemas.

    Raises:
        BadSchema: a number in it has too many digits, or is too large.
    """
    whole = rewritten({} if schema is True else schema)
    if isinstance(whole, dict):  # else llguidance says what is wrong
        whole["x-guidance"] = OPTIONS
    return whole


def rewritten(schema: Any) -> Any:
    """
    The same schema for llguidance; what is no schema is left to it.

    Raises:
        BadSchema: a number in it has too many digits.
    """
    if not isinstance(schema, Mapping):
        return schema
    found = {name: _value(name, value) for name, value in schema.items()}
    if isinstance(found.get("format"), str) and found["format"] not in FORMATS:
        _log.warning("json_schema: the unknown format %r is ignored", found["format"])
        del found["format"]
    for name in EXCLUDING.keys() & found.keys():
        _include(found, name)
    return found


def _value(name: str, value: Any) -> Any:
    if name in NAMED and isinstance(value, Mapping):
        return {key: rewritten(item) for key, item in value.items()}
    if name in UPWARDS and _is_number(value):
        return _bound(name, value)
    if name in EXACT:
        _check_digits(name, value)
    if name == "multipleOf" and _is_number(value):
        _check_multiple(value)
    if name in EXACT | UNREAD:
        return value
    if isinstance(value, list | tuple):
        return [rewritten(item) for item in value]
    return rewritten(value)


def _bound(name: str, value: float) -> float:
    """The nearest number inside it that llguidance reads exactly."""
    sign = UPWARDS[name]
    if sign * value > MOST:
        raise _inexact(name, value)
    if sign * value < -MOST:
        return -sign * MOST
    inwards = Context(N_DIGITS, ROUND_CEILING if sign > 0 else ROUND_FLOOR)
    if value == int(value):
        return int(value)
    return float(inwards.quantize(Decimal(repr(value)), _last_place(value)))


def _last_place(value: float) -> Decimal:
    """The place of the last digit that may stand in it."""
    first = Decimal(repr(value)).adjusted()
    return Decimal((0, (1,), max(first - N_DIGITS + 2, -N_PLACES)))


def _include(schema: dict[str, Any], name: str) -> None:
    """Instead of the excluded whole number *name*, its neighbour is included."""
    bound, sign, other = schema[name], UPWARDS[name], EXCLUDING[name]
    if not _is_number(bound) or bound != int(bound):
        return
    del schema[name]
    whole = int(bound)
    n_places = N_DIGITS - len(str(abs(whole)))
    beside = whole + sign * (10**-n_places if n_places > 0 else 1)
    if abs(beside) > MOST:
        raise _inexact(name, bound)
    given = schema.get(other)
    if not _is_number(given) or sign * given < sign * beside:
        schema[other] = beside


def _check_digits(name: str, value: Any) -> None:
    if _is_number(value) and not _is_exact(value):
        raise _inexact(name, value)
    if isinstance(value, Mapping):
        value = tuple(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            _check_digits(name, item)


def _check_multiple(value: float) -> None:
    _, digits, exponent = Decimal(repr(value)).as_tuple()
    n_states = int("".join(map(str, digits))) * 10 ** max(int(exponent), 0)
    if value == int(value):
        n_states = int(value)
    if n_states > MAX_MULTIPLE:
        allowed = f"at most {MAX_MULTIPLE}, without counting a decimal point"
        raise BadSchema("json_schema", f"multipleOf: {value} is too large; {allowed}")


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_exact(value: float) -> bool:
    if isinstance(value, int):
        return -MOST <= value <= MOST
    _, digits, exponent = Decimal(repr(value)).normalize().as_tuple()
    return (
        isinstance(exponent, int)  # else it is no number, or infinite
        and exponent >= -N_PLACES
        and exponent + len(digits) <= N_DIGITS
        and len(digits) <= N_DIGITS
    )


def _inexact(name: str, value: float) -> BadSchema:
    text = f"{name}: {value} is not kept exactly; allowed are whole numbers up to 2**53"
    fractions = (
        f"and fractions of {N_DIGITS} digits, at most {N_PLACES} behind the point"
    )
    return BadSchema("json_schema", f"{text}, {fractions}")
