"""
The Python that child processes run in.

A program that is frozen into one file, or embeds Python, has itself as `sys.executable`. To start
that would start the program again, which would open its engine and start it again, without end.
So each child process of this package asks here, and nothing that is no Python is ever started.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "PYLLAMA_RAW_PYTHON"
# Names of the programs of Python: python, python3.12, python3.13t, pypy3, Python (macOS).
NAMES = re.compile(
    r"(python|pypy|graalpy)[\d.]*[a-z]?(-intel64|-dbg)?(\.exe)?", re.IGNORECASE
)


class NoInterpreter(OSError):
    """There is no Python that child processes could run in; says what to set."""


def interpreter() -> str:
    """
    The path of the Python that child processes run in; any thread may call.

    It is the program that the variable PYLLAMA_RAW_PYTHON names, else that of this process.

    Raises:
        NoInterpreter: this process runs in no Python that can be started, and none is named.
    """
    if named := os.environ.get(VARIABLE):
        program = shutil.which(named)
        if program is None:
            text = f"{VARIABLE}={named!r} is no program: name one, as /usr/bin/python3"
            raise NoInterpreter(text)
        return program
    for path in _candidates():
        if NAMES.fullmatch(Path(path).name) and shutil.which(path) is not None:
            return path
    kind = "is a frozen application" if _is_frozen() else "embeds Python"
    raise NoInterpreter(
        f"this program {kind}, so it cannot start a Python of its own: name one of version "
        f"{sys.version_info[0]}.{sys.version_info[1]} by the variable {VARIABLE}"
    )


def has_own_path() -> bool:
    """Whether interpreter() may know other packages than this process does."""
    return bool(os.environ.get(VARIABLE)) or _is_frozen()


def _candidates() -> Iterator[str]:
    """Programs that may be the Python of this process, the likeliest first."""
    # In a frozen application this is the application, whatever its name is.
    frozen = sys.executable if _is_frozen() else None
    for path in (sys.executable, getattr(sys, "_base_executable", None)):
        if path and path != frozen:
            yield path
    # Where Python is embedded, its own program often lies beside its library.
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    yield str(Path(sys.base_prefix, "bin", f"python{version}"))


def _is_frozen() -> bool:
    return bool(getattr(sys, "frozen", False))
