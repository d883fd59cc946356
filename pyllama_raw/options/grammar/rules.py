"""A grammar as it is written: rules of items. *depth* says how many are in each other."""

from __future__ import annotations

from dataclasses import dataclass

Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Literal:
    """These characters, one after the other."""

    text: str
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of these ranges, both ends included, or of none of them."""

    ranges: Ranges
    negated: bool = False
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Token:
    """A token by its id or its name, or any other one."""

    token: int | str
    negated: bool
    position: int
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to a rule."""

    name: str
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Group:
    """One of several sequences."""

    alternatives: list[list[Item]]
    depth: int


@dataclass(frozen=True, slots=True)
class Repeat:
    """An item *least* to *most* times; None: any number."""

    item: Item
    least: int
    most: int | None
    depth: int


Item = Literal | Chars | Token | Ref | Group | Repeat


@dataclass(frozen=True, slots=True)
class Rules:
    """A grammar as it is written; of two rules with one name the later counts."""

    bodies: dict[str, Group]
    root: str
