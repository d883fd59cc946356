"""
Files that are complete or not there: written beside their name and renamed at the end.

A run that is interrupted leaves the old file as it was, and its own output in a file that
ends in `.part`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from pyllama_raw.errors import ConfigError


def check_writable(path: Path) -> None:
    """
    Tell before the work that *path* cannot be written after it.

    Raises:
        ConfigError: says why.
    """
    folder = path.resolve().parent
    if path.is_dir():
        raise ConfigError(f"{path} cannot be written: it is a folder")
    if not folder.is_dir():
        raise ConfigError(f"{path} cannot be written: there is no folder {folder}")
    if path.is_file() and _begins_as_model(path):
        raise ConfigError(f"{path} is not replaced: it is a model, name another file")
    if not os.access(path if _is_special(path) else folder, os.W_OK):
        raise ConfigError(f"{path} cannot be written: {folder} does not allow it")


@contextmanager
def replacing(path: Path) -> Iterator[IO[str]]:
    """
    Open a text file that becomes *path* if the block succeeds.

    If it fails, *path* stays as it was; what was written stays under the name of the
    file object, unless that is nothing. Pipes and devices are written directly.

    Raises:
        ConfigError: there is no way to write *path*.
    """
    check_writable(path)
    if _is_special(path):
        with path.open("w", encoding="utf-8") as file:
            yield file
        return
    target = path.resolve()  # a link stays one
    part = target.with_name(f"{target.name}.{os.getpid()}.part")
    with part.open("w", encoding="utf-8") as file:
        try:
            yield file
        except BaseException:
            file.flush()
            if not part.stat().st_size:
                part.unlink()
            raise
    if target.exists():
        part.chmod(target.stat().st_mode)
    part.replace(target)


def _is_special(path: Path) -> bool:
    return path.exists() and not path.is_file()


def _begins_as_model(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:  # nobody may read it
        return False
