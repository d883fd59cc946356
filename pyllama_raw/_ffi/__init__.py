"""
The C boundary: the compiled extension, which load() imports.

`import pyllama_raw` alone does not, so documentation, core and fakes work where nothing has
been built.
"""

from __future__ import annotations

import importlib
import os
import sys
from contextlib import suppress
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from pyllama_raw._ffi.cpu_level import (
    ANY,
    LEVEL_FILE,
    NATIVE,
    VARIABLE,
    CpuLevelError,
    check_runs,
    level_of_environment,
)
from pyllama_raw._ffi.loaded import record_in, version_of
from pyllama_raw._ffi.openmp import choosing
from pyllama_raw.errors import LibraryNotBuilt

EXTENSION = "pyllama_raw._ffi._llama"
LIBRARIES = Path(__file__).parent / "lib"  # of the extension, and how they were built


def load() -> tuple[Any, Any]:
    """
    Import the extension and return (ffi, lib).

    Raises:
        LibraryNotBuilt: it is absent, for another CPU or another libllama, or the loader
            refused it; says what to run.
    """
    _check_cpu()
    if sys.platform == "linux" and os.environ.get("LD_LIBRARY_PATH"):
        _load_by_path()
    with choosing():
        _check_version()
        try:
            extension = importlib.import_module(EXTENSION)
        except ImportError as error:
            raise LibraryNotBuilt(_what_to_do(error)) from error
    return extension.ffi, extension.lib


def _check_cpu() -> None:
    """
    Refuse a library that this CPU cannot run, which would end the process, or that is built
    for another level of CPUs than PYLLAMA_RAW_CPU names. Raises LibraryNotBuilt.
    """
    if not _has_extension(LIBRARIES.parents[1]):  # that it is absent is said below
        return
    path = LIBRARIES / LEVEL_FILE
    level = path.read_text().strip() if path.is_file() else NATIVE
    if level == ANY:  # PYLLAMA_RAW_CPU names one of its variants
        return
    build = "`pip install .` in the source tree builds it anew"
    try:
        check_runs(level)
        chosen = level_of_environment() if os.environ.get(VARIABLE) else level
    except CpuLevelError as error:
        raise LibraryNotBuilt(
            f"the native library is built for {level}. {error}"
        ) from None
    if chosen != level:
        raise LibraryNotBuilt(
            f"the native library is built for {level}, and {VARIABLE}={chosen} says "
            f"otherwise: {build}, or unset {VARIABLE}"
        )


def _check_version() -> None:
    """
    Refuse an installed libllama that is another one than the extension was compiled for: calls
    would pass structs that it reads otherwise. Raises LibraryNotBuilt.
    """
    record = record_in(LIBRARIES)
    if "version" not in record:  # a library of our own lies beside the extension
        return
    path, version = Path(record["library"]), record["version"]
    try:
        now = version_of(path)
    except OSError as error:
        now = f"cannot be loaded ({error})"
    if now != version:
        raise LibraryNotBuilt(
            f"the extension was compiled for llama.cpp {version} in {path}, and what is there "
            f"now is {now}: run `PYLLAMA_RAW_PREFIX={path.parents[1]} pip install "
            "--force-reinstall --no-deps .` in the source tree"
        )


def _load_by_path() -> None:
    """
    Load our libraries by their paths.

    The folders of LD_LIBRARY_PATH come before ours, and a program that starts this one may name
    its own ggml there. A library that is loaded is taken wherever another one needs its name.
    """
    import ctypes

    order = ("libggml-base.", "libggml-", "libggml.", "libllama.", "libmtmd.")

    def rank(file: Path) -> int:
        return next(i for i, start in enumerate(order) if file.name.startswith(start))

    variants = "libggml-cpu-"  # of which one is chosen, and opened by its path
    files = [
        file
        for file in LIBRARIES.glob("lib*.so*")
        if file.name.startswith(order) and not file.name.startswith(variants)
    ]
    for file in sorted(files, key=rank):
        with suppress(OSError):  # the import below says it better
            ctypes.CDLL(str(file))


def _what_to_do(error: ImportError) -> str:
    """Name the installed copy that this one hides, or say how to build."""
    here = Path(__file__).resolve().parents[1]
    built = (entry for entry in sys.path if _has_extension(Path(entry, "pyllama_raw")))
    hidden = None if _has_extension(here) else next(built, None)
    if hidden is None:
        return (
            f"the native library cannot be loaded ({error}): run `pip install .` "
            "(or `pip install -e .`) in the source tree, which builds llama.cpp if "
            "PYLLAMA_RAW_PREFIX names no installed one"
        )
    return (
        f"Python imports pyllama_raw from {here}, which is not built, and not the copy "
        f"{_version_in(hidden)}in {hidden}: run `pyllama-raw` instead of "
        "`python -m pyllama_raw`, leave this folder, or start Python with -P"
    )


def _has_extension(package: Path) -> bool:
    return any(
        (package / "_ffi" / f"_llama{end}").exists() for end in EXTENSION_SUFFIXES
    )


def _version_in(entry: str) -> str:
    found = distributions(name="pyllama_raw", path=[entry])
    return "".join(f"of version {one.version} " for one in found)
