"""Where tokens are chosen: the same ones everywhere, and told for each request."""

from random import Random
from types import SimpleNamespace

import pytest

from pyllama_raw import EngineConfig, SamplingParams
from pyllama_raw.config import ContextConfig, ModelConfig, SchedulerConfig
from pyllama_raw.core.request import Finished, Request, SamplerUse
from pyllama_raw.core.step import DecodeStatus, StepResult
from pyllama_raw.engine import lanes as rules
from pyllama_raw.engine import placement
from pyllama_raw.engine.opening import build
from pyllama_raw.errors import NativeError
from pyllama_raw.native.context import Context
from pyllama_raw.native.libllama import Device
from pyllama_raw.native.model import Model
from pyllama_raw.native.sampler import RowSampler
from tests.engine.test_executor import make_prompt
from tests.tiny import tiny_model

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
            scheduler=SchedulerConfig(n_slots=n_slots),
            sampler_placement=sampler_placement,
            deterministic=True,
        )
        made.append(build(tiny_model(name), config))
        return made[-1]

    yield make
    for parts in made:
        parts.release()


def run(parts, *requests: Request) -> tuple[dict[int, list[int]], dict]:
    """Tokens and where they were chosen, by request_id."""
    for request in requests:
        parts.executor.open(request)
        parts.scheduler.add(request, 0.0)
    tokens, used = {request.request_id: [] for request in requests}, {}
    while plan := parts.scheduler.schedule(0.0):
        advance(parts, plan, tokens, used)
    return tokens, used


def advance(parts, plan, tokens, used, fails=None) -> None:
    result = execute(parts, plan, fails)
    for event in parts.scheduler.apply(plan, result, 0.0):
        if isinstance(event, Finished):
            used[event.request_id] = parts.executor.close(event.request_id)
        else:
            tokens[event.request_id] += event.tokens


def execute(parts, plan, fails: str | None) -> StepResult:
    """Run *plan*; or find no space for it, or have it aborted, as may happen."""
    if fails == "space":
        parts.executor.execute(plan._replace(chunks=()))
        return StepResult(DecodeStatus.NO_SPACE)
    if fails == "abort":
        parts.executor._drop()  # what was begun might be over already, or not
        parts.flag.set()
    result = parts.executor.execute(plan)
    parts.flag.clear()
    return result


def request(number: int, params: SamplingParams, n_prompt: int = 7) -> Request:
    prompt = make_prompt(number, n_prompt)
    return Request(number, prompt, params.max_tokens, sampling=params)


def play(parts, seed: int) -> tuple[dict[int, list[int]], dict]:
    """Requests of all kinds that come and go at random steps, some of which fail."""
    rng = Random(seed)  # noqa: S311
    scheduler = parts.scheduler
    tokens, used, n_added = {}, {}, 0
    while n_added < 24 or scheduler.has_work:
        if n_added < 24 and (rng.random() < 0.2 or not scheduler.has_work):
            kinds = KINDS if n_added < 8 or rng.random() < 0.8 else WHOLE_ROWS
            n_tokens = rng.randrange(3, 40)
            options = rng.choice(kinds) | {"seed": n_added, "max_tokens": n_tokens}
            made = request(n_added, SamplingParams(**options), rng.randrange(1, 50))
            parts.executor.open(made)
            scheduler.add(made, 0.0)
            tokens[n_added] = []
            n_added += 1
        if rng.random() < 0.05:
            scheduler.cancel(rng.randrange(n_added), 0.0)
        plan = scheduler.schedule(0.0)
        for event in scheduler.take_events():
            used[event.request_id] = parts.executor.close(event.request_id)
        if plan:
            fails = rng.choices((None, "space", "abort"), (30, 1, 1))[0]
            advance(parts, plan, tokens, used, fails)
        scheduler.check_integrity()
    return tokens, used


@pytest.mark.parametrize("name", ["llama", "gemma3", "jamba"])
@pytest.mark.parametrize("seed", range(3))
def test_tokens_do_not_depend_on_the_placement(make_parts, name, seed):
    """
    Whoever comes, leaves, is preempted, aborted, changes its slot or ends the lanes.
    """
    host, told = play(make_parts(name, sampler_placement="host"), seed)
    parts = make_parts(name)
    backend, used = play(parts, seed)

    assert backend == host
    assert {use.placement for use in told.values() if use} == {"host"}
    assert {use.placement for use in used.values() if use} == {"backend", "host"}
    assert parts.executor.times.n_dropped > 0 or name != "llama"
    stats = parts.scheduler.stats()
    assert stats.preempted > 0
    assert stats.aborted_steps > 0
    assert 1 <= parts.executor.times.lane_reserves <= 2


def test_one_kind_of_request_never_prepares_graphs_anew(make_parts):
    """
    Lanes are there from the start, and serve any top-k and greedy.
    """
    parts = make_parts()
    for number, kind in enumerate(KINDS * 5):
        params = LANES.model_copy(update=kind)
        _, used = run(parts, request(number, params))
        assert used[number] == SamplerUse("backend", "")

    times = parts.executor.times
    assert (times.lane_attaches, times.lane_reserves) == (2, 0)
    assert times.lane_fallbacks == 0


