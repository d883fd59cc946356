"""
Try an engine on model files with faults in them.

    python -m scripts.mutate_gguf --seed 0 --count 5000
    python -m scripts.mutate_gguf --seed 0 --only 17 --keep fault.gguf

Each file is a tiny model with one or two random faults, opened and run in a process of its
own. It must work or be refused by an error of pyllama_raw: a signal, a hang or another
exception is a defect, and makes the exit status 1. File number i of a seed is always the
same, whatever the count.
"""

from __future__ import annotations

import argparse
import copy
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from scripts.mutations.gguf_file import File, read
from scripts.mutations.mutations import mutate
from scripts.mutations.trial import DEFECT, run_all
from tests.tiny import RECIPES, tiny_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
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
    made = list(files(options.seed, first, 1)) if options.keep else []
    if made:
        options.keep.write_bytes(made[0][1])
    counts: Counter[str] = Counter()
    wanted = files(options.seed, first, count)
    for outcome in run_all(wanted, options.workers):
        counts[outcome.kind] += 1
        if outcome.kind == DEFECT or options.verbose or options.only is not None:
            print(
                f"{outcome.index} {outcome.kind}: {outcome.text}\n    {outcome.said}",
                flush=True,
            )
    print(", ".join(f"{kind} {n}" for kind, n in sorted(counts.items())))
    raise SystemExit(int(counts[DEFECT] > 0))


def files(seed: int, first: int, count: int) -> Iterator[tuple[int, bytes, str]]:
    """Number, content and faults of *count* files."""
    names = [name for name, recipe in RECIPES.items() if recipe.generates]
    originals: dict[str, File] = {}
    for index in range(first, first + count):
        rng = random.Random(f"{seed}/{index}")  # noqa: S311 -- repeats
        name = rng.choice(names)
        if name not in originals:
            originals[name] = read(tiny_model(name))
        content, said = mutate(rng, copy.deepcopy(originals[name]))
        yield index, content, f"{name}: {said}"


if __name__ == "__main__":
    main()
