"""
The tools a build needs: compilers, cmake, ninja, and the CPU they build for.

What is missing is said together with what to install. `build_lib.py` loads this file by
path: standard library only.
"""

from __future__ import annotations

import contextlib
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path


class BuildError(RuntimeError):
    """The library cannot be had; the message says what to install or set."""


def say(message: str) -> None:
    print(f"build_lib: {message}", file=sys.stderr, flush=True)


class DownloadLines:
    """Says a line every tenth of a download of *n_total* bytes."""

    def __init__(self, n_total: int) -> None:
        self.n_total = n_total
        self.tenth = -1

    def __call__(self, n_bytes: int) -> None:
        tenth = n_bytes * 10 // self.n_total
        if tenth != self.tenth:
            self.tenth = tenth
            say(f"downloaded {n_bytes >> 20} of {self.n_total >> 20} MiB")


def words(variable: str) -> list[str]:
    """The words of an environment variable, as a shell has them. Raises BuildError."""
    text = os.environ.get(variable, "")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise BuildError(
            f"{variable}={text}: {error}: it is split into words as a shell does, so close "
            "the quotation, or put a backslash before the quote"
        ) from None


def check_compilers() -> None:
    """Refuse a machine without compilers before anything is downloaded."""
    compiler("CXX", "c++")
    compiler("CC", "cc")


def compiler(variable: str, default: str) -> str:
    """The first line a compiler says about itself."""
    command = words(variable) or [default]
    if shutil.which(command[0]) is None:
        raise BuildError(
            f"no compiler {command[0]!r}: install a C and C++ compiler (Debian: "
            "apt install build-essential; Fedora: dnf install gcc-c++; macOS: "
            f"xcode-select --install), or set {variable}"
        )
    command_line = [*command, "--version"]
    try:
        done = subprocess.run(command_line, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{variable}={command[0]} cannot be run: {error}") from None
    return f"{command} {done.stdout.partition(chr(10))[0]}"


def cpu() -> str:
    """The CPU, since GGML_NATIVE compiles for the one at hand."""
    names = {platform.machine(), platform.processor()}
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name = line.split(":")[0].strip()
            if name in ("model name", "flags", "Features", "CPU part"):
                names.add(line)
    return "\n".join(sorted(names))


def n_cpus() -> int:
    """CPUs this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def n_jobs() -> int:
    """How many compilers run at a time: what cmake's variable says, or one for each CPU."""
    number = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", "")
    return max(1, int(number)) if number.isdecimal() else n_cpus()


def check_python_headers() -> None:
    """Refuse a Python that extensions cannot be compiled for."""
    header = Path(sysconfig.get_path("include")) / "Python.h"
    if not header.is_file():
        raise BuildError(
            f"no {header}: install the headers of this Python (Debian: apt install "
            "python3-dev; Fedora: dnf install python3-devel)"
        )


def find_tool(name: str) -> str:
    """Return the path of cmake or ninja: this environment's, else the one on PATH."""
    search = os.pathsep.join(
        [sysconfig.get_path("scripts"), os.environ.get("PATH", "")]
    )
    path = shutil.which(name, path=search)
    if path is None:
        raise BuildError(f"no {name}: run `{sys.executable} -m pip install {name}`")
    return path


def run(*command: str, env: dict[str, str] | None = None) -> None:
    """Run *command*, saying a line every tenth of its steps; all of it on failure."""
    lines: list[str] = []
    tenth = 0
    with subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            step = re.match(r"\[(\d+)/(\d+)\]", line)
            if step and int(step[1]) * 10 // int(step[2]) > tenth:
                tenth = int(step[1]) * 10 // int(step[2])
                say(f"compiled {step[1]} of {step[2]}")
    if process.returncode:
        summary = "".join(_worst(lines))
        raise BuildError(
            f"{shlex.join(command)} failed with code {process.returncode}:\n{summary}"
            "Check PYLLAMA_RAW_CMAKE_ARGS, CC and CXX, and that there is memory and disk."
        )


def _worst(lines: list[str]) -> list[str]:
    """The lines about an error, else the last ones."""
    errors = [line for line in lines if re.search(r"error|FAILED", line, re.IGNORECASE)]
    return [*errors[:20], *lines[-20:]]
