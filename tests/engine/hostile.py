"""Things that may lie in a directory of files, and a bound for what may wait for them."""

import os
import socket
import stat
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


def make_pipe(path: Path) -> None:
    os.mkfifo(path)


def make_socket(path: Path) -> None:
    """A path of a socket is short, so it gets its place by a rename."""
    with socket.socket(socket.AF_UNIX) as listener:
        name = f"plr-{os.getpid()}.sock"
        before = Path.cwd()
        os.chdir(path.parent)
        try:
            listener.bind(name)
        finally:
            os.chdir(before)
    (path.parent / name).rename(path)


def make_device(path: Path) -> None:
    """What can be read for ever; a link to it where only root makes devices."""
    try:
        os.mknod(path, 0o600 | stat.S_IFCHR, os.makedev(1, 5))
    except PermissionError:
        path.symlink_to("/dev/zero")


def make_file_of_another(path: Path) -> None:
    """A file of another user; only root makes them, others a link to one."""
    if os.geteuid() == 0:
        path.write_bytes(bytes(5000))
        os.chown(path, NOBODY, NOBODY)
    else:
        path.symlink_to("/etc/passwd")


def make_directory(path: Path) -> None:
    path.mkdir()
    (path / "inside").write_text("not ours")


def make_link(path: Path) -> None:
    target = path.parent.parent.parent / "target"
    target.write_text("not ours")
    path.symlink_to(target)


def make_dangling_link(path: Path) -> None:
    path.symlink_to(path.parent.parent.parent / "nothing")


def make_link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


def make_link_to_a_directory(path: Path) -> None:
    target = path.parent.parent.parent / "folder"
    target.mkdir(exist_ok=True)
    (target / f"{'0' * 32}.plrstate").write_text("not ours, not here")
    path.symlink_to(target)


STRANGERS = {
    "pipe": make_pipe,
    "socket": make_socket,
    "device": make_device,
    "file of another": make_file_of_another,
    "directory": make_directory,
    "link": make_link,
    "dangling link": make_dangling_link,
    "link to itself": make_link_to_itself,
    "link to a directory": make_link_to_a_directory,
}


def seen(path: Path) -> tuple[int, int, int]:
    """What tells that a thing was left alone."""
    status = path.lstat()
    return status.st_mode, status.st_ino, status.st_nlink


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
