"""Event loop, engine and output file of a command that runs."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, TypeVar

import anyio

from pyllama_raw.cli.engine_options import engine_config, model_spec
from pyllama_raw.cli.terminal import Terminal
from pyllama_raw.errors import first_of
from pyllama_raw.options.models import resolve_model
from pyllama_raw.options.output_file import replacing
from pyllama_raw.options.requests import Need

if TYPE_CHECKING:
    from pyllama_raw.api.blocking import Engine

T = TypeVar("T")


def run(main: Callable[[], Awaitable[T]], *, use_uvloop: bool = False) -> T:
    """Run *main*; of a group of errors the first is raised: what a person is told."""
    try:
        return anyio.run(main, backend_options={"use_uvloop": use_uvloop})
    except BaseExceptionGroup as group:
        raise first_of(group) from None


@contextmanager
def opened(options: Namespace, needs: Need) -> Iterator[tuple[Engine, Terminal]]:
    """The engine that *options* describe, and a terminal that tells of its loading."""
    from pyllama_raw.api.blocking import Engine  # not every command has one

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
