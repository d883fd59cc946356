"""Imports point downwards, and only the bottom sees C."""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.support.trees import nodes, trees  # noqa: F401

PACKAGE = Path(__file__).resolve().parents[1] / "pyllama_raw"

# A part of the package imports only from floors below its own.
FLOORS = """
    __main__
    lab
    cli
    testing
    replicas
    serve
    runners
    __init__
    results     tools
    api
    prompts
    engine
    options
    policy
    core      native    media    replies  routing
    _ffi
    errors
"""
CORE_FLOORS = """
    scheduling
    policy_runner
    memory
"""
# These see less than all that is below.
ONLY: dict[str, set[str]] = {
    "core": {"errors"},
    "media": {"errors"},
    "replies": {"errors"},
    "routing": set(),
}
INSIDE = {"core", "engine", "native", "_ffi", "prompts", "media"}
NEVER: dict[str, set[str]] = {
    "api": {"native", "_ffi"},
    "prompts": {"native", "_ffi"},
    "replicas": INSIDE,
    "serve": INSIDE,  # it has the public API, as a program of a user
    "runners": INSIDE - {"core"},  # as serve; core has words of results
}

# Modules that call C. The allocator of C is told to give memory back (options/machine.py).
C_MODULES = {"cffi", "ctypes"}
MAY_CALL_C = {"_ffi": C_MODULES, "options": {"ctypes"}}

# Modules from outside that would let a part do what is not its business.
CLOCK_THREAD_FILE = {"asyncio", "io", "os", "pathlib", "socket", "threading", "time"}
FORBIDDEN: dict[str, set[str]] = {
    "core": CLOCK_THREAD_FILE | {"anyio", "cffi", "ctypes", "numpy", "random", "trio"},
    "native": {"anyio", "asyncio", "cffi", "ctypes", "trio"},
    "routing": CLOCK_THREAD_FILE | {"anyio", "random", "trio"},
}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def absolute(node: ast.ImportFrom) -> str:
    assert node.level == 0, "imports are absolute"
    assert node.module is not None
    return node.module


@cache
def imported_names(path: Path) -> tuple[str, ...]:
    """Dotted names of what *path* imports, at its top or inside a function."""
    return tuple(_imported_names(path))


