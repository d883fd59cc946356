"""
Each constraint is compiled in a process of its own first, within limits of time and memory.

A text of 60 bytes can name an automaton of millions of states, and no limit of llguidance holds
for all kinds of them. What ends the process there is an error of one request. What passes is
compiled once more by the engine, at the same cost.

A process is started by the first constraint and kept. Where none can be started, as in a frozen
application, only the limits of llguidance and of our own checks hold.
"""

from __future__ import annotations

import json
import select
import signal
import subprocess
import sys
import weakref
from collections.abc import Collection, Sequence
from contextlib import suppress
from itertools import accumulate
from logging import getLogger
from pathlib import Path
from queue import LifoQueue
from typing import Any

from pyllama_raw.engine.mailbox import CALLER_LEFT
from pyllama_raw.errors import BadSchema, ClosedError
from pyllama_raw.native.grammar import Kind
from pyllama_raw.options.constraints import refused

MAX_CPU_S = 1.0  # others wait for as long: most constraints take milliseconds
MAX_BYTES = 2**29  # of addresses, beside those that the vocabulary takes
MAX_COMPILED_BYTES = 2**24  # of one: each output copies it, which takes 2 ms a MiB
BYTES_PER_PIECE = 1024  # of addresses that a vocabulary takes, at most
N_PROCESSES = 2  # one slow constraint does not keep the others waiting
LOOK_S = 0.05  # between two looks whether the caller is still there

# The package is entered by its path: its __init__ would import all of the engine.
_PROGRAM = """
import json, sys, types
path, folder = json.loads(sys.argv[1])
sys.path[:] = path
package = types.ModuleType("pyllama_raw")
package.__path__ = [folder]
sys.modules["pyllama_raw"] = package
from pyllama_raw.native.trial_worker import main
main()
"""
_log = getLogger(__name__)


class Trials:
    """
    Compiles constraints for one vocabulary; any thread may ask.

    Args:
        pieces: of all tokens.
        eog: tokens that end an output.
    """

    def __init__(self, pieces: Sequence[bytes], eog: Sequence[int]) -> None:
        self._pieces, self._eog = pieces, list(eog)
        # What each trial takes and gives back: an idle process, or leave to start one.
        self._places: LifoQueue[_TrialProcess | None] = LifoQueue()
        for _ in range(N_PROCESSES):
            self._places.put(None)
        self._all: set[_TrialProcess] = set()
        self._can_start = True
        weakref.finalize(self, _end_all, self._all)

    def n_bytes(self, kind: Kind, text: str, named: Collection[int] = ()) -> int | None:
        """
        What the constraint *text* takes once it is compiled; None: no process can be started.

        Args:
            named: tokens that have no text, because the constraint names them.

        Raises:
            BadSchema: it cannot be compiled, or not within the limits; says why.
            ClosedError: the caller has left meanwhile.
        """
        constraint = {"kind": kind, "text": text, "named": sorted(named)}
        process = self._places.get()
        answer = None
        try:
            if process is None:
                process = self._started()
            if process is not None:
                answer = process.ask(constraint)
        except _Ended as error:
            raise BadSchema(kind, str(error), is_costly=True) from error
        finally:
            if answer is None and process is not None:
                process.end()
                self._all.discard(process)
                process = None
            self._places.put(process)
        if answer is None:
            return None
        if answer["error"]:
            raise refused(kind, answer["error"])
        n_bytes = max(int(answer["bytes"]), 0)
        if n_bytes > MAX_COMPILED_BYTES:
            size = f"it takes {n_bytes >> 10} KiB once it is compiled, at most"
            allowed = f"{MAX_COMPILED_BYTES >> 10} are allowed: shorten or simplify it"
            raise BadSchema(kind, f"{size} {allowed}")
        return n_bytes

    def _started(self) -> _TrialProcess | None:
        if not self._can_start:
            return None
        try:
            process = _TrialProcess(self._pieces, self._eog)
        except OSError as error:
            _log.warning("constraints are compiled without a trial: %s", error)
            self._can_start = False
            return None
        self._all.add(process)
        return process


class _Ended(Exception):
    """A limit was reached; says which."""


class _TrialProcess:
    def __init__(self, pieces: Sequence[bytes], eog: Sequence[int]) -> None:
        if getattr(sys, "frozen", False) or not sys.executable:
            raise FileNotFoundError("there is no Python that could be started")
        folder = str(Path(__file__).resolve().parents[1])
        argument = json.dumps([[str(entry) for entry in sys.path], folder])
        # Isolated: no user's folder or environment variable adds modules. In a session
        # of its own, because an interrupt from the terminal is not for it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._popen = subprocess.Popen(  # noqa: S603 - our own program
                [sys.executable, "-I", "-S", "-c", _PROGRAM, argument],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                text=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._setup: dict[str, Any] | None = {
            "pieces": b"".join(pieces).decode("latin-1"),
            "ends": list(accumulate(map(len, pieces))),
            "eog": eog,
            "max_cpu_s": MAX_CPU_S,
            "max_bytes": MAX_BYTES + BYTES_PER_PIECE * len(pieces),
        }

    def ask(self, constraint: dict[str, Any]) -> dict[str, Any]:
        """The answer. Raises _Ended, ClosedError; the process must then be ended."""
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        try:
            if self._setup is not None:
                self._popen.stdin.write(json.dumps(self._setup) + "\n")
                self._setup = None
            self._popen.stdin.write(json.dumps(constraint) + "\n")
            self._popen.stdin.flush()
            left = CALLER_LEFT.get()
            while not select.select([self._popen.stdout], [], [], LOOK_S)[0]:
                if left is not None and left.is_set():
                    raise ClosedError("the caller has left")
            line = self._popen.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise self._why()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _why(self) -> _Ended:
        code = self._popen.wait()
        if code == -signal.SIGPROF:
            text = f"it is not compiled within {MAX_CPU_S:g} s of CPU time"
        elif code in (-signal.SIGSEGV, -signal.SIGBUS):
            text = "it nests too deeply"
        else:
            text = f"it is not compiled within {MAX_BYTES >> 20} MiB"
        return _Ended(f"{text}: shorten it, or lower its numbers and repetitions")

    def end(self) -> None:
        self._popen.kill()
        with suppress(BrokenPipeError), self._popen:
            pass


def _end_all(processes: set[_TrialProcess]) -> None:
    while processes:
        processes.pop().end()
