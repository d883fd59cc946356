"""
Text on stdout and a status line on stderr that do not spoil each other.

If both are the same terminal, the status is drawn in the row below the text and taken
away before more text is written.
"""

from __future__ import annotations

import os
import shutil
from typing import TextIO

# Control characters of a stranger's text could drive the terminal.
_HARMLESS = dict.fromkeys((*range(32), 127, *range(128, 160)), "�") | {
    ord(char): char for char in "\n\t"
}
# Index and reverse index make sure that there is a row below, and keep the column.
_ROW_BELOW = "\x1bD\x1bM\x1b7\x1b[B\r\x1b[K{}\x1b8"
_SAME_ROW = "\r\x1b[K{}"


class Terminal:
    """Where the output of a run goes."""

    def __init__(self, out: TextIO, err: TextIO) -> None:
        self._out, self._err = out, err
        self._is_shown = out.isatty()
        self.has_status = err.isatty() and os.environ.get("TERM") != "dumb"
        self._form = _ROW_BELOW if self._is_shown else _SAME_ROW
        self._status = ""
        self._is_drawn = False
        self._column = 0

    def write(self, text: str) -> None:
        """Write *text* to stdout now."""
        self._clear()
        if self._is_shown:
            text = text.translate(_HARMLESS)
            self._column = _column_after(self._column, text)
        self._out.write(text)
        self._out.flush()
        self._draw()

    def say(self, line: str) -> None:
        """Write a line for the person to stderr."""
        self._clear()
        self._err.write(f"{line}\n")
        self._err.flush()
        self._draw()

    def note(self, line: str) -> None:
        """Like say(), dim on a terminal: beside what the person came for."""
        self.say(f"\x1b[2m{line}\x1b[0m" if self.has_status else line)

    def status(self, line: str) -> None:
        """Show *line* until the next one; nothing if stderr is no terminal."""
        self._status = line
        self._draw()

    def close(self) -> None:
        """Take the status line away."""
        self._status = ""
        self._clear()

    def _draw(self) -> None:
        columns = shutil.get_terminal_size().columns
        # In the last column a terminal waits with the line break: leave it alone.
        at_edge = self._is_shown and self._column and self._column % columns == 0
        if self.has_status and self._status and not at_edge:
            self._err.write(self._form.format(self._status[: columns - 1]))
            self._err.flush()
            self._is_drawn = True

    def _clear(self) -> None:
        if self._is_drawn:
            self._err.write(self._form.format(""))
            self._err.flush()
            self._is_drawn = False


def _column_after(column: int, text: str) -> int:
    """Characters since the last line break; wide ones are taken for narrow."""
    head, newline, tail = text.rpartition("\n")
    return len(tail) if newline else column + len(head) + len(tail)
