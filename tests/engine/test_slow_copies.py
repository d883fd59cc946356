"""States that are slow to copy, as from a device that is read cell by cell."""

import pytest

from pyllama_raw import EngineConfig, SamplingParams
from pyllama_raw.core.costs import SHARE, SLACK
from pyllama_raw.core.request import Finished, Request
from pyllama_raw.core.step import Load, Save
from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.opening import build
from pyllama_raw.native.libllama import lib
from pyllama_raw.options.config import CacheConfig, ContextConfig, SchedulerConfig
from tests.engine.test_executor import make_prompt
from tests.support.held import check_held
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

TARGET_S = 0.005
STEP_S, TOKEN_S = 0.0005, 0.0002  # of the clock of a run, beside its moves
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, seed=1)


@pytest.fixture
def slow_copies():
    """Sets the seconds that each copied cell takes."""
    yield lambda cell_s: lib.plr_slow_copies(round(cell_s * 1e9))
    lib.plr_slow_copies(0)


class Runs:
    """
    Requests, and what their steps captured and loaded.

    The clock knows what the moves took, and steps and tokens have a fixed price. So only captures
    are measured, and no decode is slow on a busy machine.
    """

    def __init__(self, parts) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.captured: list[int] = []  # tokens, by step that others wait for
        self.n_loaded = 0
        self._now = 0.0
        self._executor, self._scheduler = parts.executor, parts.scheduler
        self.open, self.close = parts.executor.open, parts.executor.close
        self.driver = Driver(parts.scheduler, self, self.now, self._take)

    def execute(self, plan):
        saves = [move for move in plan.moves if isinstance(move, Save)]
        n_captured = sum(save.stop - save.start for save in saves)
        if len(self._scheduler._roster.alive) > 1:  # others wait for the step
            self.captured.append(n_captured)
        self.n_loaded += sum(isinstance(move, Load) for move in plan.moves)
        result = self._executor.execute(plan)
        self._now += STEP_S + TOKEN_S * plan.n_tokens + result.moves_s
        return result

    def now(self) -> float:
        return self._now

    def _take(self, events) -> None:
        for event in events:
            if not isinstance(event, Finished):
                self.tokens.setdefault(event.request_id, []).extend(event.tokens)


def run(name: str, mode: str) -> Runs:
    """24 requests over 8 slots, and the first ones again."""
    config = EngineConfig(
        context=ContextConfig(n_ctx=8 * 256, n_threads=1),
        scheduler=SchedulerConfig(n_slots=8, target_step_s=TARGET_S),
        cache=CacheConfig(mode=mode),
        deterministic=True,
    )
    parts = build(tiny_model(name), config)
    try:
        runs = Runs(parts)
        for first in (0, 100):
            requests = [
                Request(first + i, make_prompt(i, 90 + 3 * i), 8, sampling=PARAMS)
                for i in range(24)
            ]
            runs.driver.add(requests, runs.now())
            while runs.driver.step():
                parts.scheduler.check_integrity()
        check_held(parts)
        return runs
    finally:
        parts.release()


@pytest.mark.parametrize("name", ["llama", "jamba"])
@pytest.mark.parametrize("cell_s", [0.00001, 0.0001, 0.001])
def test_no_step_is_long_by_captures(slow_copies, name, cell_s):
    """
    Where others wait captures take the part of a step that they are given, and outputs are as
    without any.
    """
    expected = run(name, "off")
    slow_copies(cell_s)

    found = run(name, "snapshots")

    assert found.tokens == expected.tokens
    assert max(found.captured) * cell_s <= (SHARE + SLACK) * TARGET_S


def test_what_is_dearer_to_copy_than_to_compute_is_neither_saved_nor_loaded(
    slow_copies,
):
    """
    20 ms for each cell would stall all requests for a minute.
    """
    slow_copies(0.02)

    found = run("llama", "snapshots")

    assert (sum(found.captured), found.n_loaded) == (0, 0)
