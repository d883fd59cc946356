"""
Whether the headers of a llama.cpp fit the names that we use, told before anything is built.

Only what the compiler would refuse counts: names that a header adds do no harm.
`build_lib.py` loads this file by path: standard library only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from scripts.c_declarations import Declarations

MAX_SHOWN = 20  # lines about another version; more say nothing new


def find(names: Iterable[str], folders: Sequence[Path]) -> dict[str, Path]:
    """Each header of *names* in the first of *folders* that has it."""
    places = {name: [folder / name for folder in folders] for name in names}
    files = {name: [p for p in paths if p.is_file()] for name, paths in places.items()}
    return {name: paths[0] for name, paths in files.items() if paths}


def shown(lines: Sequence[str]) -> str:
    """The first of *lines*, and how many more there are."""
    n_more = len(lines) - MAX_SHOWN
    tail = [f"and {n_more} more"] if n_more > 0 else []
    return "".join(f"  {line}\n" for line in [*lines[:MAX_SHOWN], *tail])


def misfits(ours: Declarations, theirs: Declarations) -> list[str]:
    """One line for each name of *ours* that *theirs* lacks or declares otherwise, sorted."""
    lines = []
    for (kind, name), parts in ours.items():
        their_parts = theirs.get((kind, name), theirs.get(("deprecated", name)))
        if their_parts is None:
            lines.append(f"missing: {kind} {name}")
        elif lost := [part for part in parts if part not in their_parts]:
            has_parts = kind in ("struct", "enum")
            mistake = f" has no {', '.join(lost)}" if has_parts else ""
            lines.append(f"changed: {kind} {name}{mistake}")
    return sorted(lines)
