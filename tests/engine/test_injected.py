"""Failures of single calls of libllama, anywhere: the engine goes on, and no token changes."""

from array import array
from itertools import count
from random import Random

import pytest

from pyllama_raw import EngineConfig, SamplingParams
from pyllama_raw.core.request import Finished, Request
from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.opening import build
from pyllama_raw.errors import SnapshotFailed
from pyllama_raw.native.context import Context, StepOutcome
from pyllama_raw.options.config import CacheConfig, ContextConfig, SchedulerConfig
from tests.support.held import check_held
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

N_RUNS, N_ROUNDS = 30, 2  # the second round finds what the first one left
CALLS = ("restore", "capture", "state_bytes", "step")
CODES = (1, 2, -1, -3)
NAMES = ("llama", "gemma3", "mamba", "jamba")


class Faults:
    """Fails some calls of one method of all contexts: a step once, the others often."""

    def __init__(self, monkeypatch, seed: int) -> None:
        self._rng = Random(seed)  # noqa: S311
        self.call = CALLS[seed % len(CALLS)]
        self._whole = getattr(Context, self.call)
        self._left = 0
        self.n_failed = 0

        def run(*args, **named):
            return self._run(*args, **named)

        monkeypatch.setattr(Context, self.call, run)

    def begin(self) -> None:
        """From now on."""
        self._left = 1 if self.call == "step" else 1000

    def _run(self, *args, **named):
        if not self._left or self._rng.randrange(8 if self.call == "step" else 2):
            return self._whole(*args, **named)
        self._left -= 1
        self.n_failed += 1
        if self.call == "step":
            args[0].drop()
            return StepOutcome(self._rng.choice(CODES), [], [], 0, 0)
        raise SnapshotFailed(self.call, 0, "injected")


def make_round(number: int) -> list[Request]:
    """Three requests for two slots; the last is urgent, and two begin alike."""
    sampling = SamplingParams(temperature=1.1, seed=number, ignore_eos=True)
    start = [3 + 7 * i % 200 for i in range(64)]
    own = ([9, 10, 11], [30 + number, 31, 32, 33], [50, 51, 52 + number])
    prompts = (start + own[0], start[:40] + own[1], own[2] * 20)
    return [
        Request(
            10 * number + i,
            array("i", prompt),
            16,
            sampling=sampling,
            priority=-(i // 2),
        )
        for i, prompt in enumerate(prompts)
    ]


def play(name: str, begin=lambda: None) -> tuple[dict[int, list[int]], list[Finished]]:
    """Tokens by request_id, and how requests ended; the urgent ones come late."""
    config = EngineConfig(
        context=ContextConfig(n_ctx=2 * 256, n_threads=1),
        scheduler=SchedulerConfig(n_slots=2, preempt="priority"),
        cache=CacheConfig(mode="snapshots", max_bytes=2**24),
        deterministic=True,
    )
    parts = build(tiny_model(name), config)
    begin()
    tokens: dict[int, list[int]] = {}
    ends: list[Finished] = []

    def take(events):
        for event in events:
            if isinstance(event, Finished):
                ends.append(event)
            else:
                tokens[event.request_id] += event.tokens

    driver = Driver(parts.scheduler, parts.executor, lambda: 0.0, take)
    try:
        for number in range(N_ROUNDS):
            requests = make_round(number)
            tokens |= {request.request_id: [] for request in requests}
            driver.add(requests[:2], 0.0)
            for step in count():
                if step == 6:
                    driver.add(requests[2:], 0.0)
                if not driver.step() and step > 6:
                    break
                driver.scheduler.check_integrity()
            check_held(parts)
    finally:
        parts.release()
    return tokens, ends


@pytest.mark.parametrize("name", NAMES)
def test_no_failure_of_a_call_stops_the_engine_or_changes_a_token(name):
    """
    A restore, a capture, the size of a state or a decode: all is as if it had not failed.
    """
    whole, _ = play(name)
    n_failed = dict.fromkeys(CALLS, 0)

    for seed in range(N_RUNS):
        with pytest.MonkeyPatch.context() as monkeypatch:
            faults = Faults(monkeypatch, seed)
            tokens, ends = play(name, faults.begin)
        n_failed[faults.call] += faults.n_failed

        assert (seed, tokens) == (seed, whole)
        assert [end.error for end in ends] == [None] * 3 * N_ROUNDS

    assert all(n_failed.values())
