"""A bound for what may wait, and a process without the rights of root."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import TypeVar

from tests.engine.support import HANG_S

Answer = TypeVar("Answer")
NOBODY = 65534


def within_bound(function: Callable[[], Answer]) -> Answer:
    """What *function* returns; a failure, not a hang, if it does not."""
    answers: list[Answer] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            answers.append(function())
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            errors.append(error)

    thread = Thread(target=run, daemon=True)
    thread.start()
    thread.join(HANG_S)
    assert not thread.is_alive(), "it waits for ever"
    if errors:
        raise errors[0]
    return answers[0]


@contextmanager
def ordinary_user(directory: Path) -> Iterator[None]:
    """Root may do anything; for a while this process is somebody who owns *directory*."""
    if os.geteuid() != 0:
        yield
        return
    for path in [directory, *directory.rglob("*")]:
        os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
