"""Woven weights on a CPU that none of our instructions are for: the bits of plain C++ on x86-64."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import build_lib
from benchmarks.load.products import compiled, lines_of
from scripts.llama_source import unpack
from tests.support.limits import LIMIT_S

ROOT = Path(__file__).resolve().parents[3]
CROSS = ("aarch64-linux-gnu-gcc", "aarch64-linux-gnu-g++")
EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
# Of ggml what types of weights are; the linker drops the rest.
GGML = ("ggml.c", "ggml-quants.c", "ggml-threading.cpp")

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(
        not all(map(shutil.which, CROSS)),
        reason="no cross compiler (Debian: g++-aarch64-linux-gnu)",
    ),
    pytest.mark.skipif(
        not any(map(shutil.which, EMULATORS)),
        reason="no emulator (Debian: qemu-user-static)",
    ),
]


@pytest.fixture(scope="module")
def run_on_arm64(tmp_path_factory):
    """Compile products.cpp for arm64; returns what runs it."""
    folder = tmp_path_factory.mktemp("arm64")
    ggml = unpack(folder, ("ggml/src", "ggml/include")) / "ggml"
    nothing = folder / "nothing.h"
    nothing.touch()
    for name in (*GGML, "products.cpp"):
        is_c = name.endswith(".c")
        source = ggml / "src" / name
        if name == "products.cpp":
            source = ROOT / "benchmarks" / name
        subprocess.run(
            [
                *(CROSS[0] if is_c else CROSS[1], "-std=c11" if is_c else "-std=c++17"),
                *("-O1", "-ffunction-sections", "-fdata-sections", "-D_GNU_SOURCE"),
                # A product and a sum are rounded twice, as on x86-64 without FMA.
                *("-ffp-contract=off", "-Wno-psabi", f'-DPLR_EMULATED="{nothing}"'),
                *('-DGGML_VERSION="0"', '-DGGML_COMMIT="0"'),
                *(f"-I{ggml / part}" for part in ("src", "include")),
                f"-I{ROOT / 'pyllama_raw' / '_ffi'}",
                *("-c", str(source), "-o", str(folder / f"{name}.o")),
            ],
            check=True,
        )
    program = folder / "products"
    objects = [str(path) for path in folder.glob("*.o")]
    link = [
        "-static",
        "-pthread",
        "-Wl,--gc-sections",
        "-Wl,--unresolved-symbols=ignore-all",
    ]
    subprocess.run([CROSS[1], *objects, *link, "-o", str(program)], check=True)
    emulator = next(name for name in EMULATORS if shutil.which(name))

    def run(argument: str) -> list[str]:
        done = subprocess.run(
            [emulator, str(program), argument],
            stdout=subprocess.PIPE,
            text=True,
            timeout=LIMIT_S,
            check=True,
        )
        return done.stdout.splitlines()

    return run


def test_plain_products_are_right_on_arm64(run_on_arm64):
    """
    As near to exact sums as on x86-64; there is no other level.
    """
    lines = run_on_arm64("check")

    assert [line for line in lines if not line.endswith("same bits")] == []
    assert {line.split()[0] for line in lines} == {"plain", "rows"}


def test_plain_products_have_the_bits_of_x86_64(run_on_arm64, tmp_path):
    """
    Weights, woven ones, quantised columns, products and rows that are unpacked.
    """
    here = list(lines_of(compiled(tmp_path / "products", "-O1"), "bits"))

    assert run_on_arm64("bits") == here
    assert len(here) == len({line.split()[0] for line in here})


def test_the_shim_compiles_for_arm64(tmp_path):
    """
    Every file of C++ that we write, against the headers of libllama.
    """
    library = build_lib.find_or_build()
    folders = [f"-I{build_lib.FFI_DIR}", f"-I{library.include}"]
    failures = {}
    for source in map(Path, build_lib.sources()):
        command = [CROSS[1], "-std=c++17", "-O0", "-fsyntax-only", "-Wall", *folders]
        macros = ['-DPLR_CPU_LEVEL="native"', "-DPLR_IS_MENDED=1"]
        done = subprocess.run(
            [*command, *macros, str(source)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or done.stderr:
            failures[source.name] = done.stderr
    assert failures == {}
