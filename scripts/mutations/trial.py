"""
One file, one process: what an engine makes of it.

Every trial is a fork of a process that has imported everything, and that has no threads: so
it takes milliseconds, and what happens in it harms nobody.
"""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import anyio

# Imported here, so that no trial has to: what an engine needs.
import anyio._backends._asyncio

from pyllama_raw import (
    AsyncEngine,
    ContextConfig,
    EngineConfig,
    PyllamaError,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.errors import EngineStopped
from pyllama_raw.native import libllama
from pyllama_raw.native.model import Model

LOOK_S = 0.001  # between two looks at what runs
# Of a trial, 20 s: looks, because who stops this process for a while stops the trials, too.
MAX_LOOKS = 20_000
MAX_BYTES = 6 * 2**30  # of addresses, those of threads and libraries included
PROMPTS = ("The quick brown fox", "a")
CONFIG = EngineConfig(
    context=ContextConfig(n_ctx=256, n_batch=64, n_ubatch=64, n_threads=2),
    scheduler=SchedulerConfig(n_slots=2),
)
WORKS, REFUSED, DEFECT = "works", "refused", "DEFECT"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one file."""

    index: int
    said: str  # what was done to the file
    kind: str  # WORKS, REFUSED or DEFECT
    text: str  # the error, signal or output


def prepare() -> None:
    """
    Load what every trial needs, and start no thread.

    Threads of OpenMP sleep while they wait: there are more of them than CPUs.
    """
    os.environ["OMP_WAIT_POLICY"] = "passive"  # libgomp reads it when it is loaded
    libllama.load()


@cache
def text_model(path: Path) -> Model:
    """A model that trials share: load it in the process that they are forks of."""
    return Model.load(path, n_gpu_layers=0)


def run_all(
    files: Iterable[tuple[int, bytes, str]],
    n_workers: int = 2,
    attempt: Callable[[Path], str] | None = None,
) -> Iterator[Outcome]:
    """
    Try each (index, content, what was done), *n_workers* at a time.

    Args:
        attempt: what is done with the file; gives a text. None: an engine is opened on it.
    """
    attempt = attempt or _try
    prepare()
    running: dict[int, tuple[int, str, Path, int]] = {}
    n_looks = 0
    with TemporaryDirectory(dir=_fast_folder()) as folder:
        source = iter(files)
        left = True
        while left or running:
            while left and len(running) < n_workers:
                item = next(source, None)
                if item is None:
                    left = False
                    break
                index, content, changes = item
                path = Path(folder) / f"{index}.gguf"
                path.write_bytes(content)
                last_look = n_looks + MAX_LOOKS
                running[_start(path, attempt)] = index, changes, path, last_look
            time.sleep(LOOK_S)
            n_looks += 1
            yield from _collect(running, n_looks)


def _fast_folder() -> str | None:
    return "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108


def _start(path: Path, attempt: Callable[[Path], str]) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:  # in the child: nothing may return
        _limit()
        text = _told(attempt, path)
        path.with_suffix(".txt").write_text(text, encoding="utf-8", errors="replace")
    finally:
        os._exit(0)


def _limit() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)


def _told(attempt: Callable[[Path], str], path: Path) -> str:
    """The kind of the outcome, and a text in the next line."""
    try:
        return f"{WORKS}\n{attempt(path)}"
    except PyllamaError as error:
        cause = error.__cause__
        if isinstance(error, EngineStopped) and not isinstance(cause, PyllamaError):
            return f"{DEFECT}\nuntyped {cause!r}"
        return f"{REFUSED}\n{type(error).__name__}: {error}"
    except BaseException as error:  # noqa: BLE001 -- told to the parent
        return f"{DEFECT}\nuntyped {error!r}"


def _try(path: Path) -> str:
    return str(anyio.run(_generate, path))


async def _generate(path: Path) -> list[str]:
    params = SamplingParams(max_tokens=4, temperature=0)
    try:
        async with AsyncEngine.open(path, CONFIG) as engine:
            results = await engine.complete_many(list(PROMPTS), params)
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    return [result.text for result in results]


def _collect(
    running: dict[int, tuple[int, str, Path, int]], n_looks: int
) -> Iterator[Outcome]:
    """Outcomes of the processes that have ended; those too late are ended."""
    for pid, (index, changes, path, last_look) in list(running.items()):
        ended, status = os.waitpid(pid, os.WNOHANG)
        late = not ended and n_looks > last_look
        if late:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if ended or late:
            del running[pid]
            kind, text = _read(path, status, late=late)
            yield Outcome(index, changes, kind, text)


def _read(path: Path, status: int, *, late: bool) -> tuple[str, str]:
    answer = path.with_suffix(".txt")
    text = answer.read_text(encoding="utf-8") if answer.exists() else ""
    for used in (path, answer):
        with suppress(FileNotFoundError):
            used.unlink()
    if late:
        return DEFECT, "hang"
    if os.WIFSIGNALED(status):
        return DEFECT, f"signal {signal.Signals(os.WTERMSIG(status)).name}"
    kind, _, tail = text.partition("\n")
    return (kind, tail) if kind else (DEFECT, "ended without an answer")


if sys.platform == "win32":
    raise ImportError("trials need fork")
