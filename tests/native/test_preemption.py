"""Requests that lose their slots many times get the tokens that they get alone."""

import os
from array import array
from itertools import count
from pathlib import Path
from random import Random
from types import SimpleNamespace

import pytest

from pyllama_raw import EngineConfig, SamplingParams
from pyllama_raw.core.request import Event, Finished, Request
from pyllama_raw.core.stats import SchedulerStats
from pyllama_raw.engine import operations
from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.opening import build
from pyllama_raw.options.config import CacheConfig, ContextConfig, SchedulerConfig
from tests.support.held import check_held
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

N_REQUESTS = int(os.environ.get("PYLLAMA_RAW_TEST_CASES", "24"))
N_DEFAULT = int(os.environ.get("PYLLAMA_RAW_TEST_CASES", "8"))
N_APART = 3  # steps between two arrivals: slots are taken again when the next one comes
N_SLOTS, PRESSURE = 3, 3  # so many times as many requests as slots


@pytest.fixture(autouse=True)
def quick_copies(monkeypatch):
    """
    Copies of states take a microsecond.

    On a busy machine one may take as long as a step, and then no swap pays.
    """
    ticks = count()
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) * 1e-6)
    monkeypatch.setattr(operations, "time", clock)


def make_requests(seed: int, n_requests: int, most: int = 40) -> list[Request]:
    """
    Some begin alike, some are drawn with seeds, some are greedy.

    Args:
        most: tokens of an output, but one.
    """
    rng = Random(seed)  # noqa: S311
    requests = []
    for request_id in range(n_requests):
        shared = [5 + i * 3 % 200 for i in range(rng.choice([0, 0, 40]))]
        own = [rng.randrange(3, 250) for _ in range(rng.randrange(2, 60))]
        sampling = SamplingParams(
            temperature=rng.choice([0.0, 1.2]), seed=request_id, ignore_eos=True
        )
        requests.append(
            Request(
                request_id,
                array("i", [*shared, *own]),
                rng.randrange(1, most),
                sampling=sampling,
                priority=rng.randrange(100) - 10 * request_id,
            )
        )
    return requests


def play(
    model: Path,
    requests: list[Request],
    n_open: int,
    max_bytes: int,
    n_apart: int = N_APART,
) -> tuple[dict[int, list[int]], SchedulerStats]:
    """Tokens by request_id, with *n_open* requests at a time."""
    config = EngineConfig(
        context=ContextConfig(n_ctx=N_SLOTS * 256, n_threads=1),
        scheduler=SchedulerConfig(
            n_slots=N_SLOTS, preempt="priority", context_full="shift"
        ),
        cache=CacheConfig(max_bytes=max_bytes),
        deterministic=True,
    )
    parts = build(model, config)
    tokens: dict[int, list[int]] = {}
    open_ids: set[int] = set()

    def take(events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Finished):
                assert event.error is None
                open_ids.remove(event.request_id)
            else:
                tokens[event.request_id] += event.tokens

    driver = Driver(parts.scheduler, parts.executor, lambda: 0.0, take)
    left = iter(requests)
    try:
        for step in count():
            comes = not open_ids or step % n_apart == 0
            room = comes and len(open_ids) < n_open
            if room and (request := next(left, None)) is not None:
                tokens[request.request_id] = []
                open_ids.add(request.request_id)
                driver.add([request], 0.0)
            if not open_ids:
                break
            driver.step()
            driver.scheduler.check_integrity()
            if step % 16 == 0:
                check_held(parts)
        check_held(parts)
        return tokens, parts.scheduler.stats()
    finally:
        parts.release()


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba", "jamba"])
@pytest.mark.parametrize("max_bytes", [2**26, 0])
def test_tokens_are_those_of_a_run_without_pressure(name, max_bytes):
    """
    Swapped or computed again: neither the tokens nor what is drawn tells of it.
    """
    requests = make_requests(1, N_REQUESTS)
    alone, calm = play(tiny_model(name), requests, 1, max_bytes)
    pressed, stats = play(tiny_model(name), requests, N_SLOTS * PRESSURE, max_bytes)

    assert pressed == alone
    assert calm.preempted == 0
    assert stats.preempted > N_REQUESTS // 4
    assert (stats.swapped > 0) == (max_bytes > 0)


@pytest.mark.parametrize("max_bytes", [2**26, 0])
def test_shifted_outputs_are_those_of_a_run_without_pressure(max_bytes):
    """
    Who was shifted is not preempted, because nothing brings back what it held.
    """
    requests = make_requests(2, N_REQUESTS, most=400)
    path = tiny_model("llama")
    alone, calm = play(path, requests, 1, max_bytes)
    pressed, stats = play(path, requests, N_SLOTS * PRESSURE, max_bytes, 60)

    assert pressed == alone
    assert (calm.preempted, calm.shifted) == (0, stats.shifted)
    assert min(stats.preempted, stats.shifted) > N_REQUESTS // 4


@pytest.mark.parametrize(
    "max_bytes", [2**26, pytest.param(0, marks=pytest.mark.nightly)]
)
def test_the_default_model_keeps_its_tokens(model_path, max_bytes):
    """
    The same of a model whose weights have 4 bits, as most do.
    """
    requests = make_requests(1, N_DEFAULT)
    alone, _ = play(model_path, requests, 1, max_bytes)
    pressed, stats = play(model_path, requests, N_SLOTS * PRESSURE, max_bytes)

    assert pressed == alone
    assert stats.preempted > N_DEFAULT // 4
    assert (stats.swapped > 0) == (max_bytes > 0)
