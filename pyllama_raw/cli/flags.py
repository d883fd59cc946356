"""
How flags are read, and how a wrong one is told: `--slots 0: give at least 1`.

What a flag allows is told in the words that the options have for it (frozen.py).
"""

from __future__ import annotations

import json
import re
from argparse import ArgumentParser, ArgumentTypeError, _ActionsContainer
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, NoReturn

from pydantic import Field, TypeAdapter, ValidationError

from pyllama_raw.errors import ConfigError
from pyllama_raw.options.config import Count, Finite
from pyllama_raw.options.frozen import allowed

SIZES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}

Reader = Callable[[str], Any]


class Parser(ArgumentParser):
    """Tells a mistake in one line; the usage is for who asks."""

    def error(self, message: str) -> NoReturn:
        told = re.sub(r"^argument ([^ ]+): ", r"\1 ", message)
        if choice := re.fullmatch(
            r"(.*)invalid choice: (.*) \(choose from (.*)\)", told
        ):
            told = f"{choice[1]}{choice[2]}: give one of {choice[3]}".replace("'", "")
        self.exit(2, f"error: {told}\n{self.prog} --help says more\n")

    def flags(self) -> dict[str, str]:
        """The flag of each field that has one."""
        actions = (action for action in self._actions if action.option_strings)
        return {action.dest: action.option_strings[0] for action in actions}


def add(
    group: _ActionsContainer,
    flag: str,
    read: Reader,
    metavar: str,
    text: str,
    *,
    default: object = None,
    **more: Any,
) -> None:
    """Add a flag with a value; its help ends with the default."""
    shown = text if default is None else f"{text} ({default})"
    group.add_argument(
        flag, type=read, metavar=metavar, default=default, help=shown, **more
    )


def reader(kind: Any) -> Reader:
    """What reads a flag as a value of *kind*, a type with pydantic's limits."""
    adapter = cache(lambda: TypeAdapter[Any](kind))  # takes a while: made if it is used

    def read(text: str) -> Any:
        try:
            return adapter().validate_python(text)
        except ValidationError as error:
            words, shown = allowed(error.errors()[0]), text or "''"
            raise ArgumentTypeError(f"{shown}: give {words}") from None

    return read


count = reader(Count)
whole = reader(Annotated[int, Field(ge=0)])
positive = reader(Annotated[Finite, Field(gt=0)])
not_negative = reader(Annotated[Finite, Field(ge=0)])
share = reader(Annotated[Finite, Field(ge=0, le=1)])


def byte_size(text: str) -> int:
    """Bytes of a size like 48M or 1.5GiB."""
    found = re.fullmatch(r"([0-9.]+) *([kmgt]?)(i?b)?", text.strip().lower())
    try:
        if found is not None:
            return int(float(found[1]) * SIZES[found[2]])
    except ValueError:
        pass
    raise ArgumentTypeError(f"{text}: give bytes, or a size like 512M or 2G")


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
    for place, value, words in error.mistakes:
        name = next((part for part in place.split(".") if part in flags), place)
        lines.append(f"{with_flags(name)} {value}: give {with_flags(words)}")
    return "; ".join(dict.fromkeys(lines)) or str(error)
