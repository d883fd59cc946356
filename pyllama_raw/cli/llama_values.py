"""
Meanings of llama-server's flags here, and readers of their values.

A reader raises ValueError for a value that llama-server refuses, too, and NotDone for one that it
would take and that is not done here. This file imports little, as llama_flags.py does.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Value = str | bool
Read = Callable[[Any], Any]
MIB = 2**20
FOREVER_S = 10.0**9

TRUE = {"on", "enabled", "true", "1"}
FALSE = {"off", "disabled", "false", "0"}


class NotDone(ValueError):
    """A value that is not done here; the text says what to give instead."""


# -- meanings ----------------------------------------------------------------------------


class Sets(NamedTuple):
    """An option of ours by its place, such as "context.n_ctx"."""

    place: str
    read: Read = str  # a value of None sets nothing
    adds: bool = False  # to a list, each time that the flag is given
    says: str = ""


class IdleFlag(NamedTuple):
    """Changes nothing here but perhaps speed."""

    reason: str


class OnlyWith(NamedTuple):
    """Idle with these values, and refused with others."""

    values: tuple[Value, ...]
    advice: str


class StandsFor(NamedTuple):
    """Other arguments."""

    arguments: tuple[str, ...]


class RefusedFlag(NamedTuple):
    """Changes outputs, and is not done here."""

    advice: str


Meaning = Sets | IdleFlag | OnlyWith | StandsFor | RefusedFlag


class Flag(NamedTuple):
    """An argument of llama-server."""

    names: tuple[str, ...]
    negated: tuple[str, ...]
    n_values: int
    variable: str
    meaning: Meaning


# -- readers of values -------------------------------------------------------------------


def as_is(value: Value) -> Value:
    """The value of a flag without one: whether it is given in its positive form."""
    return value


def mapping(is_mapped: Value) -> str:
    """The load mode of older flags."""
    return "mmap" if is_mapped else "none"


def locking(_: Value) -> str:
    """The load mode of an older flag."""
    return "mmap_mlock"


def switch(text: str) -> bool:
    """A word for yes or no. Raises ValueError for others."""
    if text not in TRUE | FALSE:
        raise ValueError(f"give on or off, not {text!r}")
    return text in TRUE


def words(**values: Any) -> Read:
    """A reader of these words alone."""

    def read(text: str) -> Any:
        name = text.replace("+", "_").replace("-", "_")
        if name not in values:
            raise ValueError(f"give one of {', '.join(values)}, not {text!r}")
        return values[name]

    return read


def positive(text: str) -> int | None:
    """A number; None if it stands for a default, as 0 and below do."""
    number = int(text)
    return number if number > 0 else None


def listed(text: str) -> list[str]:
    """Texts between commas; a quoted one may have commas, and two quotes for one."""
    parts = re.findall(r'(?:^|,)(?:"((?:[^"]|"")*)"|([^,]*))', text)
    return [(quoted.replace('""', '"') or plain).strip() for quoted, plain in parts]


def named(text: str) -> list[str]:
    """The texts between commas that are not empty."""
    return [part for part in listed(text) if part]


def key_lines(path: str) -> list[str]:
    """The keys in a file, one a line. Raises OSError."""
    lines = map(str.strip, file_text(path).splitlines())
    return [line for line in lines if line and line[0] != "#"]


def file_text(path: str) -> str:
    """The text of a file. Raises OSError."""
    return Path(path).read_text("utf-8")


def json_object(text: str) -> dict[str, Any]:
    """An object of JSON. Raises ValueError."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    if not isinstance(value, dict):
        raise ValueError("give an object of JSON")  # noqa: TRY004 - a mistake in a text
    return value


def layers(text: str) -> int:
    """Layers on devices; words and numbers below 0 are all that fit."""
    return -1 if text in ("auto", "all") else max(int(text), -1)


def shares(text: str) -> list[float]:
    """Shares of devices."""
    return [float(part) for part in re.split(r"[,/]+", text)]


def overrides(text: str) -> dict[str, Any]:
    """KEY=TYPE:VALUE pairs between commas. Raises ValueError."""
    kinds: dict[str, Read] = {"int": int, "float": float, "bool": switch, "str": str}
    values = {}
    for part in named(text):
        match = re.fullmatch(r"([^=]+)=(int|float|bool|str):(.*)", part)
        if match is None:
            raise ValueError(f"give KEY=TYPE:VALUE, not {part!r}")
        values[match[1]] = kinds[match[2]](match[3])
    return values


