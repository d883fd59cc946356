"""
Help of a flag that stands for an option: the description of the option, and its default.

A description may end with the meaning of None, as "None: all."; a flag shows that as its
default. A switch that is off shows no default, because nobody has to turn it off.
"""

from __future__ import annotations

from typing import Any

from pyllama_raw.options.described import descriptions

UNITS = "KMGT"


def help_of(kind: type, name: str, default: Any = None, *, more: str = "") -> str:
    """
    Help of the flag for the field *name* of *kind*.

    Args:
        default: of this command, if it has another one than the field.
        more: what belongs to the flag only; it stands before the default.
    """
    text = " ".join(descriptions(kind).get(name, name).split())
    text, _, of_none = text.removesuffix(".").partition(". None: ")
    default = _default(kind, name) if default is None else default
    shown = of_none if default is None else _shown(name, default)
    parts = (_lowered(text), more and f"; {more}", shown and f" ({shown})")
    return "".join(parts).replace("%", "%%")


def _default(kind: type, name: str) -> Any:
    fields = getattr(kind, "model_fields", {})
    return fields[name].default if name in fields else None


def _lowered(text: str) -> str:
    """A sentence as a part of a list; a name like GBNF stays."""
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def _shown(name: str, value: Any) -> str:
    match value:
        case bool():
            return "yes" if value else ""
        case float():
            return f"{value:g}"
        case tuple():
            return ", ".join(value)
        case int() if name.endswith("_bytes"):
            return _size(value)
    return str(value)


def _size(n_bytes: int) -> str:
    """The shortest way to give so many bytes."""
    unit = ""
    for larger in UNITS:
        if n_bytes % 1024:
            break
        n_bytes, unit = n_bytes // 1024, larger
    return f"{n_bytes}{unit}"
