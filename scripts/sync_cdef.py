"""
Compare our C declarations with the headers of a llama.cpp, or write the type stub.

    python -m scripts.sync_cdef                      the headers of the built extension
    python -m scripts.sync_cdef --include DIR ...    other headers: before raising the pin
    python -m scripts.sync_cdef --write-stub         scripts/bootstrap does it

Exits with 1 if anything is missing, gone or changed. The whole of llama.h, mtmd.h,
mtmd-helper.h and gguf.h is declared, deprecated functions left out; of the other headers
only what is used is, and that is compared.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import build_lib
from pyllama_raw._ffi.cdef import DIRECTORY, FILES, SHIM
from scripts.c_declarations import KINDS, Declarations, merge, parse
from scripts.c_stub import stub

INCLUDE = DIRECTORY.parent / "lib" / "include"
STUB = DIRECTORY.parent / "_llama.pyi"

COMPLETE = ("llama.h", "mtmd.h", "mtmd-helper.h", "gguf.h")

PARTIAL = {
    "ggml.h": "graph building is not used: types, tensors, quantisation and logging are",
    "ggml-backend.h": "schedulers and graphs are not used: devices and the registry are",
    "ggml-cpu.h": "the CPU backend may be a plug-in that cannot be linked",
    "ggml-opt.h": "only what llama_opt_init and llama_opt_epoch name",
}

EXCLUDED = {
    "GGUF_MAGIC": "a string, and cffi constants are numbers",
    "GGUF_KEY_GENERAL_ALIGNMENT": "a string, and cffi constants are numbers",
}


def declared() -> Declarations:
    """What the cdef files declare, our own shim left out."""
    return merge(parse((DIRECTORY / name).read_text("utf-8")) for name in FILES)


def built_include() -> Path | None:
    """Where the headers that the extension was built from are; None if none was built."""
    if prefix := os.environ.get("PYLLAMA_RAW_PREFIX"):
        return Path(prefix).expanduser() / "include"
    home = build_lib.fetch.cache_dir() / "lib" / build_lib.build_key()
    return home / "include" if (home / "done").is_file() else None


def headers(folders: list[Path]) -> dict[str, Declarations]:
    """
    Read each header we know from the first of *folders* that has it.

    Raises:
        FileNotFoundError: none has it.
    """
    found = {}
    for name in (*COMPLETE, *PARTIAL):
        paths = [folder / name for folder in folders if (folder / name).is_file()]
        if not paths:
            raise FileNotFoundError(
                f"{name} is in none of {', '.join(map(str, folders))}"
            )
        found[name] = parse(paths[0].read_text("utf-8"))
    return found


def compare(ours: Declarations, theirs: Mapping[str, Declarations]) -> list[str]:
    """One line for each difference between the cdefs and the headers, sorted."""
    union = merge(iter(theirs.values()))
    complete = merge(theirs[name] for name in COMPLETE if name in theirs)
    lines: list[str] = []
    for kind in (*KINDS, "constants"):
        mine, wanted, known = (getattr(d, kind) for d in (ours, complete, union))
        one = kind.removesuffix("s")
        lines += [
            f"missing: {one} {n}" for n in set(wanted) - set(mine) - set(EXCLUDED)
        ]
        for name in set(mine) - set(known):
            gone = "deprecated" if name in union.deprecated else "gone"
            lines.append(f"{gone}: {one} {name}")
        if kind != "constants":
            lines += changes(one, mine, known)
    return sorted(lines)


def changes(
    kind: str,
    mine: Mapping[str, str | tuple[str, ...]],
    known: Mapping[str, str | tuple[str, ...]],
) -> Iterator[str]:
    """Declared otherwise in the header: both texts, or what a struct or enum differs in."""
    for name in set(mine) & set(known):
        left, right = mine[name], known[name]
        if left == right:
            continue
        if isinstance(left, str) or isinstance(right, str):
            yield f"changed: {kind} {name}\n    cdef:   {left}\n    header: {right}"
            continue
        parts = [f"lacks {part}" for part in right if part not in left]
        parts += [f"has no longer {part}" for part in left if part not in right]
        yield f"changed: {kind} {name}: {'; '.join(parts) or 'order of its parts'}"


def main(argv: list[str] | None = None) -> int:
    """Run the command line *argv*; the exit code."""
    parser = argparse.ArgumentParser(
        description="Compare the cdefs with the C headers."
    )
    parser.add_argument("--include", nargs="+", type=Path, default=[])
    parser.add_argument("--write-stub", action="store_true")
    args = parser.parse_args(argv)
    if args.write_stub:
        everything = merge(iter((declared(), parse(SHIM))))
        STUB.write_text(stub(everything), "utf-8")
        return 0
    built = built_include()
    if not args.include and built is None:
        parser.error("nothing is built here: name the headers with --include")
    try:
        lines = compare(declared(), headers(args.include or [built]))
    except FileNotFoundError as error:
        parser.error(str(error))
    print("\n".join(lines) or "the declarations match the headers")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
