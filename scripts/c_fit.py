"""
Whether the headers of a llama.cpp fit our declarations, told before anything is built.

Only what the compiler would refuse counts: names that a header adds do no harm.
`build_lib.py` loads this file by path: standard library only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from scripts.c_declarations import Declarations

MAX_SHOWN = 20  # lines about another version; more say nothing new


def find(names: Iterable[str], folders: Sequence[Path]) -> dict[str, Path]:
    """Each header of *names* in the first of *folders* that has it."""
    places = {name: [folder / name for folder in folders] for name in names}
    found = {name: [p for p in paths if p.is_file()] for name, paths in places.items()}
    return {name: paths[0] for name, paths in found.items() if paths}


def shown(lines: Sequence[str]) -> str:
    """The first of *lines*, and how many more there are."""
    n_more = len(lines) - MAX_SHOWN
    more = [f"and {n_more} more"] if n_more > 0 else []
    return "".join(f"  {line}\n" for line in [*lines[:MAX_SHOWN], *more])


def misfits(ours: Declarations, theirs: Declarations) -> list[str]:
    """One line for each name of *ours* that *theirs* lacks or declares otherwise, sorted."""
    lines = [f"missing: constant {name}" for name in ours.constants - theirs.constants]
    for kind in ("functions", "typedefs"):
        lines += _texts(kind[:-1], getattr(ours, kind), getattr(theirs, kind), theirs)
    for kind in ("structs", "enums"):
        lines += _parts(kind[:-1], getattr(ours, kind), getattr(theirs, kind))
    return sorted(lines)


def _texts(
    kind: str, ours: Mapping[str, str], known: Mapping[str, str], theirs: Declarations
) -> Iterator[str]:
    for name, text in ours.items():
        if name not in known:
            if name not in theirs.deprecated:  # still there
                yield f"missing: {kind} {name}"
        elif known[name] != text:
            yield f"changed: {kind} {name}"


def _parts(
    kind: str, ours: Mapping[str, tuple[str, ...]], known: Mapping[str, tuple[str, ...]]
) -> Iterator[str]:
    for name, parts in ours.items():
        if name not in known:
            yield f"missing: {kind} {name}"
        elif lost := [part for part in parts if part not in known[name]]:
            yield f"changed: {kind} {name} has no {', '.join(lost)}"
