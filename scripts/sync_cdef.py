"""
Compare the C names we use with the headers of a llama.cpp, or write them anew.

    python -m scripts.sync_cdef                      the headers of the built extension
    python -m scripts.sync_cdef --include DIR ...    other headers: before raising the pin
    python -m scripts.sync_cdef --write              writes used.h as these headers have it
    python -m scripts.sync_cdef --write-stub         scripts/bootstrap does it
    python -m scripts.sync_cdef --update OLD NEW     all that differs between two sources

Exits with 1 if a name is missing there, deprecated, changed, or not in used.h.

OLD and NEW are folders of sources, or names of the window (`python -m scripts.llama_source`). The
report begins with what we use: functions, fields, values of enums, numbers, defaults that change,
and what C++ of ours takes that no header of C has. What a number or a default means changes in
silence, because nothing refuses it.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

import build_lib
from scripts import llama_source
from scripts.c_declarations import (
    COMMENT,
    Declarations,
    canonical,
    needed,
    plain,
    render,
)
from scripts.c_fit import WITHOUT, find, misfits
from scripts.c_stub import stub

PACKAGE = build_lib.ROOT / "pyllama_raw"
STUB = build_lib.FFI_DIR / "_llama.pyi"
INCLUDES = ("include", "ggml/include", "tools/mtmd")
# Functions that C++ of ours calls, whose declarations are of C++ or in headers of libllama's own.
CPP = {
    "llama_get_embeddings_nextn": "src/llama-ext.h",
    "llama_get_embeddings_nextn_ith": "src/llama-ext.h",
    "llama_get_memory_breakdown": "src/llama-ext.h",
    "llama_graph_reserve": "src/llama-ext.h",
    "llama_set_embeddings_nextn": "src/llama-ext.h",
    "mtmd_get_memory_usage": "tools/mtmd/mtmd.h",
    "struct llama_memory_breakdown_data": "src/llama-ext.h",
}
PREPROCESSOR = re.compile(r"^ *#.*$", re.MULTILINE)
DEFINE = re.compile(r"^ *# *define (\w+) +(\S.*?) *$", re.MULTILINE)
ENUM = re.compile(r"enum (\w+) *\{(.*?)\}", re.DOTALL)
DEFAULTS = re.compile(
    r"^[\w ]+ (\w+_default\w*)\(\w*\) \{\n(.*?)^\}", re.MULTILINE | re.DOTALL
)
FIELD = re.compile(r"/\* *\.?(\w+) *=? *\*/ *(.*?),?$", re.MULTILINE)
HEAD = "/* What we use of llama.cpp. Written by `python -m scripts.sync_cdef --write`. */\n"


def built_include() -> Path | None:
    """
    Where the headers that the extension was built from are; None if none was built.

    Raises:
        BuildError: a variable of the build has a wrong value.
    """
    if prefix := os.environ.get("PYLLAMA_RAW_PREFIX"):
        return build_lib.path_of("PYLLAMA_RAW_PREFIX", prefix) / "include"
    key = build_lib.build_key(build_lib.cpu_of_library())
    home = build_lib.fetch.cache_dir() / "lib" / key
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


def numbers(text: str) -> dict[str, str]:
    """What constants and values of enums are in the header *text*, as it writes them."""
    code = COMMENT.sub("", text)
    values = dict(DEFINE.findall(code))
    for _, body in ENUM.findall(code):
        base, n_behind = "0", 0
        for part in filter(None, map(str.strip, body.split(","))):
            name, is_set, value = map(str.strip, part.partition("="))
            base, n_behind = (value, 0) if is_set else (base, n_behind)
            is_number = base.isdecimal()
            values[name] = (
                str(int(base) + n_behind) if is_number else f"{base}+{n_behind}"
            )
            n_behind += 1
    return values


def defaults(tree: Path) -> dict[str, str]:
    """Values of fields that functions of the source *tree* return as defaults."""
    values = {}
    for folder in ("src", "tools/mtmd"):
        for path in sorted((tree / folder).glob("*.cpp")):
            for function, body in DEFAULTS.findall(path.read_text("utf-8", "replace")):
                for field, value in FIELD.findall(body):
                    values[f"{function}: {field}"] = value
    return values


def declarations_of_cpp(tree: Path) -> dict[str, str]:
    """What CPP names, as the source *tree* declares it."""
    texts = {}
    for name, file in CPP.items():
        path = tree / file
        text = COMMENT.sub("", path.read_text("utf-8")) if path.is_file() else ""
        text = PREPROCESSOR.sub("", text)
        # A function to its semicolon, a struct to its brace.
        pattern = rf"[^;{{}}]*\b{name}\b\s*(\([^;]*;|\{{[^}}]*\}})"
        if match := re.search(pattern, text):
            texts[name] = plain(canonical(match[0]))
    return texts


def differing(
    kind: str, old: dict[str, str], new: dict[str, str]
) -> list[tuple[str, str]]:
    """Name and line of each entry of *old* and *new* that differs."""
    lines = []
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            lines.append((name, f"removed: {kind} {name}"))
        elif name not in old:
            lines.append((name, f"added: {kind} {name} = {new[name]}"))
        elif old[name] != new[name]:
            line = f"changed: {kind} {name} was {old[name]}, is {new[name]}"
            lines.append((name, line))
    return lines


def update(old: Path, new: Path) -> tuple[list[str], list[str]]:
    """Lines about what differs between the sources *old* and *new*: what we use, and the rest."""
    old_folders, new_folders = (
        [tree / part for part in INCLUDES] for tree in (old, new)
    )
    ours = build_lib.read(build_lib.USED)
    older = build_lib.declared(build_lib.HEADERS, old_folders)
    newer = build_lib.declared(build_lib.HEADERS, new_folders)
    lines: list[tuple[str, str]] = []
    for kind, name in sorted(older.keys() | newer.keys()):
        before, now = older.get((kind, name)), newer.get((kind, name))
        # A deprecated function is one of another kind.
        if before is None:
            lines.append((name, f"added: {kind} {name}"))
        elif now is None:
            lines.append((name, f"removed: {kind} {name}"))
        elif kind in ("struct", "enum"):
            changed = f"changed: {kind} {name}"
            gone, fresh = (
                [p for p in a if p not in b] for a, b in ((before, now), (now, before))
            )
            lines += [(name, f"{changed} loses {plain(part)}") for part in gone]
            lines += [(name, f"{changed} gains {plain(part)}") for part in fresh]
        elif before != now:
            lines.append((name, f"changed: {kind} {name} was {plain(before[0])}"))
            lines.append((name, f"changed: {kind} {name} is {plain(now[0])}"))
    texts = [
        "\n".join(
            path.read_text("utf-8", "replace")
            for path in find(build_lib.HEADERS, folders).values()
        )
        for folders in (old_folders, new_folders)
    ]
    # What is added stands above already; a number that changes is said by nothing else.
    counts = [numbers(text) for text in texts]
    both = counts[0].keys() & counts[1].keys()
    lines += differing("number", *({name: n[name] for name in both} for n in counts))
    lines += differing("default", defaults(old), defaults(new))
    names = {name for _, name in ours} | {v for parts in ours.values() for v in parts}
    of_cpp = differing("C++", declarations_of_cpp(old), declarations_of_cpp(new))
    used_lines = [line for _, line in of_cpp]
    used_lines += [line for name, line in lines if name.partition(":")[0] in names]
    return used_lines, [line for _, line in lines if line not in used_lines]


def source(name: str) -> Path:
    """
    The folder of a source that *name* names, or that the window has under it.

    Raises:
        BuildError: there is no such folder, of which all would be said to differ, or nothing.
        FetchFailed: the archive of the window cannot be had.
    """
    if name in llama_source.WINDOW:
        return llama_source.tree(name)
    if not (Path(name) / "include" / "llama.h").is_file():
        raise build_lib.BuildError(
            f"{name} is no llama.cpp source tree, because it has no include/llama.h, and no "
            f"name of the window, which are {', '.join(llama_source.WINDOW)}"
        )
    return Path(name)


def main(argv: list[str] | None = None) -> int:
    """Run the command line *argv*; the exit code."""
    parser = argparse.ArgumentParser(description="Compare used.h with the C headers.")
    parser.add_argument("--include", nargs="+", type=Path, default=[])
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--write-stub", action="store_true")
    parser.add_argument("--update", nargs=2, metavar=("OLD", "NEW"))
    args = parser.parse_args(argv)
    folders = args.include
    try:
        trees = [source(name) for name in args.update or ()]
        if not trees and not folders:
            folders = [path for path in [built_include()] if path]
    except (build_lib.BuildError, OSError) as error:
        parser.error(str(error))
    if trees:
        ours, unused = update(*trees)
        print("What we use:", *(ours or ["nothing differs"]), sep="\n  ")
        print("All else:", *(unused or ["nothing differs"]), sep="\n  ")
        return 0
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
    lines = [
        f"{line} ({WITHOUT[line]})" if line in WITHOUT else line
        for line in differences(ours, declarations)
    ]
    lines += [
        f"not in used.h: {' '.join(key)} (python -m scripts.sync_cdef --write)"
        for key in used(declarations)
        if key not in ours
    ]
    print("\n".join(lines) or "the headers have what we use")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
