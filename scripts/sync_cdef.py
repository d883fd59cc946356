"""
Compare the C names we use with the headers of a llama.cpp, or write them anew.

    python -m scripts.sync_cdef                      the headers of the built extension
    python -m scripts.sync_cdef --include DIR ...    other headers: before raising the pin
    python -m scripts.sync_cdef --write              writes used.h as these headers have it
    python -m scripts.sync_cdef --write-stub         scripts/bootstrap does it

Exits with 1 if a name is missing there, deprecated, changed, or not in used.h.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

import build_lib
from scripts.c_declarations import Declarations, needed, render
from scripts.c_fit import find, misfits
from scripts.c_stub import stub

PACKAGE = build_lib.ROOT / "pyllama_raw"
STUB = build_lib.FFI_DIR / "_llama.pyi"
HEAD = "/* What we use of llama.cpp. Written by `python -m scripts.sync_cdef --write`. */\n"


def built_include() -> Path | None:
    """Where the headers that the extension was built from are; None if none was built."""
    if prefix := os.environ.get("PYLLAMA_RAW_PREFIX"):
        return Path(prefix).expanduser() / "include"
    home = build_lib.fetch.cache_dir() / "lib" / build_lib.build_key()
    return home / "include" if (home / "done").is_file() else None


def words() -> set[str]:
    """All words of the package, and the names of `lib` in tests and scripts."""
    names: set[str] = set()
    for path in PACKAGE.rglob("*.*"):
        if path.suffix in (".py", ".cpp", ".h") and path != build_lib.USED:
            names |= set(re.findall(r"\w+", path.read_text("utf-8")))
    for folder in ("tests", "scripts"):
        for path in (build_lib.ROOT / folder).rglob("*.py"):
            names |= set(re.findall(r"\blib\.(\w+)", path.read_text("utf-8")))
    return {word for word in names if re.match("(?i:llama|ggml|gguf|mtmd)_", word)}


def used(declarations: Declarations) -> Declarations:
    """What *declarations* has of the names that we use."""
    names = needed(words(), declarations)
    return {key: parts for key, parts in names.items() if key[0] != "deprecated"}


def differences(ours: Declarations, declarations: Declarations) -> list[str]:
    """One line for each name of *ours* that *declarations* lacks, deprecates or has changed."""
    deprecated = [
        f"deprecated: function {name}"
        for kind, name in declarations
        if kind == "deprecated" and ("function", name) in ours
    ]
    return sorted([*misfits(ours, declarations), *deprecated])


def main(argv: list[str] | None = None) -> int:
    """Run the command line *argv*; the exit code."""
    parser = argparse.ArgumentParser(description="Compare used.h with the C headers.")
    parser.add_argument("--include", nargs="+", type=Path, default=[])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--write-stub", action="store_true")
    args = parser.parse_args(argv)
    folders = args.include or [path for path in [built_include()] if path]
    if not folders:
        parser.error("nothing is built here: name the headers with --include")
    if lost := [n for n in build_lib.HEADERS if n not in find([n], folders)]:
        parser.error(f"{lost[0]} is in none of {', '.join(map(str, folders))}")
    if args.write_stub:
        visible = build_lib.seen_by_python(folders)
        STUB.write_text(stub(render(visible)), "utf-8")
        return 0
    declarations = build_lib.declared(build_lib.HEADERS, folders)
    if args.write:
        build_lib.USED.write_text(HEAD + render(used(declarations)), "utf-8")
    ours = build_lib.read(build_lib.USED)
    lines = differences(ours, declarations)
    lines += [
        f"not in used.h: {' '.join(key)} (python -m scripts.sync_cdef --write)"
        for key in used(declarations)
        if key not in ours
    ]
    print("\n".join(lines) or "the headers have what we use")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
