"""products.cpp: products of woven weights by each level of instructions of this CPU."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIBRARIES = ("libggml.so", "libggml-base.so", "libggml-cpu.so")


def compiled(program: Path, *flags: str) -> Path:
    """Compile it as *program*, against the library that the environment asks for."""
    sys.path.insert(0, str(ROOT))
    import build_lib

    library = build_lib.find_or_build()
    files = [str(file) for file in library.files if file.name.startswith(LIBRARIES)]
    source = [f"-I{ROOT / 'pyllama_raw' / '_ffi'}", f"-I{library.include}"]
    source.append(str(ROOT / "benchmarks" / "products.cpp"))
    target = ["-o", str(program), *files, f"-Wl,-rpath,{library.lib}"]
    command = ["c++", "-std=c++17", "-O3", "-Wno-psabi", *flags, *source, *target]
    subprocess.run(command, check=True)
    return program


def lines_of(program: Path, *arguments: str) -> Iterator[str]:
    """
    What it prints, line by line.

    Raises:
        CalledProcessError: it fails, as "check" does if bits differ.
    """
    command = [str(program), *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        yield from map(str.rstrip, process.stdout or ())
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
