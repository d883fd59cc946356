"""`--adapter NAME=FILE[:SCALE]`: adapters that are loaded before the first request."""

from __future__ import annotations

import re
from argparse import ArgumentParser, ArgumentTypeError
from collections.abc import Iterable
from typing import Annotated, NamedTuple

from pydantic import Field

from pyllama_raw.cli.flags import reader
from pyllama_raw.options.config import Finite
from pyllama_raw.options.requests import MAX_SCALE

_scale = reader(Annotated[Finite, Field(ge=-MAX_SCALE, le=MAX_SCALE)])


class AdapterFlag(NamedTuple):
    """The adapter that one flag names."""

    name: str
    path: str
    scale: float


def add_adapters(parser: ArgumentParser) -> None:
    """The flag; repeatable."""
    parser.add_argument(
        "--adapter",
        dest="adapters",
        action="append",
        type=_adapter,
        default=[],
        metavar="NAME=FILE[:SCALE]",
        help="a LoRA or control vector, and the scale of its effect (1); repeatable",
    )


def _adapter(text: str) -> AdapterFlag:
    found = re.fullmatch(r"([^=]+)=(.+?)(?::([-+]?[\d.]+))?", text)
    if found is None:
        raise ArgumentTypeError(f"{text}: give NAME=FILE or NAME=FILE:SCALE")
    return AdapterFlag(found[1], found[2], _scale(found[3] or "1"))


def scales_of(chosen: Iterable[AdapterFlag]) -> dict[str, float]:
    """Scales of adapters, by name."""
    return {name: scale for name, _, scale in chosen}
