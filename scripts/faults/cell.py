"""
One run with one call that fails, and what came of it.

What must hold: it ends; nobody gets another output than without the failure; callers are told by
our own errors, by MemoryError, or by the error of that call; context and core agree on each slot, and no cell is left; when
all is closed no handle, thread or open file is left.
"""

from __future__ import annotations

import gc
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from time import monotonic, sleep

import anyio

from pyllama_raw import AsyncEngine, PyllamaError
from pyllama_raw.engine.parts import EngineParts
from scripts.faults.calls import OTHER_DIGITS, most_ended
from scripts.faults.lib import RAISES, Fault, FaultyLib, InjectedError
from scripts.faults.runs import Run, prepare
from tests.support.held import check_held

HANG_S = 20.0
N_ROUNDS = 2
OPENED = "opened"
TYPED = (PyllamaError, MemoryError, InjectedError)  # what callers may be told


@dataclass(frozen=True, slots=True)
class Failed:
    """An error, without what its traceback keeps alive."""

    said: str
    is_ours: bool

    @classmethod
    def of(cls, error: BaseException) -> Failed:
        ours = isinstance(error, TYPED)
        return cls(f"{type(error).__name__}: {error}", ours)


@dataclass
class Outcome:
    """What a run gave: per opening the error of open() or OPENED, and per job its output."""

    openings: list[str] = field(default_factory=list)
    outputs: list[object] = field(default_factory=list)
    errors: list[Failed] = field(default_factory=list)
    n_stopped: int = 0  # engines that ended by themselves
    broken: list[str] = field(default_factory=list)  # laws

    def compared(self, undisturbed: Outcome) -> None:
        """Note whether outputs are those of *undisturbed*, but for those that ended."""
        for output, other in zip(self.outputs, undisturbed.outputs, strict=False):
            if not isinstance(output, Failed) and output != other:
                self.broken.append(f"wrong output: {output} instead of {other}")


class Ground:
    """What the process has while no engine is open."""

    def __init__(self, faulty: FaultyLib) -> None:
        self._faulty = faulty
        self._threads = set(threading.enumerate())
        self._n_tasks = _n_tasks()
        self._n_files = _n_files()

    def left(self) -> list[str]:
        """What is left of a run; it is forgotten, so that the next run is not blamed."""
        _wait(lambda: not set(threading.enumerate()) - self._threads)
        gc.collect()
        gc.collect()  # what a finaliser has brought back to life goes now
        _wait(lambda: _n_tasks() <= self._n_tasks and not self._faulty.live)
        threads = set(threading.enumerate()) - self._threads
        left = [f"thread {thread.name}" for thread in threads]
        self._threads |= threads
        if not threads and _n_tasks() > self._n_tasks:
            left.append(f"{_n_tasks() - self._n_tasks} native threads")
        self._n_tasks = max(self._n_tasks, _n_tasks())
        if _n_files() > self._n_files:
            left.append(f"{_n_files() - self._n_files} open files")
        self._n_files = max(self._n_files, _n_files())
        counts = Counter(self._faulty.live.values())
        left += [f"{n} of {name}" for name, n in counts.items()]
        self._faulty.live.clear()
        return left


def play(run: Run, faulty: FaultyLib, fault: Fault | None) -> Outcome:
    """Play *run* with one failure."""
    outcome = Outcome()
    faulty.begin(fault)
    try:
        anyio.run(_play, run, outcome)
    except TimeoutError:
        outcome.broken.append("hang")
    finally:
        faulty.begin(None)
    return outcome


def judge(outcome: Outcome, undisturbed: Outcome, fault: Fault, run: Run) -> None:
    """Note what of *outcome* must not be."""
    if run.config.deterministic or fault.name not in OTHER_DIGITS:
        outcome.compared(undisturbed)
    for error in outcome.errors:
        if not error.is_ours:
            outcome.broken.append(f"told by {error.said}")
    has_opened = all(opening == OPENED for opening in outcome.openings)
    max_ended = max(most_ended(fault.name, fault.way), run.opens_later)
    if fault.way != RAISES and has_opened and len(outcome.errors) > max_ended:
        outcome.broken.append(
            f"{len(outcome.errors)} requests ended, at most {max_ended}: {outcome.errors[0].said}"
        )


async def _play(run: Run, outcome: Outcome) -> None:
    with anyio.fail_after(HANG_S), run.folder() as folder:
        for _ in range(run.n_opens):
            try:
                async with AsyncEngine.open(run.model, run.config_in(folder)) as engine:
                    outcome.openings.append(OPENED)
                    await _ask(run, engine, outcome)
            except TYPED as error:
                outcome.openings.append(type(error).__name__)


async def _ask(run: Run, engine: AsyncEngine, outcome: Outcome) -> None:
    try:
        await prepare(run, engine)
    except TYPED as error:
        outcome.errors.append(Failed.of(error))
        return
    for _ in range(N_ROUNDS):
        outputs: list[object] = [None] * len(run.jobs)

        async def one(index: int, outputs: list[object] = outputs) -> None:
            try:
                outputs[index] = await run.jobs[index](engine)
            except Exception as error:  # noqa: BLE001 - it is judged
                outputs[index] = failed = Failed.of(error)
                outcome.errors.append(failed)

        async with anyio.create_task_group() as group:
            for index in range(len(run.jobs)):
                group.start_soon(one, index)
        outcome.outputs += outputs
    if engine.error is not None:
        outcome.n_stopped += 1
    else:
        await engine._sessions.between_steps(partial(_check_idle, engine, outcome))


def _check_idle(engine: AsyncEngine, outcome: Outcome, parts: EngineParts) -> None:
    """Nothing is left of requests, in the thread of the engine."""
    if not hasattr(parts.executor, "lanes"):  # a model that makes vectors only
        return
    try:
        parts.scheduler.check_integrity()
        check_held(parts)
        parts.scheduler.clear_cache()
        slots = parts.scheduler.memory.slots
        assert slots.cells.n_used == 0, f"{slots.cells.n_used} cells"
        assert not parts.executor._open.by_id, "samplers"
        assert not engine._thread.records.all(), "requests"
    except AssertionError as error:
        outcome.broken.append(f"left in the engine: {error}")


def _n_tasks() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def _n_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def _wait(holds: Callable[[], bool], most_s: float = 1.0) -> None:
    end = monotonic() + most_s
    while not holds() and monotonic() < end:
        sleep(0.001)
