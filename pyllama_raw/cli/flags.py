"""
How flags are read, and how a wrong one is told: `--slots 0: 1 to 256`.

A flag that stands for a field of the options has the rule of that field, so none is
written twice.
"""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel, TypeAdapter, ValidationError

from pyllama_raw.errors import ConfigError

MAX_SHOWN = 2**31 - 2  # larger limits are those of C: told only to who exceeds them
SIZES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


class Parser(ArgumentParser):
    """Tells a mistake in one line; the usage is for who asks."""

    def error(self, message: str) -> NoReturn:
        told = re.sub(r"^argument ([^ ]+): ", r"\1 ", message)
        if choice := re.fullmatch(
            r"(.*)invalid choice: (.*) \(choose from (.*)\)", told
        ):
            told = f"{choice[1]}{choice[2]}: one of {choice[3]}".replace("'", "")
        self.exit(2, f"error: {told}\n{self.prog} --help says more\n")

    def flags(self) -> dict[str, str]:
        """The flag of each field that has one."""
        actions = (action for action in self._actions if action.option_strings)
        return {action.dest: action.option_strings[0] for action in actions}


def field(model: type[BaseModel], name: str) -> Callable[[str], Any]:
    """What reads a flag as the field *name* of *model*."""

    def read(text: str) -> Any:
        adapter = _adapter(model, name)
        try:
            return adapter.validate_python(text)
        except ValidationError as error:
            kind = error.errors()[0]["type"]
            rule = _rule(adapter.json_schema(), kind)
            raise ArgumentTypeError(f"{text}: {rule}") from None

    return read


@cache
def _adapter(model: type[BaseModel], name: str) -> TypeAdapter[Any]:
    return TypeAdapter(model.model_fields[name].rebuild_annotation())


def _rule(schema: dict[str, Any], kind: str) -> str:
    """What *schema* allows, in words; *kind* is pydantic's name of the mistake."""
    schema = next((s for s in schema.get("anyOf", ()) if s["type"] != "null"), schema)
    if "enum" in schema:
        return "one of " + ", ".join(map(str, schema["enum"]))
    if kind == "finite_number" or not kind.startswith(("greater", "less")):
        kinds = {"integer": "a whole number", "number": "a number"}
        return f"{kinds.get(schema['type'], 'text')}{_bounds(schema, ', ', kind)}"
    return _bounds(schema, "", kind)


def _bounds(schema: dict[str, Any], before: str, kind: str) -> str:
    least, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    most = schema.get("maximum")
    if most is not None and most >= MAX_SHOWN and not kind.startswith("less"):
        most = None
    if least is not None:
        return (
            f"{before}{least} or more" if most is None else f"{before}{least} to {most}"
        )
    if above is not None:
        upper = "" if most is None else f", at most {most}"
        return f"{before}more than {above}{upper}"
    return "" if most is None else f"{before}{most} or less"


def whole(least: int) -> Callable[[str], int]:
    """What reads a whole number of at least *least*."""

    def read(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            raise ArgumentTypeError(
                f"{text}: a whole number, {least} or more"
            ) from None
        if number < least:
            raise ArgumentTypeError(f"{text}: {least} or more")
        return number

    return read


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        raise ArgumentTypeError(f"{text}: a number, more than 0") from None
    if not 0 < number < float("inf"):
        raise ArgumentTypeError(f"{text}: more than 0, and finite")
    return number


def share(text: str) -> float:
    """A number from 0 to 1."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1:
        raise ArgumentTypeError(f"{text}: a number, 0 to 1")
    return number


def byte_size(text: str) -> int:
    """Bytes of a size like 48M or 1.5GiB."""
    found = re.fullmatch(r"([0-9.]+) *([kmgt]?)(i?b)?", text.strip().lower())
    try:
        if found is not None:
            return int(float(found[1]) * SIZES[found[2]])
    except ValueError:
        pass
    raise ArgumentTypeError(f"{text}: bytes, or a size like 512M or 2G")


def text_file(name: str) -> str:
    """The text in a file."""
    try:
        return Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ArgumentTypeError(f"{name}: cannot be read: {reason}") from None


def json_file(name: str) -> Any:
    """The JSON value in a file."""
    try:
        return json.loads(text_file(name))
    except ValueError as error:
        raise ArgumentTypeError(f"{name}: no JSON: {error}") from None


def told(error: ConfigError, flags: dict[str, str]) -> str:
    """What a person is told: flags in the place of the fields that they stand for."""

    def with_flags(text: str) -> str:
        return re.sub(r"[a-z]\w*", lambda word: flags.get(word[0], word[0]), text)

    lines = []
    for place, value, allowed in error.mistakes:
        name = next((part for part in place.split(".") if part in flags), place)
        lines.append(f"{with_flags(name)} {value}: give {with_flags(allowed)}")
    return "; ".join(dict.fromkeys(lines)) or str(error)
