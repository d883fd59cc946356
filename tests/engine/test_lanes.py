"""Where tokens are chosen: the same ones everywhere, and told for each request."""

from random import Random
from types import SimpleNamespace

import pytest

from pyllama_raw import EngineConfig, SamplingParams
from pyllama_raw.core.request import Finished, Request, SamplerUse
from pyllama_raw.core.step import DecodeStatus, StepResult
from pyllama_raw.engine import sampling as rules
from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.opening import build
from pyllama_raw.errors import NativeError, NoKVSpace
from pyllama_raw.native.context import Context
from pyllama_raw.options.config import (
    CacheConfig,
    ContextConfig,
    ModelConfig,
    SchedulerConfig,
)
from tests.engine.test_executor import make_prompt
from tests.support.held import check_held
from tests.support.prices import capture_all
from tests.support.tiny import HYBRID, RECURRENT, tiny_model

pytestmark = pytest.mark.native

LANES = SamplingParams(seed=5, max_tokens=6, ignore_eos=True)
ALL = SamplingParams(seed=5, max_tokens=6, ignore_eos=True, logprobs=2)
KINDS = (
    {"temperature": 0.0},
    {},
    {"top_k": 5, "temperature": 1.5, "min_tokens": 3},
    {"top_k": 20, "xtc_probability": 0.5, "xtc_threshold": 0.02, "min_keep": 2},
    {"stages": ("top_k", "penalties", "temperature"), "repeat_penalty": 1.5},
    {"top_k": 30, "dynatemp_range": 0.5, "typical_p": 0.9},
    {"adaptive_target": 0.2},
)
WHOLE_ROWS = ({"logprobs": 2}, {"top_k": 0}, {"repeat_penalty": 1.3})


@pytest.fixture
def make_parts():
    """Builds engines of 2 slots that are freed after the test."""
    made = []

    def make(name="llama", *, sampler_placement="backend", n_ctx=512, n_slots=2):
        config = EngineConfig(
            context=ContextConfig(n_ctx=n_ctx, n_threads=1),
            # A budget that follows the clock would have requests cancelled at other tokens.
            scheduler=SchedulerConfig(n_slots=n_slots, token_budget=64),
            sampler_placement=sampler_placement,
            deterministic=True,
        )
        made.append(build(tiny_model(name), config))
        capture_all(made[-1])
        return made[-1]

    yield make
    for parts in made:
        parts.release()


class Runs:
    """What came of requests, some of whose steps find no space or are aborted."""

    def __init__(self, parts, fails=lambda: None) -> None:
        self.tokens, self.used, self.failed = {}, {}, set()
        self._executor, self._fails = parts.executor, fails
        self.driver = Driver(parts.scheduler, self, lambda: 0.0, self._take)
        self.open, self.close = parts.executor.open, parts.executor.close

    def add(self, *requests: Request) -> None:
        self.tokens |= {request.request_id: [] for request in requests}
        self.driver.add(requests, 0.0)

    def execute(self, plan) -> StepResult:
        fails = self._fails()
        if fails == "space":
            self._executor.execute(plan._replace(works=()))
            return StepResult(DecodeStatus.NO_SPACE)
        if fails == "abort":
            self._executor._drop()  # what was begun might be over already, or not
            for work in plan.works:
                self._executor.stop(work.request_id)
        return self._executor.execute(plan)

    def _take(self, events) -> None:
        for event in events:
            if isinstance(event, Finished):
                self.used[event.request_id] = event.sampler
                if event.error is not None:
                    assert isinstance(event.error, NoKVSpace)
                    self.failed.add(event.request_id)
            else:
                self.tokens[event.request_id] += event.tokens


def run(parts, *requests: Request) -> tuple[dict[int, list[int]], dict]:
    """Tokens and where they were chosen, by request_id."""
    runs = Runs(parts)
    runs.add(*requests)
    while runs.driver.step():
        pass
    check_held(parts)
    return runs.tokens, runs.used


def request(number: int, params: SamplingParams, n_prompt: int = 7) -> Request:
    prompt = make_prompt(number, n_prompt)
    return Request(number, prompt, params.max_tokens, sampling=params)


