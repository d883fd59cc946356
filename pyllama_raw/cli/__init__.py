"""
The command line: `pyllama-raw chat`, `generate`, `info`, `tune` and `bench`, and a program in the place
of llama-server. Here is what both begin with, so it imports little.

Some of the standard streams may be closed. Python has None for a closed stream, and the next file that
anybody opens takes its number. So what C writes to stderr would go into that file.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from signal import SIGINT

FAILED, WRONG_USE, INTERRUPTED = 1, 2, 128 + SIGINT
STANDARD = (0, 1, 2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `pyllama-raw`; return 0 only if everything that was asked for succeeded."""
    from pyllama_raw.cli import command

    return command.main(arguments)


class ClosedInput(io.TextIOBase):
    """Stands for stdin where it is closed: whoever reads is told."""

    @property
    def buffer(self) -> ClosedInput:
        return self

    def read(self, _: int | None = -1) -> str:
        raise OSError("stdin is closed: nothing can be read from it")

    def readline(self, _: int = -1) -> str:  # type: ignore[override]
        return self.read()


def open_missing() -> None:
    """
    Stand in for the streams that are closed.

    Raises:
        OSError: it is stdout, so nothing that a command finds could be told.
    """
    for number in STANDARD:
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number, which is this one
    if sys.stdin is None:
        sys.stdin = ClosedInput()
    if sys.stderr is None:
        sys.stderr = os.fdopen(STANDARD[2], "w", closefd=False)
    if sys.stdout is None:
        sys.stdout = os.fdopen(STANDARD[1], "w", closefd=False)
        raise OSError("stdout is closed: nothing can be written to it")
