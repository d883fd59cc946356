"""
Running sequences without a model: a scheduler, and an engine thread on the fake executor.

Every request has a prompt of its own and does not end within a measurement.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from threading import Event as Signal
from time import thread_time

from pyllama_raw.core.memory.cache import PrefixCache
from pyllama_raw.core.memory.slots import ContextLimits
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.request import Request
from pyllama_raw.core.scheduling.scheduler import Scheduler
from pyllama_raw.core.step import Computed, Sampled, StepPlan, StepResult
from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.mailbox import Stream
from pyllama_raw.engine.thread import EngineThread
from pyllama_raw.testing import FakeExecutor, FakeVocab, fake_limits, fake_parts

N_PROMPT = 16
N_CTX_SLOT = 2**14
MAX_TOKENS = N_CTX_SLOT // 2
N_WARMUP = 20  # steps before a time counts


def limits(n_slots: int) -> ContextLimits:
    """Unified memory in which nothing gets short; a step takes all prompts at once."""
    return fake_limits(
        n_slots=n_slots,
        n_ctx_slot=N_CTX_SLOT,
        n_batch=n_slots * N_PROMPT,
        n_cells=n_slots * N_CTX_SLOT,
    )


def make_scheduler(n_slots: int) -> Scheduler:
    """With a prefix cache, as engines have one."""
    return Scheduler(
        limits(n_slots),
        FakeVocab().pieces,
        token_budget=n_slots * N_PROMPT,
        cache=PrefixCache(SnapshotKind.RANGE, max_bytes=2**30, max_entries=2**16),
    )


def request(number: int, max_tokens: int = MAX_TOKENS) -> Request:
    """Its prompt begins with its number."""
    tokens = array("i", [number, *range(N_PROMPT - 1)])
    return Request(number, tokens, max_tokens, stop_token_ids=frozenset({257}))


def answer(plan: StepPlan) -> StepResult:
    """A token for each row."""
    return StepResult(
        outputs=tuple(
            Sampled((97,)) if work.samples else Computed() for work in plan.works
        )
    )


class Answering(FakeExecutor):
    """Computes nothing."""

    def execute(self, plan: StepPlan) -> StepResult:
        return answer(plan)


def running_scheduler(n_running: int, n_waiting: int = 0) -> Scheduler:
    """*n_running* sequences decode in as many slots, *n_waiting* more wait."""
    scheduler = make_scheduler(n_running)
    scheduler.add_all([request(i) for i in range(n_running + n_waiting)], 0.0)
    driver = Driver(
        scheduler, Answering(scheduler.limits), lambda: 0.0, lambda *_: None
    )
    for _ in range(N_WARMUP):
        driver.step()
    return scheduler


class TimedExecutor(Answering):
    """
    Notes the CPU time of its thread when a step ends and when the next one begins.

    What lies between is the engine's work: apply, delivery, commands, schedule. The
    fake's own work, which grows with what slots hold, is not done.
    """

    def __init__(self, n_slots: int, n_steps: int) -> None:
        super().__init__(limits(n_slots))
        self.done = Signal()
        self.host_s: list[float] = []
        self._n_steps = n_steps
        self._left = 0.0

    def execute(self, plan: StepPlan) -> StepResult:
        entered = thread_time()
        self.n_steps += 1
        if self.n_steps > N_WARMUP:
            self.host_s.append(entered - self._left)
        if len(self.host_s) == self._n_steps:
            self.done.set()
        result = answer(plan)
        self._left = thread_time()
        return result


class ReadingLoop:
    """Stands for an event loop whose readers are woken for every token and take it."""

    def call_soon_threadsafe(self, _: object, streams: list[Stream]) -> None:
        """Thread: the engine's."""
        for stream in streams:
            stream.events.clear()


def engine_host_s(n_running: int, n_steps: int) -> list[float]:
    """CPU seconds of the engine thread for each of *n_steps*, the executor's left out."""
    executor = TimedExecutor(n_running, n_steps)
    parts = replace(fake_parts(executor), scheduler=make_scheduler(n_running))
    thread = EngineThread(parts)
    loop = ReadingLoop()
    for number in range(n_running):
        thread.submit_all((request(number),), Stream(loop))
    try:
        executor.done.wait()
    finally:
        thread.close()
        thread.join()
    return executor.host_s[:n_steps]
