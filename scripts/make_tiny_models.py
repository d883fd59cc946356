"""
Make the tiny random models of the native tests, their projectors and adapters.

    python -m scripts.make_tiny_models DIRECTORY [NAME ...]

Needs the built extension and nothing else: no download, no converter. The same files come
out every time. Without names, all of them are made.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from scripts.tiny_models import adapters, projectors
from scripts.tiny_models.adapters import ADAPTERS
from scripts.tiny_models.projectors import LLAMA_WORDS, PROJECTORS
from scripts.tiny_models.recipes import RECIPES

MODELS = {**RECIPES, LLAMA_WORDS.name: LLAMA_WORDS}


def main() -> None:
    parser = argparse.ArgumentParser(description="Make tiny random GGUF models.")
    parser.add_argument("directory", type=Path)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(MODELS))
    options = parser.parse_args()
    if unknown := set(options.names) - set(MODELS):
        parser.error(f"no such model: {', '.join(sorted(unknown))}")
    make(options.directory, options.names or list(MODELS))
    if not options.names:
        for name, projector in PROJECTORS.items():
            projectors.write(projector, options.directory / f"{name}-projector.gguf")
        for name, adapter in ADAPTERS.items():
            model = options.directory / f"{adapter.model}.gguf"
            adapters.write(adapter, model, options.directory / f"{name}.gguf")


def make(directory: Path, names: list[str]) -> None:
    """Write NAME.gguf for each name."""
    from scripts.tiny_models import gguf

    directory.mkdir(parents=True, exist_ok=True)
    for name in names:
        start = time.perf_counter()
        path = directory / f"{name}.gguf"
        gguf.write(MODELS[name], path)
        seconds = time.perf_counter() - start
        print(f"{name:16} {path.stat().st_size:9,} bytes {seconds:6.2f} s")


if __name__ == "__main__":
    main()
