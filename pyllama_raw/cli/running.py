"""
Event loop, engine, output file and terminal of a command that runs.

Text goes to stdout, and to stderr what a person is told. A status line stands in a row of its own,
which is emptied before anything else is written. On the screen that shows the text there is none
once the text has begun.
"""

from __future__ import annotations

import os
import shutil
import sys
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TextIO, TypeVar

import anyio

from pyllama_raw.api.blocking import Engine
from pyllama_raw.cli.options import engine_config, model_spec
from pyllama_raw.errors import first_of
from pyllama_raw.options.models import resolve_model
from pyllama_raw.options.profile import replacing
from pyllama_raw.options.requests import Need

T = TypeVar("T")
# Control characters of a stranger's text could drive the terminal.
_HARMLESS = dict.fromkeys((*range(32), 127, *range(128, 160)), "�") | {
    ord(char): char for char in "\n\t"
}
_EMPTY_ROW = "\r\x1b[K"


def run(main: Callable[[], Awaitable[T]], *, use_uvloop: bool = False) -> T:
    """Run *main*; of a group of errors the first is raised: what a person is told."""
    try:
        return anyio.run(main, backend_options={"use_uvloop": use_uvloop})
    except BaseExceptionGroup as group:
        raise first_of(group) from None


@contextmanager
def opened(options: Namespace, needs: Need) -> Iterator[tuple[Engine, Terminal]]:
    """The engine that *options* describe, and a terminal that tells of its loading."""
    model, config = resolve_model(model_spec(options)), engine_config(options)
    terminal = Terminal(sys.stdout, sys.stderr)
    terminal.status("loading the model")
    try:
        with Engine.open(model, config, needs=needs) as engine:
            yield engine, terminal
    finally:
        terminal.close()


@contextmanager
def output(path: Path | None) -> Iterator[IO[str] | None]:
    """Open *path* as replacing() does, and tell where a run that fails left its part."""
    if path is None:
        yield None
        return
    with replacing(path) as file:
        try:
            yield file
        except BaseException:
            if file.seekable() and file.tell():
                sys.stderr.write(f"{path} is as it was; unfinished: {file.name}\n")
            raise


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
