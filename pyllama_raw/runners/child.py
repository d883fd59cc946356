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
from collections.abc import Mapping, Sequence
from math import inf
from pathlib import Path
from threading import Thread

from anyio import CancelScope, current_time, sleep

from pyllama_raw.errors import ConfigError
from pyllama_raw.options.interpreter import NoInterpreter, interpreter
from pyllama_raw.runners.errors import RunnerDied

KEEPER = str(Path(__file__).with_name("keeper.py"))
KEPT_BYTES = 2**16  # of what the child has written
ADDRESS = re.compile(rb"(?:serving at|listening on) (http://[\w.\[\]:]+:\d+)\s")
LOOK_S = 0.02  # between two looks whether the child has ended
STOP_S = 1.0  # for the child to end after SIGTERM
SAID_S = 0.1  # for the last of what an ended child has written to be read


class Child:
    """
    A process that writes where it listens; it is started when this is made.

    Args:
        environment: variables beside those of this process.
    """

    def __init__(
        self, name: str, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self.url = ""  # at which it listens, once it has told it
        self._written = bytearray()
        try:
            python = interpreter()
        except NoInterpreter as error:
            raise ConfigError(f"{name}: {error}") from error
        self._process = subprocess.Popen(  # noqa: S603
            [python, "-I", "-S", KEEPER, name, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,  # an interrupt from the terminal is for its owner
        )
        self.pid = self._process.pid
        self._watcher = Thread(target=self._watch, name=name, daemon=True)
        self._watcher.start()

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more."""
        return self._process.poll() is not None

    @property
    def said(self) -> str:
        """The end of what it has written."""
        return bytes(self._written).decode(errors="replace").strip()

    @property
    def death(self) -> RunnerDied:
        """The error that tells how it ended."""
        self._watcher.join(SAID_S)
        return RunnerDied(self._process.poll(), self.said)

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
        with CancelScope(shield=True):
            self._process.terminate()
            if not await self.ended_within(STOP_S):
                self._process.kill()
                await self.ended_within(inf)

    def _watch(self) -> None:
        """Keep what it writes, until it ends."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with stdin, stdout:
            while read := os.read(stdout.fileno(), KEPT_BYTES):
                self._written += read
                if not self.url and (found := ADDRESS.search(self._written)):
                    self.url = found[1].decode()
                del self._written[:-KEPT_BYTES]
            self._process.wait()