def scaled(text: str) -> list[tuple[str, float]]:
    """FILE:SCALE pairs between commas. Raises ValueError."""
    pairs = [part.rpartition(":") for part in named(text)]
    return [(file, float(scale)) for file, _, scale in pairs]


def whole(text: str) -> list[tuple[str, float]]:
    """Files between commas, each with the scale 1."""
    return [(file, 1.0) for file in named(text)]


def bias(text: str) -> dict[int, float]:
    """TOKEN_ID+BIAS or TOKEN_ID-BIAS. Raises ValueError."""
    match = re.fullmatch(r"(\d+)([+-].+)", text)
    if match is None:
        raise ValueError(f"give TOKEN_ID+BIAS or TOKEN_ID-BIAS, not {text!r}")
    return {int(match[1]): float(match[2])}


STAGES = {"typ_p": "typical", "dynatemp": "temperature", "temp": "temperature"}
LETTERS = {
    "d": "dry", "k": "top_k", "y": "typical", "p": "top_p", "s": "top_n_sigma",
    "m": "min_p", "t": "temperature", "x": "xtc", "i": "infill", "e": "penalties",
}  # fmt: skip


def stages(text: str) -> list[str]:
    """Names of samplers between semicolons."""
    return [
        STAGES.get(name, name).replace("-", "_") for name in text.split(";") if name
    ]


def stages_of_letters(text: str) -> list[str]:
    """Samplers by llama.cpp's letters; others are passed over, as there."""
    return [LETTERS[letter] for letter in text if letter in LETTERS]


def breakers(text: str) -> list[str]:
    """A text that ends a run for DRY; none: no text does."""
    return [] if text == "none" else [text]


def none_if(*idle: float) -> Read:
    """A reader of a number that sets nothing if it is one of *idle*."""

    def read(text: str) -> float | None:
        return None if float(text) in idle else float(text)

    return read


def history(text: str) -> int | None:
    """Tokens that penalties look back; -1, all of them, is the default of others here."""
    return 2**20 if int(text) < 0 else int(text)


def seed(text: str) -> int | None:
    seed = int(text) % 2**32
    return None if seed == 2**32 - 1 else seed


def pooling(text: str) -> str | None:
    poolings = {name: name for name in ("none", "mean", "cls", "last")}
    return None if text == "rank" else words(**poolings)(text)


KINDS_OF_DRAFTS = (
    *("none", "draft-simple", "draft-eagle3", "draft-mtp", "draft-dflash"),
    *("draft-dspark", "ngram-simple", "ngram-map-k", "ngram-map-k4v", "ngram-mod"),
    "ngram-cache",
)


def drafts(text: str) -> str | None:
    """off for none, mtp for heads; what kinds there are otherwise follows from measured times."""
    kinds = [kind.strip() for kind in text.split(",")]
    if unknown := [kind for kind in kinds if kind not in KINDS_OF_DRAFTS]:
        raise ValueError(
            f"give some of {', '.join(KINDS_OF_DRAFTS)}, not {unknown[0]!r}"
        )
    if "none" in kinds:
        return "off"
    return "mtp" if "draft-mtp" in kinds else None


def cache_bytes(text: str) -> int:
    return 2**50 if int(text) < 0 else int(text) * MIB


def margin(text: str) -> int:
    sizes = named(text)
    if not sizes:
        raise ValueError("give MiB")
    return int(sizes[0]) * MIB


def seconds(text: str) -> float:
    return float(text) if float(text) > 0 else FOREVER_S


def idle_seconds(text: str) -> float | None:
    return float(text) if float(text) > 0 else None


def keep(text: str) -> int:
    if int(text) < 0:
        raise NotDone("give the tokens at the beginning of a prompt that a shift keeps")
    return int(text)


def reasoning_format(text: str) -> str | None:
    if text == "deepseek-legacy":
        raise NotDone("give deepseek or none: thoughts stand in one place only")
    formats: dict[str, str | None] = {
        "auto": None,
        "deepseek": "deepseek",
        "none": "none",
    }
    if text not in formats:
        raise ValueError(f"give one of {', '.join(formats)}, not {text!r}")
    return formats[text]


def thinks(text: str) -> bool | None:
    return None if text in ("auto", "-1") else switch(text)


def effort(text: str) -> str | None:
    return None if text == "default" else text


def norm(text: str) -> None:
    if int(text) != 2:
        raise NotDone("give embd_normalize in the body of a request")
