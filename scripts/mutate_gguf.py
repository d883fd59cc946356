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

import copy
import random

from scripts.mutations.command import Files, search
from scripts.mutations.gguf_file import File, read
from scripts.mutations.mutations import mutate
from tests.support.tiny import RECIPES, tiny_model


def files(seed: int, first: int, count: int) -> Files:
    """Number, content and faults of *count* files."""
    names = [name for name, recipe in RECIPES.items() if recipe.generates] + ["t5"]
    originals: dict[str, File] = {}
    for index in range(first, first + count):
        rng = random.Random(f"{seed}/{index}")  # noqa: S311 -- repeats
        name = rng.choice(names)
        if name not in originals:
            originals[name] = read(tiny_model(name))
        content, changes = mutate(rng, copy.deepcopy(originals[name]))
        yield index, content, f"{name}: {changes}"


if __name__ == "__main__":
    search(__doc__, files)