def play(parts, seed: int) -> tuple[dict[int, list[int]], dict, set[int]]:
    """
    Requests of all kinds that come and go at random steps, some of which fail.

    Returns their tokens, where those were chosen, and who was cancelled or found no space twice.
    """
    rng = Random(seed)  # noqa: S311
    runs = Runs(parts, lambda: rng.choices((None, "space", "abort"), (30, 1, 1))[0])
    scheduler, n_added, cancelled = parts.scheduler, 0, set()
    while n_added < 24 or scheduler.alive:
        if n_added < 24 and (rng.random() < 0.2 or not scheduler.alive):
            # A request is the same one at whichever step it comes.
            own = Random(f"{seed} {n_added}")  # noqa: S311
            kinds = KINDS if n_added < 8 or own.random() < 0.8 else WHOLE_ROWS
            n_tokens = own.randrange(3, 40)
            options = own.choice(kinds) | {"seed": n_added, "max_tokens": n_tokens}
            params = SamplingParams(**options)
            runs.add(request(n_added, params, own.randrange(1, 50)))
            n_added += 1
        if rng.random() < 0.05:
            cancelled.add(number := rng.randrange(n_added))
            runs.driver.cancel(number)
        runs.driver.step()
        scheduler.check_integrity()
    return runs.tokens, runs.used, cancelled | runs.failed


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba"])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_do_not_depend_on_the_placement(make_parts, name, seed):
    """
    Whoever comes, leaves, is preempted, aborted, changes its slot or ends the lanes.

    A step that was begun ahead may be over before it is aborted. So a play may have a step less,
    and a request may be cancelled, or find no space for the second time, some tokens later.
    """
    host, told, ended = play(make_parts(name, sampler_placement="host"), seed)
    parts = make_parts(name)
    backend, used, ended_too = play(parts, seed)

    for number in ended | ended_too:
        n_both = min(len(host[number]), len(backend[number]))
        host[number], backend[number] = host[number][:n_both], backend[number][:n_both]
    assert backend == host
    assert {use.placement for use in told.values() if use} == {"host"}
    assert {use.placement for use in used.values() if use} == {"backend", "host"}
    assert parts.executor.times.dropped_steps > 0 or name != "llama"
    stats = parts.scheduler.stats()
    assert stats.preempted > 0
    assert stats.aborted_steps > 0


def test_one_kind_of_request_never_prepares_graphs_anew(make_parts):
    """
    Lanes are there from the start, and serve any top-k and greedy.
    """
    parts = make_parts()
    for number, kind in enumerate(KINDS * 5):
        params = LANES.model_copy(update=kind)
        _, used = run(parts, request(number, params))
        assert used[number] == SamplerUse("backend", "")

    assert parts.executor.times.lane_fallbacks == 0


def test_lanes_are_taken_away_once(make_parts):
    """
    20 requests, every second one needs whole rows: all after the first are told why.
    """
    parts = make_parts(n_slots=1)
    switches = []
    set_lanes = parts.executor.context.set_lanes
    parts.executor.context.set_lanes = lambda lanes: switches.append(set_lanes(lanes))
    for number in range(20):
        params = ALL if number % 2 else LANES
        _, used = run(
            parts, request(number, params.model_copy(update={"max_tokens": 2}))
        )
        why = (
            "logprobs of the model reads all logits" if number % 2 else rules.LANES_GONE
        )
        expected = SamplerUse("host", why) if number else SamplerUse("backend", "")
        assert used[number] == expected

    assert len(switches) == 1
    assert parts.executor.times.lane_fallbacks == 19


def test_lanes_stay_until_a_whole_row_is_computed(make_parts):
    """
    A request that waits, or is cancelled before its turn, takes nothing away.
    """
    parts = make_parts(n_slots=1)
    parts.executor.open(request(1, ALL))
    _, while_waiting = run(parts, request(2, LANES))
    parts.executor.close(1)
    _, later = run(parts, request(3, LANES))

    assert [while_waiting[2], later[3]] == [SamplerUse("backend", "")] * 2


def test_a_context_made_anew_stays_without_lanes(make_parts):
    """
    What took them away is why, also after a context has failed.
    """
    parts = make_parts(n_slots=1)
    run(parts, request(1, ALL))
    parts.executor._rebuild()
    _, used = run(parts, request(2, LANES))

    assert used[2] == SamplerUse("host", rules.LANES_GONE)


def test_where_lanes_are_unwanted_nothing_is_counted(make_parts):
    """
    The host is where tokens are meant to be chosen.
    """
    parts = make_parts(sampler_placement="host", n_slots=1)
    _, used = run(parts, request(1, ALL), request(2, LANES))

    why = "sampler_placement is host"
    assert used == {1: SamplerUse("host", why), 2: SamplerUse("host", why)}
    assert parts.executor.times.lane_fallbacks == 0


def test_a_request_without_tokens_was_sampled_nowhere(make_parts):
    """
    Cancelled before its first token, there is nothing to tell.
    """
    executor = make_parts().executor
    executor.open(request(1, ALL))

    assert executor.close(1) is None
    assert executor.close(1) is None


