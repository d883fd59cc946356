"""
Variants of ggml's CPU code in a library for any CPU, and which of them computes.

A wheel has the code of libllama's CPU backend several times, compiled for other instructions each
time (VARIANTS of cpu_level.py). Each is a plug-in that tells its score on this CPU: 0 if the CPU
cannot run it, more for more instructions. The best score computes, or the variant that
PYLLAMA_RAW_CPU names. Our kernels are compiled for all CPUs in one file. They do without what a
chosen variant lacks, so that both compute what a lesser machine would.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pyllama_raw._ffi.cpu_level import (
    ANY,
    NATIVE,
    VARIABLE,
    VARIANT_OF_LEVEL,
    VARIANTS,
)
from pyllama_raw.errors import ConfigError, LibraryNotBuilt

PREFIX, SUFFIX = "libggml-cpu-", ".so"
KERNEL_SETS = ("avx2", "avxvnni", "avx512vnni", "amx")  # as plr_cpu_only() takes them


@dataclass(frozen=True, slots=True)
class Variant:
    """The variant that computes."""

    name: str
    reason: str
    """What chose it."""


def files(folder: Path) -> dict[str, Path]:
    """The variants in *folder* by name; none where the CPU backend is linked."""
    return {
        path.name[len(PREFIX) :].partition(SUFFIX)[0]: path
        for path in sorted(folder.glob(f"{PREFIX}*{SUFFIX}*"))
    }


def choose(scores: Mapping[str, int], wish: str | None = None) -> Variant:
    """
    The variant that is to compute.

    Args:
        scores: of each variant on this CPU.
        wish: PYLLAMA_RAW_CPU: a variant, or a level of CPUs that stands for one.

    Raises:
        ConfigError: there is no such variant, or this CPU cannot run it.
        LibraryNotBuilt: none runs here, because files are missing.
    """
    here = sorted((name for name in scores if scores[name] > 0), key=scores.__getitem__)
    if not here:
        raise LibraryNotBuilt(
            f"none of the CPU variants {', '.join(scores)} runs on this CPU: install "
            "pyllama_raw anew, because a wheel has one for every x86-64"
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


def use(folder: Path, lib: Any) -> Variant | None:
    """
    Let one of the variants in *folder* compute; None: there are none, the library is linked.

    To be called before any context is made.

    Raises:
        ConfigError: PYLLAMA_RAW_CPU names no variant that runs here.
        LibraryNotBuilt: a file is damaged.
    """
    paths = files(folder)
    if not paths:
        return None
    scores = {
        name: lib.plr_variant_score(os.fsencode(path)) for name, path in paths.items()
    }
    variant = choose(scores, os.environ.get(VARIABLE))
    # A CPU may have more than its best variant uses, which is no reason to do without.
    if scores[variant.name] < max(scores.values()):
        sets = VARIANTS.get(variant.name, ())
        lib.plr_cpu_only(*(name in sets for name in KERNEL_SETS))
    if not lib.plr_variant_use(os.fsencode(paths[variant.name])):
        raise LibraryNotBuilt(
            f"{paths[variant.name]} cannot be loaded: install pyllama_raw anew"
        )
    return variant
