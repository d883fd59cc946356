"""Steps that are begun before they are planned: faster, and otherwise as if they were not."""

from collections.abc import Callable
from random import Random

import pytest

from pyllama_raw import EngineConfig, SamplingParams
from pyllama_raw.core.request import Event, Finished, Request
from pyllama_raw.core.stats import StepTimes
from pyllama_raw.core.step import StepPlan
from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.opening import build
from pyllama_raw.options.config import CacheConfig, ContextConfig, SchedulerConfig
from tests.engine.test_executor import make_prompt
from tests.support.held import check_held
from tests.support.prices import capture_all
from tests.support.products import CLASSES, in_turn
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

SAMPLED = SamplingParams(temperature=1.5, seed=7, repeat_penalty=1.2, ignore_eos=True)

N_ADDED = 12


def as_planned(plan: StepPlan) -> StepPlan:
    return plan


def none_ahead(plan: StepPlan) -> StepPlan:
    return plan._replace(steady=False)


def all_ahead(plan: StepPlan) -> StepPlan:
    return plan._replace(steady=True)


def play(
    name: str, seed: int, deterministic: bool, changed: Callable[[StepPlan], StepPlan]
) -> tuple[dict, StepTimes]:
    """
    Requests that come and go at random steps; tokens by request_id, and the times.

    Those that are cancelled have as many tokens as steps there were, so they are left out.
    """
    config = EngineConfig(
        context=ContextConfig(n_ctx=256, n_threads=1),
        # Budgets and captures that follow the clock would make other steps, and so other last
        # digits: neither is of this test.
        scheduler=SchedulerConfig(n_slots=3, token_budget=64),
        cache=CacheConfig(mode="snapshots" if deterministic else "live"),
        deterministic=deterministic,
    )
    parts = build(tiny_model(name), config)
    capture_all(parts)
    rng, visits = Random(seed), Random(seed)  # noqa: S311
    tokens, n_added, cancelled = {}, 0, set()

    def take(events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Finished):
                assert event.error is None
            else:
                tokens[event.request_id] += event.tokens

    execute = parts.executor.execute
    parts.executor.execute = lambda plan: execute(changed(plan))
    driver = Driver(parts.scheduler, parts.executor, lambda: 0.0, take)
    try:
        while n_added < N_ADDED or driver.scheduler.alive:
            comes = visits.random() < 0.15 or not driver.scheduler.alive
            if n_added < N_ADDED and comes:
                prompt = make_prompt(rng.randrange(3), rng.randrange(1, 50))
                n_tokens = rng.randrange(1, 40)
                tokens[n_added] = []
                driver.add([Request(n_added, prompt, n_tokens, sampling=SAMPLED)], 0.0)
                n_added += 1
            if visits.random() < 0.05:
                cancelled.add(number := visits.randrange(n_added))
                driver.cancel(number)
            driver.step()
            driver.scheduler.check_integrity()
        check_held(parts)
        whole = {n: t for n, t in tokens.items() if n not in cancelled}
        return whole, parts.executor.times
    finally:
        parts.release()


@pytest.mark.parametrize(
    ("name", "deterministic", "seed"),
    in_turn(CLASSES, (True, False), range(4), always=lambda _name, _, seed: seed == 0),
)
def test_no_output_depends_on_it(name, deterministic, seed):
    """
    Whoever comes, leaves or runs out of cells: the tokens are those of steps one by one,
    and a wrong hint changes none of them.
    """
    ahead, times = play(name, seed, deterministic, as_planned)
    misled, _ = play(name, seed, deterministic, all_ahead)
    plain, plain_times = play(name, seed, deterministic, none_ahead)

    assert ahead == plain
    assert misled == plain
    assert plain_times.dropped_steps == 0
    assert (times.dropped_steps > 0) == (
        name == "llama"
    )  # others cannot cut a token off
