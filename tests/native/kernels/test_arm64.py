"""Woven weights on a CPU that none of our instructions are for: the bits of plain C++ on x86-64."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

import build_lib
from benchmarks.load.products import compiled, lines_of
from pyllama_raw.native.kernels import table
from scripts.llama_source import unpack
from tests.support.limits import LIMIT_S

ROOT = Path(__file__).resolve().parents[3]
CROSS = ("aarch64-linux-gnu-gcc", "aarch64-linux-gnu-g++")
EMULATORS = ("qemu-aarch64-static", "qemu-aarch64")
# Of ggml what types of weights are; the linker drops the rest.
GGML = ("ggml.c", "ggml-quants.c", "ggml-threading.cpp")
VERSION = '#define GGML_VERSION "0"\n#define GGML_COMMIT "0"\n'

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


def bits_on_arm64(folder: Path) -> list[str]:
    """What products.cpp prints of its digests, compiled and emulated."""
    ggml = unpack(folder, ("ggml/src", "ggml/include")) / "ggml"
    (folder / "ggml-version.h").write_text(VERSION)  # as cmake makes it
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
                *(f"-I{part}" for part in (folder, ggml / "src", ggml / "include")),
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

    done = subprocess.run(
        [emulator, str(program), "bits"],
        stdout=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=True,
    )
    return done.stdout.splitlines()


def test_plain_products_have_the_bits_of_x86_64(tmp_path):
    """
    Weights, woven ones, quantised columns, products and rows that are unpacked. There they are
    compared with exact sums (test_woven.py), which takes minutes under an emulator.
    """
    there = bits_on_arm64(tmp_path)
    here = list(lines_of(compiled(tmp_path / "here", "-O1"), "bits"))

    assert there == here
    assert {row.computes for row in table() if row.is_woven} == {
        line.split()[0].lower() for line in here
    }


def test_the_shim_compiles_for_arm64(tmp_path):
    """
    Every file of C++ that we write, against the headers of libllama.
    """
    library = build_lib.find_or_build()
    folders = [f"-I{build_lib.FFI_DIR}", f"-I{library.include}"]
    failures = {}
    for source in map(Path, build_lib.sources()):
        command = [CROSS[1], "-std=c++17", "-O0", "-fsyntax-only", "-Wall", *folders]
        macros = [f"-D{name}={value}" for name, value in build_lib.macros(library)]
        done = subprocess.run(
            [*command, *macros, str(source)],
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode or done.stderr:
            failures[source.name] = done.stderr
    assert failures == {}