def _imported_names(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{absolute(node)}.{alias.name}" for alias in node.names)


def imported_parts(path: Path) -> set[str]:
    """Parts of the package that *path* imports, without its own."""
    parts = set()
    for name in imported_names(path):
        package, _, rest = name.partition(".")
        if package == "pyllama_raw":
            first = rest.split(".")[0]
            parts.add(first if first in FLOOR else "__init__")
    return parts - {part_of(path)}


def floors(drawing: str) -> dict[str, int]:
    """The floor of each part, counted from the top."""
    rows = enumerate(drawing.split("\n"))
    return {part: floor for floor, row in rows for part in row.split()}


FLOOR = floors(FLOORS)
FILES = sorted(PACKAGE.rglob("*.py"))


def test_every_part_has_a_floor():
    """
    A new file or folder is placed before it is used, and no floor outlives its part.
    """
    assert {part_of(path) for path in FILES} == set(FLOOR)


def test_imports_point_downwards():
    """
    A file imports only from floors below: core and native never meet.
    """
    wrong = [
        f"{path.relative_to(PACKAGE)} -> {part}"
        for path in FILES
        for part in imported_parts(path)
        if FLOOR[part] <= FLOOR[part_of(path)]
        or part not in ONLY.get(part_of(path), {part})
        or part in NEVER.get(part_of(path), ())
    ]

    assert wrong == []


def test_folders_of_core_import_downwards():
    """
    The files beside the folders are below all of them.
    """
    core, floor = PACKAGE / "core", floors(CORE_FLOORS)
    lowest = len(CORE_FLOORS)

    wrong = [
        f"{path.relative_to(core)} -> {name}"
        for path in core.rglob("*.py")
        for name in imported_names(path)
        if name.startswith("pyllama_raw.core.")
        and floor.get(name.split(".")[2], lowest)
        < floor.get(path.relative_to(core).parts[0].removesuffix(".py"), lowest)
    ]

    assert wrong == []


@pytest.mark.parametrize("part", sorted({part_of(path) for path in FILES}))
def test_parts_keep_to_their_business(part: str):
    """
    Core has no clock, thread, file or C; native has no event loop; cffi is _ffi's.
    """
    paths = [path for path in FILES if part_of(path) == part]
    roots = {name.split(".")[0] for path in paths for name in imported_names(path)}
    forbidden = FORBIDDEN.get(part, set()) | C_MODULES - MAY_CALL_C.get(part, set())

    assert not roots & forbidden


def test_fetching_needs_nothing_installed():
    """
    The build fetches before any package is there.
    """
    roots = {
        name.split(".")[0] for name in imported_names(PACKAGE / "options" / "fetch.py")
    }

    assert roots <= sys.stdlib_module_names


# Folders of the C++ shim and those whose headers they may include.
CPP_RULE = {
    "boundary": set(),
    "media": {"boundary", "step"},
    "memory": {"boundary"},
    "grammar": {"boundary"},
    "kernels": {"boundary"},
    "step": {"boundary", "grammar", "kernels"},
}
CPP = {
    folder: "".join(p.read_text() for p in (PACKAGE / "_ffi" / folder).iterdir())
    for folder in CPP_RULE
}
KERNEL_CALL = re.compile(r"\bplr_(?:kernels|cells)_\w+")


@pytest.mark.parametrize("folder", CPP_RULE)
def test_includes_point_downwards(folder: str):
    """
    A folder of the shim includes only headers of those below it, and every folder has a rule.
    """
    included = set(re.findall(r'#include "(\w+)/', CPP[folder]))

    assert included <= CPP_RULE[folder]
    others = {p.parent.name for p in (PACKAGE / "_ffi").glob("*/*.h")}
    assert others <= set(CPP_RULE)


def test_kernels_are_a_plug_in():
    """
    Other C++ includes one header of theirs and makes one call; one Python module knows them.
    """
    rest = "".join(text for folder, text in CPP.items() if folder != "kernels")
    callers = {path.name for path in FILES if KERNEL_CALL.search(path.read_text())}

    assert set(re.findall(r'#include "(kernels/.+)"', rest)) == {"kernels/kernels.h"}
    assert KERNEL_CALL.findall(rest) == ["plr_kernels_decode"]
    assert callers == {"kernels.py"}


def test_one_file_writes_how_much_is_computed():
    """
    A sequence begins with nothing; from then on the slots alone write n_computed.
    """
    written = re.compile(r"(\w+)\.n_computed\s*[-+]?=[^=]")
    writers = {
        path.name: set(written.findall(path.read_text()))
        for path in (PACKAGE / "core").rglob("*.py")
        if written.search(path.read_text())
    }

    assert writers == {"sequence.py": {"self"}, "slots.py": {"running"}}


PAGE = PACKAGE.parent / "ARCHITECTURE.md"
MOST_LINES = 5_627  # of the twelve chapters together: an afternoon


def test_the_way_through_is_twelve_chapters():
    """
    The page leads through files that are there, and that are read in an afternoon.
    """
    rows = re.findall(r"^\| (\d+) \| (.+?) \|", PAGE.read_text(), re.MULTILINE)
    chapters = [re.findall(r"`(\w[\w/]+\.py)`", text) for _, text in rows]
    files = [PACKAGE.parent / name for names in chapters for name in names]

    assert [int(number) for number, _ in rows] == list(range(1, 13))
    assert all(chapters)
    assert sum(len(file.read_text().splitlines()) for file in files) <= MOST_LINES


def test_the_page_names_every_folder():
    """
    Its table of folders has each folder of the package, and no other one.
    """
    named = re.findall(r"^\| `(\w+)/` \|", PAGE.read_text(), re.MULTILINE)
    folders = {path.parent.name for path in PACKAGE.glob("*/*.py")}

    assert {*named} == folders | {PACKAGE.name}


def test_paragraphs_of_the_page_are_short():
    """
    A thought has eight lines at most; drawings and tables are no thoughts.
    """
    text = re.sub(r"^```.*?^```", "", PAGE.read_text(), flags=re.MULTILINE | re.DOTALL)
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*- )|\n(?=\s*\|)", text)

    assert [p for p in paragraphs if len(p.strip().splitlines()) > 8] == []