def test_switching_kinds_on_a_slot_ends_lanes_once(make_parts):
    """
    100 requests, every second one needs whole rows: the graphs change once, not 100 times.
    """
    parts = make_parts(n_slots=1)
    for number in range(100):
        params = ALL if number % 2 else LANES
        _, used = run(
            parts, request(number, params.model_copy(update={"max_tokens": 2}))
        )
        why = "logprobs of the model reads all logits" if number % 2 else rules.ARE_OFF
        expected = SamplerUse("host", why) if number else SamplerUse("backend", "")
        assert used[number] == expected

    assert parts.executor.times.lane_reserves == 1
    assert parts.executor.times.lane_fallbacks == 99


def test_lanes_come_back_when_nobody_needs_whole_rows(make_parts):
    """
    After 16 requests that need none, and the next time after 32.
    """
    parts = make_parts(n_slots=1)
    numbers = iter(range(1000))

    def placements(params, count):
        short = params.model_copy(update={"max_tokens": 2})
        found = [run(parts, request(next(numbers), short))[1] for _ in range(count)]
        return [use.placement for used in found for use in used.values()]

    for patience in (rules.PATIENCE, 2 * rules.PATIENCE):
        assert placements(ALL, 1) == ["host"]
        expected = ["host"] * (patience - 1) + ["backend"] * 2
        assert placements(LANES, patience + 1) == expected
    assert parts.executor.times.lane_reserves == 4


def test_a_waiting_request_that_needs_whole_rows_keeps_lanes_off(make_parts):
    """
    They are not switched on for the time until its turn comes.
    """
    parts = make_parts(n_slots=1)
    lanes = parts.executor.lanes
    run(parts, request(0, ALL))
    parts.executor.open(request(1, ALL))
    for number in range(2, 2 + rules.PATIENCE):
        parts.executor.open(request(number, LANES))

    lanes.prepare(parts.executor.context, ())
    assert parts.executor.times.lane_reserves == 1
    parts.executor.close(1)
    lanes.prepare(parts.executor.context, ())
    assert parts.executor.times.lane_reserves == 2


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

    why = rules.needs_all(params, executor._samplers[1])

    assert words in why
    assert bool(why) == bool(words)


GPU = Device("CUDA0", "a card", "gpu", 0, 0)
BACKEND = {"sampler_placement": "backend"}


@pytest.mark.parametrize(
    ("options", "found", "words"),
    [
        ({"sampler_placement": "host"}, [GPU], "placement is host"),
        ({}, [], "the CPU computes"),
        ({}, [GPU], ""),
        ({"model": ModelConfig(n_gpu_layers=2)}, [GPU], "the CPU computes"),
        ({"model": ModelConfig(n_gpu_layers=99)}, [GPU], ""),
        ({"model": ModelConfig(devices=("CPU",))}, [GPU], "the CPU computes"),
        ({"model": ModelConfig(split_mode="tensor")} | BACKEND, [GPU], "split_mode"),
        (BACKEND, [], ""),
    ],
)
def test_the_placement_follows_configuration_and_device(
    monkeypatch, options, found, words
):
    """
    Lanes where they are asked for, and in "auto" where they may pay.
    """
    monkeypatch.setattr(placement, "devices", lambda: found)
    model = SimpleNamespace(n_layer=4)

    why = placement.refusal(model, EngineConfig(**options))

    assert words in why
    assert bool(why) == bool(words)


@pytest.mark.parametrize("pays", [True, False])
def test_what_pays_is_measured_once(monkeypatch, pays):
    """
    Afterwards the context is empty and has lanes just if they pay; and it is remembered.
    """
    asked = []

    def steps_s(context, n_slots):
        asked.append(1)
        measure(context, n_slots)
        return [
            1.0 if (len(asked) % 2 == 1) == pays else 2.0
        ]  # lanes, rows, lanes, ...

    measure = placement._steps_s
    monkeypatch.setattr(placement, "_measured", {})
    monkeypatch.setattr(placement, "_steps_s", steps_s)
    with Model.load(tiny_model("llama")) as model:
        for _ in range(2):
            lanes = rules.make_lanes(model.vocab, 2)
            with Context(model, n_seq_max=2, n_ctx=512, lanes=lanes) as context:
                assert placement.lanes_pay(context, 2) is pays
                assert context.seq_pos_max(0) is None
                assert is_on_lane(context) is pays

    assert len(asked) == 4


def is_on_lane(context) -> bool:
    from tests.native.support import generate

    sampler = RowSampler()
    generate(context, [5, 6], 1, sampler)
    return sampler.n_on_lane == 1


@pytest.mark.parametrize("pays", [True, False])
def test_auto_uses_what_was_measured(make_parts, monkeypatch, pays):
    """
    With a device for the output layer, lanes if they pay; the reason tells if not.
    """
    monkeypatch.setattr(placement, "devices", lambda: [GPU])

    def lanes_pay(context, n_slots):
        if not pays:
            context.set_lanes([])
        return pays

    monkeypatch.setattr(placement, "lanes_pay", lanes_pay)
    parts = make_parts(sampler_placement="auto")
    _, used = run(parts, request(1, LANES))

    expected = SamplerUse("backend", "") if pays else SamplerUse("host", rules.SLOWER)
    assert used[1] == expected
