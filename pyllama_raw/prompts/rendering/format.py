"""The printing of values, by `{{ value }}`, `%` and `format()`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

from jinja2.sandbox import SandboxedFormatter

from pyllama_raw.prompts.rendering.text import (
    Text,
    concat,
    derived,
    from_message,
    from_template,
    is_all_template,
    of,
)

_FIELD = re.compile(
    r"%(\((?P<key>[^()]*)\))?(?P<form>[#0\- +]*\d*(\.\d+)?)(?P<kind>[a-zA-Z%])"
)


def printed(value: object) -> Text:
    """
    The text that `{{ value }}` prints.

    A template prints its own markers as text; what a list or number looks like is none.
    """
    return of(value) if isinstance(value, str) else from_message(str(value))


def percent(text: Text, values: Any) -> Text:
    """`text % values`."""
    plain = str.__mod__(text, values)
    given = values if isinstance(values, tuple) else (values,)
    if not is_all_template(text):
        return derived(plain, (text, *given))
    left = iter(given)
    parts: list[str] = []
    end = 0
    for field in _FIELD.finditer(text):
        parts.append(text[end : field.start()])
        end = field.end()
        if field["kind"] == "%":
            parts.append(from_template("%"))
        else:
            value = next(left, None) if field["key"] is None else values[field["key"]]
            is_as_is = field["form"] == "" and field["kind"] == "s"
            parts.append(printed(value) if is_as_is else _formed(field, value))
    return _if_equal(concat([*parts, text[end:]]), plain)


def with_fields(
    formatter: SandboxedFormatter,
    text: Text,
    values: Sequence[Any],
    named: Mapping[str, Any],
) -> Text:
    """`text.format(*values, **named)`."""
    plain = formatter.vformat(text, values, named)
    if not is_all_template(text):
        return derived(plain, (text, *values, *named.values()))
    numbers = count()
    parts: list[str] = []
    for literal, name, form, conversion in formatter.parse(text):
        parts.append(from_template(literal))
        if name is None:
            continue
        value, _ = formatter.get_field(name or str(next(numbers)), values, named)
        parts.append(printed(value) if not (form or conversion) else Text("?"))
    return _if_equal(concat(parts), plain)


def _formed(field: re.Match[str], value: object) -> Text:
    shown = f"%{field['form']}{field['kind']}" % (value,)
    return derived(shown, (value,))


def _if_equal(followed: Text, plain: str) -> Text:
    """*followed*, unless rules were used that are not followed here."""
    return followed if followed == plain else Text(plain)
