"""Steps that are begun before they are planned: faster, and otherwise as if they were not."""

from random import Random

import pytest

from pyllama_raw import EngineConfig, SamplingParams
from pyllama_raw.config import ContextConfig, SchedulerConfig
from pyllama_raw.core.request import Finished, Request
from pyllama_raw.core.step import StepPlan
from pyllama_raw.engine.opening import build
from tests.engine.test_executor import make_prompt
from tests.tiny import tiny_model

pytestmark = pytest.mark.native

SAMPLED = SamplingParams(temperature=1.5, seed=7, repeat_penalty=1.2, ignore_eos=True)


N_ADDED = 12


def several_at_once(plan: StepPlan, n_quiet: int) -> StepPlan:
    return plan._replace(goes_on=min(plan.goes_on, n_quiet))


def each_of_several(plan: StepPlan, n_quiet: int) -> StepPlan:
    return several_at_once(plan, n_quiet)._replace(each=True)


def one_ahead(plan: StepPlan, n_quiet: int) -> StepPlan:
    return plan._replace(goes_on=min(plan.goes_on, 1))


def none_ahead(plan: StepPlan, n_quiet: int) -> StepPlan:
    return plan._replace(goes_on=0)


class Visits:
    """Before which steps somebody comes or is cancelled."""

    def __init__(self, seed: int) -> None:
        rng = Random(seed)  # noqa: S311
        self.comes = [rng.random() < 0.15 for _ in range(2000)]
        self.cancels = [rng.random() < 0.05 for _ in range(2000)]

    def n_quiet(self, step: int) -> int:
        """Steps from *step* on until the next one."""
        later = range(step + 1, len(self.comes))
        return next(i for i in later if self.comes[i] or self.cancels[i]) - step


def play(name: str, seed: int, deterministic: bool, changed) -> tuple[dict, object]:
    """
    Requests that come and go at random steps; tokens by request_id, and the times.
    """
    config = EngineConfig(
        context=ContextConfig(n_ctx=256, n_threads=1),
        scheduler=SchedulerConfig(n_slots=3),
        deterministic=deterministic,
    )
    parts = build(tiny_model(name), config)
    scheduler, executor = parts.scheduler, parts.executor
    rng, visits = Random(seed), Visits(seed)  # noqa: S311
    tokens, n_added, step = {}, 0, -1
    try:
        while n_added < N_ADDED or scheduler.has_work:
            step += 1
            comes = visits.comes[step] or not scheduler.has_work
            if n_added < N_ADDED and comes:
                prompt = make_prompt(rng.randrange(3), rng.randrange(1, 50))
                n_tokens = rng.randrange(1, 40)
                request = Request(n_added, prompt, n_tokens, sampling=SAMPLED)
                executor.open(request)
                scheduler.add(request, 0.0)
                tokens[n_added] = []
                n_added += 1
            if visits.cancels[step]:
                scheduler.cancel(rng.randrange(n_added), 0.0)
            plan = scheduler.schedule(0.0)
            events = scheduler.take_events()
            if plan:
                plan = changed(plan, visits.n_quiet(step))
                n_before = scheduler.stats().steps
                result = executor.execute(plan)
                while result is not None:
                    events += scheduler.apply(plan, result, 0.0)
                    result = result.rest and result.rest()
                step += scheduler.stats().steps - n_before - 1
            for event in events:
                if isinstance(event, Finished):
                    assert event.error is None
                    executor.close(event.request_id)
                else:
                    tokens[event.request_id] += event.tokens
            scheduler.check_integrity()
        return tokens, executor.times
    finally:
        parts.release()


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba", "jamba"])
@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_no_output_depends_on_it(name, deterministic, seed):
    """
    Whoever comes, leaves or runs out of cells: the tokens are those of steps one by one.
    """
    ahead, times = play(name, seed, deterministic, one_ahead)
    several, _ = play(name, seed, deterministic, several_at_once)
    each, _ = play(name, seed, deterministic, each_of_several)
    plain, plain_times = play(name, seed, deterministic, none_ahead)

    assert ahead == plain
    assert several == plain
    assert each == plain
    assert plain_times.n_dropped == 0
    assert (times.n_dropped > 0) == (name == "llama")  # others cannot cut a token off
