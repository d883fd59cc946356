"""
A server as a child process: started, watched and ended.

Rules:
1. One thread reads all that the child writes, so the child never blocks; the end of it is kept.
2. Another one waits for the child, so there is no zombie, whatever its owner does. When the
   child has ended, it kills the rest of the session, so nothing that the child has started stays.
3. Its standard input is a pipe that keeper.py watches: the child ends when this process does.
"""

from __future__ import annotations

import os
import re
import select
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from math import inf
from pathlib import Path
from threading import Event, Thread

from anyio import CancelScope, current_time, sleep

from pyllama_raw.errors import ConfigError
from pyllama_raw.options.machine import NoInterpreter, interpreter
from pyllama_raw.runners.errors import RunnerDied
from pyllama_raw.runners.keeper import kill_session

KEEPER = str(Path(__file__).with_name("keeper.py"))
KEPT_BYTES = 2**16  # of what the child has written
PIPE_BYTES = 2**16  # that a pipe holds
ADDRESS = re.compile(rb"(?:serving at|listening on) (http://[\w.\[\]:]+:\d+)\s")
ANY_HOST = {"0.0.0.0": "127.0.0.1", "[::]": "[::1]"}  # noqa: S104 - a child that listens on all
LOOK_S = 0.02  # between two looks whether the child has ended
STOP_S = 1.0  # for the child to end after SIGTERM
SAID_S = 0.1  # for the last of what an ended child has written to be read


class Child:
    """
    A process that writes where it listens; it is started when this is made.

    Args:
        environment: variables beside those of this process.
        kept_bytes: of the end of what it writes.

    Raises:
        ConfigError: the system cannot start it.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        environment: Mapping[str, str],
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        self.name, self._kept_bytes = name, kept_bytes
        self.url = ""  # at which it listens, once it has told it
        self._written = bytearray()
        self._ended = Event()
        try:
            self._process = subprocess.Popen(  # noqa: S603
                [interpreter(), "-I", "-S", KEEPER, name, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,  # an interrupt from the terminal is for its owner
            )
            self.pid = self._process.pid
            self._start_threads()
        except NoInterpreter as error:
            raise ConfigError(f"{name}: {error}") from error
        # No memory, process, thread or descriptor is left; NUL in a name.
        except (OSError, RuntimeError, ValueError) as error:
            raise ConfigError(f"Failed to spawn {name}: {error}") from error

    @property
    def has_ended(self) -> bool:
        """Whether it runs no more, nor what it has started."""
        return self._ended.is_set()

    @property
    def returned(self) -> int | None:
        """Its exit code, or minus the signal that ended it; None: it runs."""
        return self._process.returncode if self.has_ended else None

    @property
    def said(self) -> str:
        """The end of what it has written."""
        return bytes(self._written).decode(errors="replace").strip()

    @property
    def death(self) -> RunnerDied:
        """The error that tells how it ended."""
        self._reader.join(SAID_S)
        return RunnerDied(self._process.returncode, self.said)

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
        """Ask its session to end, and kill the session if the child does not. Can be repeated."""
        with CancelScope(shield=True):
            self.ask_to_end()
            if not await self.ended_within(STOP_S):
                kill_session(self.pid)
                await self.ended_within(inf)
            self._reader.join(SAID_S)

    def ask_to_end(self) -> None:
        """Send SIGTERM to the child and what it has started; it may serve its requests first."""
        # The keeper stays in the process group, so its number is that of no other one.
        if not self.has_ended:
            with suppress(OSError):
                os.killpg(self.pid, signal.SIGTERM)

    def _start_threads(self) -> None:
        """Start both, or kill the child. Each closes its own end of the pipe between them."""
        reads = writes = -1
        try:
            reads, writes = os.pipe()
            self._reader = Thread(target=self._read, args=(reads,), daemon=True)
            self._reader.start()
            reads = -1
            Thread(target=self._wait, args=(writes,), daemon=True).start()
        except BaseException:
            kill_session(self.pid)
            self._process.wait()
            for end in (reads, writes):
                if end != -1:
                    os.close(end)
            raise

    def _read(self, ends: int) -> None:
        """Keep what it writes, until it closes its output or *ends* is closed."""
        stdout = self._process.stdout
        assert stdout is not None
        pipe = stdout.fileno()
        os.set_blocking(pipe, False)
        both = select.poll()
        both.register(pipe, select.POLLIN)
        both.register(ends, select.POLLIN)
        with stdout:
            is_last = False
            while not is_last:
                ready = dict(both.poll())
                try:
                    written = os.read(pipe, PIPE_BYTES)
                except BlockingIOError:
                    written = b""
                # A process that has left the session may hold the pipe for ever.
                is_last = ends in ready or not written
                self._written += written
                if not self.url and (match := ADDRESS.search(self._written)):
                    self.url = _reachable(match[1].decode())
                del self._written[: -self._kept_bytes]
        os.close(ends)

    def _wait(self, ends: int) -> None:
        """Wait for its end, kill what it leaves behind, and close *ends*."""
        stdin = self._process.stdin
        assert stdin is not None
        self._process.wait()
        kill_session(self.pid)
        self._ended.set()
        with suppress(OSError):
            stdin.close()
        os.close(ends)


def _reachable(url: str) -> str:
    """*url* as this machine reaches it, if its host stands for all addresses."""
    scheme, _, address = url.partition("//")
    host, _, port = address.rpartition(":")
    return f"{scheme}//{ANY_HOST.get(host, host)}:{port}"
