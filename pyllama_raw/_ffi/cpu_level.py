"""
Levels of x86-64 CPUs that libllama and our kernels can be built for: PYLLAMA_RAW_CPU.

`native`, the default, takes all instructions of the machine that builds. A level takes its own
instructions and those of the levels before it, so its library runs on every CPU that has
these, and computes what a lesser machine would. `any` is a library for every CPU, as a wheel has
it: a program that starts chooses among its variants (__init__.py).

`build_lib.py` loads this file by path: standard library only.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "PYLLAMA_RAW_CPU"
NATIVE = "native"
ANY = "any"
LEVEL_FILE = "cpu-level"  # beside bundled libraries; absent: native


class CpuLevelError(ValueError):
    """A level that does not exist, or that this machine cannot run."""


@dataclass(frozen=True, slots=True)
class Level:
    """What one level adds to the levels before it."""

    instructions: frozenset[str]
    """Their names in /proc/cpuinfo."""
    options: tuple[str, ...]
    """The options of ggml's cmake, without GGML_."""


# In order. AVX-512 begins where our kernels use it, with VNNI: one level, not two.
LEVELS = {
    "sse42": Level(frozenset({"ssse3", "sse4_2", "popcnt"}), ("SSE42",)),
    "avx2": Level(
        frozenset({"avx", "avx2", "fma", "f16c", "bmi2"}),
        ("AVX", "AVX2", "FMA", "F16C", "BMI2"),
    ),
    "avx512vnni": Level(
        frozenset(
            {"avx512f", "avx512cd", "avx512vl", "avx512dq", "avx512bw", "avx512_vnni"}
        ),
        ("AVX512", "AVX512_VNNI"),
    ),
    "amx": Level(frozenset({"amx_tile", "amx_int8"}), ("AMX_TILE", "AMX_INT8")),
}

# What a library for any CPU has of ggml's variants, and the sets of instructions that our kernels
# use beside each, where it is chosen. libllama's code differs between these seven. It is the same
# for a Cannon Lake as for skylakex, and for an Ice Lake as for cascadelake, because only a report
# of features asks for VBMI. Cooper Lake would gain 16-bit floats, and CPUs of 2011 to 2013 half of
# AVX2: too few for a minute of building and half a megabyte each. They take cascadelake and sse42.
# CPUs without SSE4.2, of Intel before 2009 and AMD before 2011, have none: they build from source.
VARIANTS: dict[str, tuple[str, ...]] = {
    "sse42": (),
    "haswell": ("avx2",),
    "alderlake": ("avx2", "avxvnni"),
    "skylakex": ("avx2",),
    "cascadelake": ("avx2", "avxvnni", "avx512vnni"),
    "zen4": ("avx2", "avxvnni", "avx512vnni"),
    "sapphirerapids": ("avx2", "avxvnni", "avx512vnni", "amx"),
}
VARIANT_OF_LEVEL = {
    "sse42": "sse42",
    "avx2": "haswell",
    "avx512vnni": "cascadelake",
    "amx": "sapphirerapids",
}


def level_of_environment(cpuinfo: str | None = None) -> str:
    """
    The level that PYLLAMA_RAW_CPU names.

    Args:
        cpuinfo: the text of /proc/cpuinfo; None: of this machine.

    Raises:
        CpuLevelError: no such level, or a level that this machine cannot run.
    """
    name = os.environ.get(VARIABLE) or NATIVE
    if name not in (NATIVE, ANY, *LEVELS):
        advice = f"; {name} is a variant, which a library for {ANY} CPU alone has"
        raise CpuLevelError(
            f"{VARIABLE}={name}: there is no such level; levels are "
            f"{', '.join([NATIVE, ANY, *LEVELS])}{advice if name in VARIANTS else ''}"
        )
    check_runs(name, cpuinfo)
    return name


def check_variant(name: str) -> None:
    """Refuse a *name* of no variant of a library for any CPU. Raises CpuLevelError."""
    if name not in VARIANTS and name not in VARIANT_OF_LEVEL:
        raise CpuLevelError(
            f"{VARIABLE}={name}: there is no such variant; variants are {', '.join(VARIANTS)}, "
            f"and {', '.join(VARIANT_OF_LEVEL)} stand for some of them"
        )


def check_runs(name: str, cpuinfo: str | None = None) -> None:
    """Refuse the level *name* where this machine lacks its instructions. Raises CpuLevelError."""
    if name == NATIVE:
        return
    machine = os.uname().machine
    if cpuinfo is None and (sys.platform != "linux" or machine != "x86_64"):
        raise CpuLevelError(
            f"{VARIABLE}={name}: levels are for Linux on x86-64, and this machine is "
            f"{sys.platform} on {machine}: leave {VARIABLE} out, or say {NATIVE}"
        )
    missing = sorted(instructions_of(name) - instructions_here(cpuinfo))
    if missing:
        raise CpuLevelError(
            f"{VARIABLE}={name}: this CPU has no {', '.join(missing)}; it can run "
            f"{', '.join([NATIVE, *runnable(cpuinfo)])}"
        )


def instructions_here(cpuinfo: str | None = None) -> frozenset[str]:
    """Names of the instructions that this machine has, as Linux tells them."""
    if cpuinfo is None:
        cpuinfo = Path("/proc/cpuinfo").read_text()
    flags = re.search(r"^flags\s*:(.*)$", cpuinfo, re.MULTILINE)
    return frozenset(flags[1].split()) if flags else frozenset()


def instructions_of(name: str) -> frozenset[str]:
    """All that the level *name* uses."""
    levels = [] if name == ANY else _up_to(name)
    return frozenset().union(*(level.instructions for level in levels))


def runnable(cpuinfo: str | None = None) -> list[str]:
    """Levels that this machine can run, the least first."""
    here = instructions_here(cpuinfo)
    return [name for name in LEVELS if instructions_of(name) <= here]


def lesser_level(cpuinfo: str | None = None) -> str | None:
    """
    A level that differs from what this machine has: avx2, or sse42 where avx2 is all it has.

    None: this machine has no lesser level.
    """
    levels = runnable(cpuinfo)
    if levels[-1:] == ["avx2"]:
        return "sse42"
    return "avx2" if "avx2" in levels else None


def cmake_flags(name: str) -> list[str]:
    """Flags with which ggml is built for the level *name*."""
    if name == NATIVE:
        return []
    if name == ANY:  # variants are plug-ins, and lie where the other libraries are
        flags = ("NATIVE=OFF", "BACKEND_DL=ON", "CPU_ALL_VARIANTS=ON")
        return [*(f"-DGGML_{flag}" for flag in flags), "-DCMAKE_INSTALL_BINDIR=lib"]
    options = {option for level in _up_to(name) for option in level.options}
    every = [option for level in LEVELS.values() for option in level.options]
    return [
        "-DGGML_NATIVE=OFF",
        *(f"-DGGML_{o}={'ON' if o in options else 'OFF'}" for o in every),
    ]


def macros(name: str) -> list[tuple[str, str]]:
    """Macros for our C++: what the kernels may not use, and the name of the level."""
    places = list(LEVELS)
    rank = places.index(name) if name in places else len(places)
    without = [
        (f"PLR_WITHOUT_{kind.upper()}", "1")
        for kind, level in (("avx2", "avx2"), ("avx512", "avx512vnni"), ("amx", "amx"))
        if rank < places.index(level)
    ]
    return [("PLR_CPU_LEVEL", f'"{name}"'), *without]


def _up_to(name: str) -> list[Level]:
    names = list(LEVELS)
    return [LEVELS[lower] for lower in names[: names.index(name) + 1]]
