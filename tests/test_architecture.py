"""Imports point downwards, and only the bottom sees C."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "pyllama_raw"

# Each part of the package and the parts it may import. A new part needs a line here.
CONNECTION = {"config", "core", "engine", "errors", "frozen", "sampling"}
API = {
    "api", "arguments", "blocking", "chat", "choice", "embedding", "events", "facts", "generation", "health", "loading", "many", "markers", "messages",
    "model", "models", "options", "preparation", "profile", "prompt", "rendering", "replacing", "results", "sync",
    "media_prompt", "ranking", "text_verbs", "vector_verbs", "workers",
}  # fmt: skip
RULE: dict[str, set[str]] = {
    "errors": set(),
    "fetch": set(),
    "core": {"errors"},
    "_ffi": {"errors"},
    "kinds": set(),
    "media": {"errors"},
    "native": {"_ffi", "errors", "kinds"},
    "cpus": set(),
    "described": set(),
    "frozen": {"described", "errors", "options"},
    "policy": {"core", "errors"},
    "config": {"cpus", "errors", "frozen", "kinds", "policy"},
    "sampling": {"config", "errors", "frozen"},
    "engine": {"config", "core", "errors", "media", "native", "policy", "sampling"},
    "models": {"config", "errors", "fetch"},
    "profile": {"config", "errors", "frozen", "replacing"},
    "replacing": {"errors"},
    "rendering": {"errors"},
    "messages": {"errors", "rendering"},
    "chat": {"errors", "messages", "rendering"},
    "markers": {"errors"},
    "options": set(),
    "results": {"core", "errors"},
    "media_prompt": {"core", "engine", "media", "messages"},
    "prompt": CONNECTION | {"chat", "markers", "media", "media_prompt", "messages"},
    "choice": {"core", "errors", "results"},
    "embedding": CONNECTION | {"arguments", "prompt", "workers"},
    "ranking": {"arguments", "embedding", "engine", "errors"},
    "generation": CONNECTION | {"choice", "results"},
    "events": {"core", "engine", "results"},
    "health": {"engine", "results"},
    "metrics": {"core", "engine", "facts", "health", "results"},
    "otel": {"core", "engine", "facts", "results"},
    "facts": {"engine", "errors", "health", "replacing", "results"},
    "loading": set(),
    "model": CONNECTION | {"arguments", "loading", "models"},
    "arguments": {"config", "errors", "frozen", "options", "sampling"},
    "many": {"errors", "prompt", "results"},
    "workers": set(),
    "preparation": CONNECTION
    | {"arguments", "chat", "generation", "media_prompt", "messages", "options"}
    | {"prompt", "workers"},
    "text_verbs": {
        "arguments",
        "core",
        "engine",
        "errors",
        "facts",
        "generation",
        "many",
    }
    | {"messages", "options", "preparation", "prompt", "results", "sampling"},
    "vector_verbs": {"embedding", "engine", "facts", "options", "ranking"},
    "api": CONNECTION | (API - {"api", "blocking", "choice", "profile", "sync"}),
    "blocking": CONNECTION
    | {"events"}
    | {"api", "facts", "generation", "loading", "model", "options", "prompt"}
    | {"results"},
    "sync": {"arguments", "blocking", "config", "errors"}
    | {"messages", "prompt", "results", "sampling"},
    "testing": CONNECTION | {"api"},
    "__init__": CONNECTION | API | {"media"},
    "sim": {"bench", "core", "engine", "errors", "policy"},
    "plot": {"bench", "core", "engine", "errors", "replacing", "sim"},
    "tune": {"api", "bench", "config", "cpus", "errors", "native", "profile"}
    | {"sampling"},
    "bench": {"__init__", "api", "config", "errors", "native", "results"}
    | {"sampling"},
    "cli": CONNECTION
    | API
    | {"__init__", "bench", "described", "media", "native", "plot", "policy", "sim"}
    | {"tune"},
    "__main__": {"cli"},
}

# Modules from outside that would let a part do what is not its business.
CLOCK_THREAD_FILE = {"asyncio", "io", "os", "pathlib", "socket", "threading", "time"}
FORBIDDEN: dict[str, set[str]] = {
    "core": CLOCK_THREAD_FILE | {"anyio", "cffi", "ctypes", "numpy", "random", "trio"},
    "native": {"anyio", "asyncio", "cffi", "ctypes", "trio"},
    "fetch": {"anyio", "cffi", "numpy", "pydantic", "tqdm"},
}


def part_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def absolute(node: ast.ImportFrom) -> str:
    assert node.level == 0, "imports are absolute"
    assert node.module is not None
    return node.module


def imported_names(path: Path) -> Iterator[str]:
    """Dotted names of what *path* imports, at its top or inside a function."""
    for node in ast.walk(ast.parse(path.read_text())):
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
            parts.add(first if first in RULE else "__init__")
    return parts - {part_of(path)}


FILES = sorted(PACKAGE.rglob("*.py"))
IDS = [str(path.relative_to(PACKAGE)) for path in FILES]


def test_every_part_has_a_rule():
    """
    A new file or folder is placed before it is used, and no rule outlives its part.
    """
    assert {part_of(path) for path in FILES} == set(RULE)


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_imports_point_downwards(path: Path):
    """
    A file imports only what its part may see: core and native never meet.
    """
    allowed = RULE[part_of(path)]

    assert imported_parts(path) <= allowed


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_parts_keep_to_their_business(path: Path):
    """
    Core has no clock, thread, file or C; native has no event loop.
    """
    roots = {name.split(".")[0] for name in imported_names(path)}

    assert not roots & FORBIDDEN.get(part_of(path), set())


@pytest.mark.parametrize("path", FILES, ids=IDS)
def test_only_the_boundary_imports_cffi(path: Path):
    """
    Nothing but _ffi imports cffi or another way into C.
    """
    roots = {name.split(".")[0] for name in imported_names(path)}

    assert part_of(path) == "_ffi" or not roots & {"cffi", "ctypes"}


def test_rule_has_no_cycle():
    """
    The parts can be put in an order in which each imports only earlier ones.
    """
    left = dict(RULE)
    while ready := {part for part, below in left.items() if not below & set(left)}:
        for part in ready:
            del left[part]

    assert left == {}


# Folders of the C++ shim and those whose headers they may include.
CPP_RULE = {
    "boundary": set(),
    "media": {"boundary", "step"},
    "memory": set(),
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
