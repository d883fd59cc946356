"""The command line of a search for files that end a process."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from scripts.mutations.trial import DEFECT, run_all

Files = Iterator[tuple[int, bytes, str]]  # number, content and faults


def search(
    doc: str,
    make: Callable[[int, int, int], Files],
    attempt: Callable[[Path], str] | None = None,
) -> None:
    """
    Try files, print what went wrong, and end with status 1 if something did.

    Args:
        doc: of the script.
        make: the files of a seed, from the first number on, so many.
        attempt: as run_all() wants it.
    """
    parser = argparse.ArgumentParser(description=doc.partition("\n\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--first", type=int, default=0, help="number of the first file")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", type=int, help="one file, by its number")
    parser.add_argument("--keep", type=Path, help="write that file here, too")
    parser.add_argument("--verbose", action="store_true", help="print every outcome")
    options = parser.parse_args()
    first, count = options.first, options.count
    if options.only is not None:
        first, count = options.only, 1
    if options.keep:
        _, content, _ = next(make(options.seed, first, 1))
        options.keep.write_bytes(content)
    counts: Counter[str] = Counter()
    shows_all = options.verbose or options.only is not None
    for outcome in run_all(
        make(options.seed, first, count), options.workers, attempt=attempt
    ):
        counts[outcome.kind] += 1
        if outcome.kind == DEFECT or shows_all:
            print(
                f"{outcome.index} {outcome.kind}: {outcome.text}\n    {outcome.said}",
                flush=True,
            )
    print(", ".join(f"{kind} {n}" for kind, n in sorted(counts.items())))
    raise SystemExit(int(counts[DEFECT] > 0))
