"""
The C boundary: the compiled extension, which load() imports.

`import pyllama_raw` alone does not, so documentation, core and fakes work where nothing has
been built.

A wheel has the code of libllama's CPU backend several times, compiled for other instructions each
time (VARIANTS of cpu_level.py). Each is a plug-in that tells its score on this CPU: 0 if the CPU
cannot run it, more for more instructions. The best score computes, or the variant that
PYLLAMA_RAW_CPU names. Our kernels are compiled for all CPUs in one file. They do without what a
chosen variant lacks, so that both compute what a lesser machine would.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from typing import Any

from pyllama_raw._ffi.cpu_level import (
    ANY,
    LEVEL_FILE,
    LEVELS,
    NATIVE,
    VARIABLE,
    VARIANT_OF_LEVEL,
    VARIANTS,
    CpuLevelError,
    check_runs,
    level_of_environment,
)
from pyllama_raw._ffi.loaded import RECORD, cut_short, record_in, version_of
from pyllama_raw._ffi.openmp import choosing
from pyllama_raw.errors import ConfigError, LibraryNotBuilt

EXTENSION = "pyllama_raw._ffi._llama"
LIBRARIES = Path(__file__).parent / "lib"  # of the extension, and how they were built
VARIANT_PREFIX, VARIANT_SUFFIX = "libggml-cpu-", ".so"  # of their files
KERNEL_SETS = ("avx2", "avxvnni", "avx512vnni", "amx")  # as plr_cpu_only() takes them


def load() -> tuple[Any, Any]:
    """
    Import the extension and return (ffi, lib).

    Raises:
        LibraryNotBuilt: it is absent, damaged, for another CPU or another libllama, or the loader
            refused it; says what to run.
    """
    _check_cpu()
    _check_whole()
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
    level = _level_in(LIBRARIES)
    if level == ANY:  # PYLLAMA_RAW_CPU names one of its variants
        return
    build = "`pip install .` in the source tree builds it anew"
    if level not in (NATIVE, *LEVELS):
        raise LibraryNotBuilt(
            f"{LIBRARIES / LEVEL_FILE} has {level!r}, which is no level of this version: the "
            f"native library is damaged, or another version's; {build}"
        )
    try:
        check_runs(level)
        wish = level_of_environment() if os.environ.get(VARIABLE) else level
    except CpuLevelError as error:
        raise LibraryNotBuilt(
            f"the native library is built for {level}. {error}"
        ) from None
    if wish != level:
        raise LibraryNotBuilt(
            f"the native library is built for {level}, and {VARIABLE}={wish} says "
            f"otherwise: {build}, or unset {VARIABLE}"
        )


def _check_whole() -> None:
    """Refuse a library of which a part is missing. Raises LibraryNotBuilt."""
    extensions = (LIBRARIES.parent / f"_llama{end}" for end in EXTENSION_SUFFIXES)
    if file := cut_short([*extensions, *LIBRARIES.glob("lib*.so*")]):
        raise LibraryNotBuilt(
            f"{file} is cut short, as by a full disk: install pyllama_raw anew "
            "(`pip install --force-reinstall --no-deps pyllama_raw`, or the same with `.` in "
            "the source tree)"
        )


def _level_in(folder: Path) -> str:
    path = folder / LEVEL_FILE
    return path.read_text().strip() if path.is_file() else NATIVE


def build_record() -> dict[str, str]:
    """
    How the library was built; empty: nobody wrote it down.

    Raises:
        LibraryNotBuilt: the file of it is damaged.
    """
    try:
        return record_in(LIBRARIES)
    except (OSError, TypeError, ValueError) as error:
        raise LibraryNotBuilt(
            f"{LIBRARIES / RECORD} is damaged ({error}): install pyllama_raw anew"
        ) from None


def _check_version() -> None:
    """
    Refuse an installed libllama that is another one than the extension was compiled for: calls
    would pass structs that it reads otherwise. Raises LibraryNotBuilt.
    """
    record = build_record()
    if "version" not in record:  # a library of our own lies beside the extension
        return
    path, version = Path(record["library"]), record["version"]
    try:
        now = version_of(path)
        problem = f"and what is there now is {now}: run"
    except OSError as error:
        now = None
        problem = f"which cannot be loaded ({error}): install it there anew, or run"
    if now != version:
        place = record.get("llama.cpp", "")
        prefix = place.removeprefix("installed in ") or path.parents[1]
        raise LibraryNotBuilt(
            f"the extension was compiled for llama.cpp {version} in {path}, {problem} "
            f"`PYLLAMA_RAW_PREFIX={prefix} pip install --force-reinstall --no-deps .` in the "
            "source tree"
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

    files = [
        file
        for file in LIBRARIES.glob("lib*.so*")
        # Of the variants one is chosen, and opened by its path.
        if file.name.startswith(order) and not file.name.startswith(VARIANT_PREFIX)
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
    # It takes longer to import than all else here, and only this message needs it.
    from importlib.metadata import distributions

    copies = distributions(name="pyllama_raw", path=[entry])
    return "".join(f"of version {copy.version} " for copy in copies)


# -- variants of the CPU code ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Variant:
    """The variant that computes."""

    name: str
    reason: str
    """What chose it."""


def variant_files(folder: Path) -> dict[str, Path]:
    """The variants in *folder* by name; none where the CPU backend is linked."""
    return {
        path.name[len(VARIANT_PREFIX) :].partition(VARIANT_SUFFIX)[0]: path
        for path in sorted(folder.glob(f"{VARIANT_PREFIX}*{VARIANT_SUFFIX}*"))
    }


def choose_variant(scores: Mapping[str, int], wish: str | None = None) -> Variant:
    """
    The variant that is to compute.

    Args:
        scores: of each variant on this CPU.
        wish: PYLLAMA_RAW_CPU: a variant, or a level of CPUs that stands for one.

    Raises:
        ConfigError: there is no such variant, or this CPU cannot run it.
        LibraryNotBuilt: none runs here: the CPU is older than all of them, or files are missing.
    """
    here = sorted((name for name in scores if scores[name] > 0), key=scores.__getitem__)
    if not here:
        raise LibraryNotBuilt(
            f"none of the CPU variants {', '.join(scores)} runs on this CPU: a whole wheel has "
            "one for each that has SSE4.2 (x86-64-v2); `pip install --no-binary pyllama_raw "
            "pyllama_raw`, or `pip install .` in the source tree, builds for this one"
        )
    best = here[-1]
    if wish in (None, "", ANY, NATIVE):
        return Variant(best, f"best score of the {len(here)} that this CPU runs")
    name = VARIANT_OF_LEVEL.get(wish, wish)
    if name in here:
        return Variant(name, f"{VARIABLE}={wish}; the best one here is {best}")
    problem = (
        "this CPU lacks instructions of it"
        if name in scores
        else "this library has no such variant"
    )
    raise ConfigError(
        f"{VARIABLE}={wish}: {problem}; here run {', '.join(here)} "
        f"(or {', '.join(level for level in VARIANT_OF_LEVEL if VARIANT_OF_LEVEL[level] in here)}), "
        f"and without {VARIABLE} the best of them computes"
    )


def use_variant(folder: Path, lib: Any) -> Variant | None:
    """
    Let one of the variants in *folder* compute; None: there are none, the library is linked.

    To be called before any context is made.

    Raises:
        ConfigError: PYLLAMA_RAW_CPU names no variant that runs here.
        LibraryNotBuilt: a file is damaged, or there is none in a library for any CPU.
    """
    paths = variant_files(folder)
    if not paths:
        if _level_in(folder) == ANY:
            raise LibraryNotBuilt(
                f"{folder} has no {VARIANT_PREFIX}*{VARIANT_SUFFIX}, which compute: install "
                "pyllama_raw anew"
            )
        return None
    scores = {
        name: lib.plr_variant_score(os.fsencode(path)) for name, path in paths.items()
    }
    variant = choose_variant(scores, os.environ.get(VARIABLE))
    # A CPU may have more than its best variant uses, which is no reason to do without.
    if scores[variant.name] < max(scores.values()):
        sets = VARIANTS.get(variant.name, ())
        lib.plr_cpu_only(*(name in sets for name in KERNEL_SETS))
    if not lib.plr_variant_use(os.fsencode(paths[variant.name])):
        raise LibraryNotBuilt(
            f"{paths[variant.name]} cannot be loaded: install pyllama_raw anew"
        )
    return variant
