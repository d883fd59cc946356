"""
A server as a child process: started, watched and ended.

Rules:
1. A thread reads all that the child writes, so the child never blocks; the end of it is kept.
2. The thread also waits for the child, so there is no zombie, whatever its owner does.
3. Its standard input is a pipe that keeper.py watches: the child ends when this process does.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from math import inf
from pathlib import Path
from threading import Thread

from anyio import CancelScope, current_time, sleep

from pyllama_raw.errors import PyllamaError
from pyllama_raw.runners.errors import RunnerDied

KEEPER = str(Path(__file__).with_name("keeper.py"))
KEPT_BYTES = 2**16  # of what the child has written
ADDRESS = re.compile(rb"(?:serving at|listening on) (http://[\w.\[\]:]+:\d+)\s")
LOOK_S = 0.02  # between two looks whether the child has ended
STOP_S = 1.0  # for the child to end after SIGTERM
NOTICED_S = 0.5  # for the end of a child to be known, once its connections broke
SAID_S = 0.1  # for the last of what an ended child has written to be read
FIRST_WAIT_S, MOST_WAIT_S = 0.1, 2.0


class NotReady(PyllamaError):
    """A server that was started takes no requests in the time that it may take."""

    code = "not_ready"
    http_status = 503
    is_retryable = True
    counts_as_circuit_failure = True

    def __init__(self, name: str, limit_s: float, stderr: str) -> None:
        self.name, self.limit_s, self.stderr = name, limit_s, stderr
        said = f"; the last it wrote: {stderr}" if stderr else ""
        super().__init__(
            f"{name} failed to become ready within {limit_s:g} seconds: raise start_s, or "
            f"look what keeps it{said}"
        )


def waits_s() -> Iterator[float]:
    """Waits between two questions whether a server is ready: each twice the one before."""
    wait_s = FIRST_WAIT_S
    while True:
        yield wait_s
        wait_s = min(2 * wait_s, MOST_WAIT_S)


class Child:
    """A process that writes where it listens."""

    def __init__(self, name: str, command: Sequence[str]) -> None:
        self.name, self._command = name, tuple(command)
        self._written = bytearray()
        self._process: subprocess.Popen[bytes] | None = None
        self._watcher: Thread | None = None
        self.url = ""
        """The address at which it listens; empty until it tells it."""

    @property
    def pid(self) -> int | None:
        """Its id; None before start()."""
        return self._process.pid if self._process else None

    @property
    def has_ended(self) -> bool:
        """Whether it was started and runs no more."""
        return self._process is not None and self._process.poll() is not None

    @property
    def said(self) -> str:
        """The end of what it has written."""
        return bytes(self._written).decode(errors="replace").strip()

    @property
    def death(self) -> RunnerDied:
        """The error that tells how it ended."""
        assert self._process is not None
        assert self._watcher is not None
        self._watcher.join(SAID_S)
        return RunnerDied(self._process.poll(), self.said)

    def start(self, environment: Mapping[str, str]) -> None:
        """
        Start it.

        Args:
            environment: variables beside those of this process.
        """
        keeper = [sys.executable, "-I", "-S", KEEPER, self.name]
        self._process = subprocess.Popen(  # noqa: S603
            [*keeper, *self._command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,  # an interrupt from the terminal is for its owner
        )
        self._watcher = Thread(target=self._watch, name=self.name, daemon=True)
        self._watcher.start()

    async def pause(self, wait_s: float) -> None:
        """
        Wait *wait_s*, or until it tells where it listens.

        Raises:
            RunnerDied: it has ended.
        """
        had_url, until = bool(self.url), current_time() + wait_s
        while current_time() < until and bool(self.url) == had_url:
            if await self.ended_within(LOOK_S):
                raise self.death

    async def ended_within(self, limit_s: float) -> bool:
        """Whether it ends within *limit_s*."""
        until = current_time() + limit_s
        while not self.has_ended and current_time() < until:  # noqa: ASYNC110
            await sleep(LOOK_S)
        return self.has_ended

    async def end(self) -> None:
        """Ask it to end, and kill it if it does not. Can be repeated."""
        process = self._process
        if process is None or self.has_ended:
            return
        with CancelScope(shield=True):
            process.terminate()
            if not await self.ended_within(STOP_S):
                process.kill()
                await self.ended_within(inf)

    def _watch(self) -> None:
        """Keep what it writes, until it ends."""
        assert self._process is not None
        assert self._process.stdout is not None
        assert self._process.stdin is not None
        with self._process.stdin, self._process.stdout as pipe:
            while read := os.read(pipe.fileno(), KEPT_BYTES):
                self._written += read
                if not self.url and (found := ADDRESS.search(self._written)):
                    self.url = found[1].decode()
                del self._written[:-KEPT_BYTES]
            self._process.wait()
