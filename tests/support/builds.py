"""Libraries and sources of llama.cpp, as far as names go."""

import re
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

import build_lib

SUFFIX = "dylib" if sys.platform == "darwin" else "so"


def make_prefix(folder: Path) -> Path:
    """An installed llama.cpp, as far as names go."""
    (folder / "include").mkdir(parents=True)
    (folder / "lib").mkdir()
    write_headers(folder / "include", build_lib.HEADERS)
    for name in build_lib.LIBRARIES:
        (folder / "lib" / f"lib{name}.{SUFFIX}").touch()
    return folder


def make_built(home: Path) -> Path:
    """A library of the cache, as far as names go."""
    make_prefix(home)
    (home / "done").touch()
    return home


def write_headers(folder: Path, names: Iterable[str]) -> None:
    """Headers that declare what we use: all of it in llama.h."""
    for name in names:
        (folder / name).touch()
    if (folder / "llama.h").exists():
        text = build_lib.USED.read_text()
        (folder / "llama.h").write_text(re.sub(r"(#define \w+) \.\.\.", r"\1 1", text))


def make_source_that_fits(folder: Path) -> Path:
    """A llama.cpp source tree with headers only."""
    places = {"l": "include", "g": "ggml/include", "m": "tools/mtmd"}
    for name in build_lib.HEADERS:
        place = folder / places[name[0]]
        place.mkdir(parents=True, exist_ok=True)
        write_headers(place, [name])
    return folder


def forbidden(*_: object, **__: object) -> None:
    """In the place of what takes minutes."""
    pytest.fail("this must not be reached")


def make_source(folder: Path) -> Path:
    """A llama.cpp source tree, as far as names go."""
    (folder / "include").mkdir(parents=True)
    (folder / "include" / "llama.h").write_text("// one")
    return folder
