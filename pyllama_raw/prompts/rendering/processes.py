"""
Runners of one chat template: processes of its own, or this process.

Rules:
1. Processes are started when they are needed, and kept. A process is a new Python and never a
   fork, because a fork of a process with threads can hang. It gets our search path, reads neither
   the environment nor `__main__`, and imports only Jinja and this package's folder. A Python that
   is not our own, as a frozen application has it, keeps its own search path in front of ours.
2. TemplateHere is for templates whose author the caller trusts, in programs that cannot start a
   Python, as frozen applications. Time and the length of the prompt are limited; memory is not,
   and one long operation in C is not ended.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging import getLogger
from pathlib import Path
from queue import LifoQueue
from threading import Lock
from time import thread_time
from types import FrameType
from typing import TYPE_CHECKING, Any

from pyllama_raw.errors import ClosedError
from pyllama_raw.options.machine import VARIABLE, has_own_path, interpreter
from pyllama_raw.prompts.messages import MAX_CHARACTERS
from pyllama_raw.prompts.rendering.worker import (
    MAX_CPU_S,
    MAX_MEMORY_BYTES,
    read_frame,
    write_frame,
)

if TYPE_CHECKING:
    from pyllama_raw.prompts.rendering.template import CompiledTemplate

N_PROCESSES = 2  # of a template: one slow chat does not keep the others waiting

# The package is entered by its path: its __init__ would import all of the engine.
_PROGRAM = """
import json, sys, types
path, folder, keeps = json.loads(sys.argv[1])
sys.path[:] = [*(sys.path if keeps else ()), *path]
package = types.ModuleType("pyllama_raw")
package.__path__ = [folder]
sys.modules["pyllama_raw"] = package
from pyllama_raw.prompts.rendering.worker import main
main()
"""

_log = getLogger(__name__)


class Unreadable(Exception):
    """The template cannot be compiled."""


class TemplateRefused(Exception):
    """The template raised an error for these messages."""


class Exceeded(Exception):
    """A limit was reached, or the process ended; says what is allowed."""


class TemplateProcesses:
    """
    Renders with one template; any thread may call.

    Args:
        tokens: names and texts of the tokens that templates may ask for.
        max_cpu_s: that compiling the template or rendering one chat may take.

    Attributes:
        n_mended: chats that were rendered only changed (`mending.py`).
        reads_messages: whether its prompts say anything of a chat; known once it has
            rendered one.
    """

    def __init__(
        self, source: str, tokens: dict[str, str], max_cpu_s: float = MAX_CPU_S
    ) -> None:
        self._setup: dict[str, Any] = {
            "source": source,
            "tokens": tokens,
            "max_cpu_s": max_cpu_s,
        }
        # What each chat takes and gives back: an idle process, or leave to start one.
        self._places: LifoQueue[_Process | None] = LifoQueue()
        for _ in range(N_PROCESSES):
            self._places.put(None)
        self._lock = Lock()
        self._all: set[_Process] = set()
        self._closed = False
        self.n_mended = 0
        self.reads_messages = True
        self._mended: set[str] = set()  # changes that the log has told of
        weakref.finalize(self, _end_all, self._all)

    def render(
        self, messages: list[Any], chat: dict[str, Any] | None = None
    ) -> tuple[str, str]:
        """
        The text, and the origin of each of its characters (see text.py).

        Args:
            chat: what CompiledTemplate.render takes beside the messages.

        Raises:
            Unreadable, TemplateRefused, Exceeded, ClosedError.
            OSError: no process can be started.
        """
        answer = self._ask([chat or {}, *messages])
        return answer["text"], answer["origins"]

    def takes_tools(self) -> bool:
        """Whether the template prints tools; raises as render()."""
        return bool(self._ask([None])["takes_tools"])

    def _ask(self, chat: list[Any]) -> dict[str, Any]:
        """The answer of a process, as worker.py says."""
        process = self._places.get()
        try:
            if process is None:
                process = self._started()
            answer = process.ask(chat)
            self.reads_messages = process.reads_messages
        except BaseException as error:
            if process is not None:
                process.end()
                self._all.discard(process)
                process = None
            if self._closed:
                raise ClosedError("the engine is closed") from error
            raise
        finally:
            self._places.put(process)
        if "refused" in answer:
            raise TemplateRefused(answer["refused"])
        if changes := answer.get("mended"):
            with self._lock:
                self.n_mended += 1
                new = [name for name in changes if name not in self._mended]
                self._mended.update(new)
            for name in new:
                _log.warning(
                    "the chat template takes some chats only changed: %s", name
                )
        return answer

    def close(self) -> None:
        """End what runs; render() raises ClosedError from then on."""
        with self._lock:
            self._closed = True
        _end_all(self._all)

    def _started(self) -> _Process:
        with self._lock:
            if self._closed:
                raise ClosedError("the engine is closed")
            process = _Process(self._setup)
            self._all.add(process)
            return process


class _Process:
    def __init__(self, setup: dict[str, Any]) -> None:
        self._setup, self._is_set_up = setup, False
        self.reads_messages = True
        folder = str(Path(__file__).resolve().parents[2])
        path = [str(entry) for entry in sys.path]
        # Another Python than ours has packages of its own, which site finds.
        is_other = has_own_path()
        setup_json = json.dumps([path, folder, is_other])
        self._python = interpreter()
        flags = ("-I",) if is_other else ("-I", "-S")
        # Isolated: no user's folder or environment variable adds modules. In a session
        # of its own, because an interrupt from the terminal is not for it. Nor is one
        # that comes before it has that session; the process ignores it later.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            self._popen = subprocess.Popen(  # noqa: S603 - our own program
                [self._python, *flags, "-c", _PROGRAM, setup_json],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)

    def ask(self, value: Any) -> dict[str, Any]:
        if not self._is_set_up:
            answer = self._answer(self._setup)
            if "unreadable" in answer:
                raise Unreadable(answer["unreadable"])
            self._is_set_up, self.reads_messages = True, answer["reads_messages"]
        return self._answer(value)

    def _answer(self, value: Any) -> dict[str, Any]:
        assert self._popen.stdin is not None
        assert self._popen.stdout is not None
        try:
            write_frame(self._popen.stdin, value)  # type: ignore[arg-type]
            answer = read_frame(self._popen.stdout)  # type: ignore[arg-type]
        except (EOFError, BrokenPipeError) as error:
            raise self._why() from error
        if "too_large" in answer:
            raise Exceeded(
                f"done within {MAX_MEMORY_BYTES >> 20} MiB, "
                f"with a prompt of at most {MAX_CHARACTERS} characters"
            )
        assert isinstance(answer, dict)
        return answer

    def _why(self) -> Exceeded | OSError:
        try:
            code = self._popen.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self._popen.kill()
            code = self._popen.wait()
        if code == -signal.SIGPROF:
            return Exceeded(f"done within {self._setup['max_cpu_s']:g} s of CPU time")
        if code > 0 and not self._is_set_up:  # Python's own end, before any chat
            return OSError(
                f"{self._python} ended with {code}: it needs Jinja and this package; name "
                f"another Python by {VARIABLE}"
            )
        return Exceeded(f"done without ending its process (which ended with {code})")

    def end(self) -> None:
        # The pipe breaks if the process has not read all of it.
        with suppress(BrokenPipeError), self._popen:
            self._popen.kill()


def _end_all(processes: set[_Process]) -> None:
    while processes:
        processes.pop().end()


# -- without a process -------------------------------------------------------------------

# Modules that render; a compiled template has no name. A callback of the garbage collector may run
# between their lines, and what it raises is lost with a warning. This module has such callbacks.
RENDERING = ("jinja2", "markupsafe", "json", "pyllama_raw.prompts")
# Lines that are watched take several times as long, and the collector's work for the whole program
# counts, too.
MAX_CPU_HERE_S = 4 * MAX_CPU_S


class _OutOfTime(BaseException):
    """The template has computed for too long; no handler of errors in it sees this."""


class TemplateHere:
    """As TemplateProcesses, without a process; any thread may call, one at a time renders."""

    def __init__(
        self, source: str, tokens: dict[str, str], max_cpu_s: float = MAX_CPU_HERE_S
    ) -> None:
        self._source, self._tokens, self._max_cpu_s = source, tokens, max_cpu_s
        self._template: CompiledTemplate | None = None
        self._lock = Lock()
        self._closed = False
        self.n_mended = 0
        self.reads_messages = True  # whether its prompts say anything of a chat

    def render(
        self, messages: list[Any], chat: dict[str, Any] | None = None
    ) -> tuple[str, str]:
        """The text and its origins; raises as TemplateProcesses.render()."""
        with self._running() as template:
            try:
                text, origins = template.render(messages, **(chat or {}))
            except Exception as error:
                reason = str(error) or type(error).__name__
                raise TemplateRefused(reason) from error
            self.n_mended += bool(template.mended)
        if len(text) > MAX_CHARACTERS:
            allowed = f"a prompt of at most {MAX_CHARACTERS} characters"
            raise Exceeded(f"done with {allowed}")
        return text, origins

    def takes_tools(self) -> bool:
        """Whether the template prints tools; raises as render()."""
        with self._running() as template:
            return template.takes.tools

    def close(self) -> None:
        """render() raises ClosedError from then on; what is being rendered goes on."""
        self._closed = True

    @contextmanager
    def _running(self) -> Iterator[CompiledTemplate]:
        """The template, while time is limited."""
        with self._lock:
            if self._closed:
                raise ClosedError("the engine is closed")
            try:
                with _limited(self._max_cpu_s):
                    yield self._template or self._compiled()
            except _OutOfTime:
                text = f"done within {self._max_cpu_s:g} s of CPU time"
                raise Exceeded(text) from None

    def _compiled(self) -> CompiledTemplate:
        try:
            from pyllama_raw.prompts.rendering.template import CompiledTemplate

            self._template = CompiledTemplate(self._source, self._tokens)
            self.reads_messages = self._template.reads_messages
        except Exception as error:
            raise Unreadable(str(error) or type(error).__name__) from error
        return self._template


@contextmanager
def _limited(max_cpu_s: float) -> Iterator[None]:
    """Raise _OutOfTime at a line that renders in this thread, behind *max_cpu_s* of its time."""
    until = thread_time() + max_cpu_s

    def trace(frame: FrameType, _event: str, _arg: object) -> Any:
        if thread_time() > until:
            module = str(frame.f_globals.get("__name__", ""))
            renders = module.startswith(RENDERING) and module != __name__
            if renders or not module:
                raise _OutOfTime
        return trace

    earlier = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(earlier)
