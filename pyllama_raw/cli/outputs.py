"""Files that a command writes while it runs."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from pyllama_raw.options.replacing import replacing


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