def test_a_switch_that_fails_is_a_failed_context(make_parts, monkeypatch):
    """
    The step's requests are tried again; the engine goes on, and without lanes.
    """
    parts = make_parts()
    broken = NativeError("llama_set_sampler", -1000, "no memory")

    def fail(context, lanes):
        raise broken

    monkeypatch.setattr(Context, "set_lanes", fail)
    parts.executor.open(request(1, ALL))
    parts.scheduler.add(request(1, ALL), 0.0)
    plan = parts.scheduler.schedule(0.0)
    result = parts.executor.execute(plan)
    events = parts.scheduler.apply(plan, result, 0.0)
    parts.scheduler.cancel(1, 0.0)
    parts.scheduler.take_events()
    _, used = run(parts, request(2, LANES))

    assert (result.status, result.error) == (DecodeStatus.FAILED, broken)
    assert events == []
    assert used[2] == SamplerUse("host", rules.FAILED)


REASONS = {
    "grammar": ({"grammar": "root ::= [a-z]"}, "grammar may allow"),
    "prompt_logprobs": ({"prompt_logprobs": 0}, "prompt_logprobs reads"),
    "logprobs": ({"logprobs": 0}, "logprobs of the model"),
    "logit_bias": ({"logit_bias": {3: -1.0}}, "logit_bias"),
    "top_k off": ({"top_k": 0}, "first stage"),
    "top_k large": ({"top_k": 129}, "first stage"),
    "penalties": ({"repeat_penalty": 1.1}, "first stage"),
    "order": ({"stages": ("top_p", "top_k")}, "first stage"),
    "mirostat": ({"mirostat": 2}, "first stage"),
    "greedy, penalties": ({"temperature": 0.0, "dry_multiplier": 1.0}, "first stage"),
    "suppress": ({"suppress_tokens": tuple(range(90))}, "more than 128"),
    "served": ({"top_k": 128}, ""),
    "served: greedy": ({"temperature": 0.0, "top_k": 0}, ""),
    "served: suppress": ({"suppress_tokens": tuple(range(80))}, ""),
    "served: logprobs": ({"logprobs": 2, "logprobs_of": "sampler"}, ""),
}


@pytest.mark.parametrize("name", REASONS)
def test_a_request_is_told_why_a_lane_cannot_serve_it(make_parts, name):
    """
    What needs logits that a lane does not leave, in the words of the parameter.
    """
    changes, words = REASONS[name]
    params = SamplingParams(seed=1, **changes)
    executor = make_parts().executor
    executor.open(request(1, params))

    why = rules.needs_all(params, executor._open.by_id[1].sampler)

    assert words in why
    assert bool(why) == bool(words)


BACKEND = {"sampler_placement": "backend"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sampler_placement": "host"}, "placement is host"),
        ({}, "the host chooses faster"),
        ({"model": ModelConfig(split_mode="tensor")} | BACKEND, "split_mode"),
        (BACKEND, ""),
    ],
)
def test_the_placement_follows_configuration(options, words):
    """
    Lanes where they are asked for and can be, and nowhere else.
    """
    model = SimpleNamespace(reads_sources=False)

    why = rules.lanes_refusal(model, EngineConfig(**options))

    assert words in why
    assert bool(why) == bool(words)


def test_auto_chooses_on_the_host(make_parts):
    """
    And says why.
    """
    _, told = run(make_parts(sampler_placement="auto"), request(1, LANES))

    assert told[1] == SamplerUse("host", rules.AUTO)


@pytest.mark.parametrize("name", [recipe.name for recipe in (*RECURRENT, *HYBRID)])
@pytest.mark.parametrize("token_budget", [5, 13])
def test_lanes_serve_memory_that_is_a_state(name, token_budget):
    """
    With several slots, scratch and small chunks tokens are those of the host.

    Slots that have rows and slots that have none change places from step to step, in graphs
    of equal nodes.
    """
    found = []
    for placement in ("backend", "host"):
        config = EngineConfig(
            context=ContextConfig(n_ctx=1024, n_threads=1),
            scheduler=SchedulerConfig(n_slots=4, token_budget=token_budget),
            sampler_placement=placement,
        )
        parts = build(tiny_model(name), config)
        params = SamplingParams(temperature=0.0, max_tokens=6, seed=1, ignore_eos=True)
        requests = [request(i, params, 5 + 9 * i) for i in range(7)]
        tokens, used = run(parts, *requests)
        found.append(tokens)
        assert {use.placement for use in used.values()} == {placement}
        parts.release()

    assert found[0] == found[1]


def test_parked_slots_have_lanes():
    """
    Sequences that begin in slots which idle ones were moved to are served as well.
    """
    config = EngineConfig(
        context=ContextConfig(n_ctx=1024, n_threads=1),
        scheduler=SchedulerConfig(n_slots=2),
        cache=CacheConfig(mode="live"),
        sampler_placement="backend",
    )
    parts = build(tiny_model("llama"), config)
    used = {}
    for first in range(0, 12, 2):
        used |= run(parts, request(first, LANES), request(first + 1, LANES))[1]
    n_fallbacks = parts.executor.times.lane_fallbacks
    parts.release()

    assert set(used.values()) == {SamplerUse("backend", "")}
    assert n_fallbacks == 0
