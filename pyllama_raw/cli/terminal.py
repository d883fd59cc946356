"""
Text on stdout, and on stderr what a person is told.

A status line stands in a row of its own, which is emptied before anything else is written. On
the screen that shows the text there is none once the text has begun.
"""

from __future__ import annotations

import os
import shutil
from typing import TextIO

# Control characters of a stranger's text could drive the terminal.
_HARMLESS = dict.fromkeys((*range(32), 127, *range(128, 160)), "�") | {
    ord(char): char for char in "\n\t"
}
_EMPTY_ROW = "\r\x1b[K"


class Terminal:
    """The streams that the output of a run is written to."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out, self._err = out, err
        self._is_shown = out.isatty()
        self.has_status = err.isatty() and os.environ.get("TERM") != "dumb"
        self._is_drawn = self._has_begun = False

    def write(self, text: str) -> None:
        """Write *text* to stdout now."""
        if self._is_shown:
            self.close()
            self._has_begun = True
            text = text.translate(_HARMLESS)
        self._out.write(text)
        self._out.flush()

    def say(self, line: str) -> None:
        """Write a line for the person to stderr."""
        self.close()
        self._err.write(f"{line}\n")
        self._err.flush()

    def note(self, line: str) -> None:
        """Like say(), dim on a terminal: beside what the person came for."""
        self.say(f"\x1b[2m{line}\x1b[0m" if self.has_status else line)

    def status(self, line: str) -> None:
        """Show *line* until the next one; nothing if stderr is no terminal."""
        if self.has_status and not self._has_begun:
            columns = shutil.get_terminal_size().columns
            self._err.write(f"{_EMPTY_ROW}{line[: columns - 1]}")
            self._err.flush()
            self._is_drawn = True

    def close(self) -> None:
        """Take the status line away."""
        if self._is_drawn:
            self._err.write(_EMPTY_ROW)
            self._err.flush()
            self._is_drawn = False
