"""
The systems we compare with: where they are, how they are started and stopped.

`benchmarks/peers/setup` builds or installs them; variables name others, each like what it
names, in capitals: LLAMA_SERVER, LLAMA_BATCHED_BENCH, LLAMA_BATCHED_BENCH_OPENMP,
IK_LLAMA_BATCHED_BENCH, OPENVINO_PYTHON, XLLAMACPP_PYTHON, LLAMA_CPP_PYTHON, LLAMA_CPP_SERVER,
LLAMA_CPP_LIB. All listen on 127.0.0.1 only.
"""

from __future__ import annotations

import functools
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

HOST = "127.0.0.1"
START_S = 120.0  # for a server to become healthy
STOP_S = 10.0  # for it to leave when asked
ADDRESS = re.compile(
    rb"^serving at (\S+)$", re.MULTILINE
)  # as `pyllama-raw serve` says


@functools.cache
def _installed(*flags: str) -> dict[str, str]:
    command = [sys.executable, str(Path(__file__).with_name("setup")), *flags]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    paths: dict[str, str] = json.loads(answer.stdout)
    return paths


def find(name: str) -> str:
    """The path of the program *name*; builds the peers if nobody names one."""
    return _named(name) or _programs().get(name) or _installed()[name]


def is_there(name: str) -> bool:
    """Whether somebody names the program *name*, or it is of `setup --programs`."""
    return _named(name) is not None or name in _programs()


def commit_of_ik() -> str | None:
    """Of the source of ik_llama.cpp that was built last; None if somebody names the program."""
    return None if _named("ik-llama-batched-bench") else _programs().get("ik_commit")


def _named(name: str) -> str | None:
    return os.environ.get(name.upper().replace("-", "_"))


def _programs() -> dict[str, str]:
    return _installed("--programs")


def free_port() -> int:
    """A port nobody listens on."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


class Url(str):
    """The base URL of a server that was started here."""

    __slots__ = ("pid",)
    pid: int  # of its process


@contextmanager
def serving(
    command: Sequence[str],
    port: int | None,
    *,
    health: str = "/health",
    env: Mapping[str, str] | None = None,
    poll_s: float = 0.1,
) -> Iterator[Url]:
    """
    Run a server until the block ends.

    Args:
        port: None if the server tells where it listens, as `pyllama-raw serve` does.
        health: what is asked whether it is ready, every *poll_s*.
        env: variables beside those of this process.

    Yields:
        Its base URL, once it is ready.
    """
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
        )
        try:
            address = _told(process, log, poll_s) if port is None else f"{HOST}:{port}"
            url = Url(f"http://{address.removeprefix('http://')}")
            url.pid = process.pid
            if not address or not _becomes_healthy(process, f"{url}{health}", poll_s):
                output = _said(log)[-2000:].decode(errors="replace")
                raise RuntimeError(f"{command[0]} did not start:\n{output}")
            yield url
        finally:
            _stop(process)


def _said(log: IO[bytes]) -> bytes:
    """What a server has written; it goes on at the same offset of the file."""
    return os.pread(log.fileno(), os.fstat(log.fileno()).st_size, 0)


def _told(process: subprocess.Popen[bytes], log: IO[bytes], poll_s: float) -> str:
    """The address that a server tells; empty if it does not."""
    give_up = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < give_up:
        if match := ADDRESS.search(_said(log)):
            return match[1].decode()
        time.sleep(poll_s)
    return ""


def _becomes_healthy(process: subprocess.Popen[bytes], url: str, poll_s: float) -> bool:
    give_up = time.monotonic() + START_S
    while process.poll() is None and time.monotonic() < give_up:
        try:
            # Cheap, so that asking often does not slow what is asked.
            with urllib.request.urlopen(url, timeout=1):  # noqa: S310
                return True
        except OSError:
            pass  # does not listen yet, or says that it is loading
        time.sleep(poll_s)
    return False


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
