"""The executor on libllama, with tiny models of every memory class."""

from array import array

import pytest

from pyllama_raw import EngineConfig, SamplingParams
from pyllama_raw.core.request import Finished, FinishReason, Request
from pyllama_raw.core.step import (
    Decode,
    DecodeStatus,
    Prefill,
    RowFailed,
    Sampled,
    Shift,
    StepPlan,
)
from pyllama_raw.engine.opening import build
from pyllama_raw.errors import InvalidBatch, SamplingFailed
from pyllama_raw.native.context import StepOutcome
from pyllama_raw.options.config import ContextConfig, SchedulerConfig
from tests.support.tiny import GENERATING, tiny_model

pytestmark = pytest.mark.native

GREEDY = SamplingParams(temperature=0, seed=0, ignore_eos=True)


@pytest.fixture
def make_parts():
    """Builds engines that are freed after the test."""
    made = []

    def make(name="llama", n_slots=3, n_ctx=768, deterministic=True, **options):
        context = ContextConfig(n_ctx=n_ctx, n_threads=1)
        config = EngineConfig(
            context=context,
            scheduler=SchedulerConfig(n_slots=n_slots, **options),
            deterministic=deterministic,
        )
        made.append(build(tiny_model(name), config))
        return made[-1]

    yield make
    for parts in made:
        parts.release()


def make_prompt(number: int, n_tokens: int) -> array:
    return array("i", [3 + (number * 37 + i * 11) % 200 for i in range(n_tokens)])


def make_requests(n_requests=6, max_tokens=12) -> list[Request]:
    return [
        Request(i, make_prompt(i, 5 + 17 * i), max_tokens, sampling=GREEDY)
        for i in range(n_requests)
    ]


def run(parts, requests, execute=None) -> tuple[dict[int, list[int]], dict]:
    """Tokens and last events by request_id; every request is added at the start."""
    scheduler, executor = parts.scheduler, parts.executor
    for request in requests:
        executor.open(request)
        scheduler.add(request, 0.0)
    tokens = {request.request_id: [] for request in requests}
    ends = {}
    while plan := scheduler.schedule(0.0):
        result = (execute or executor.execute)(plan)
        for event in scheduler.apply(plan, result, 0.0):
            if isinstance(event, Finished):
                ends[event.request_id] = event
                executor.close(event.request_id)
            else:
                tokens[event.request_id] += event.tokens
        scheduler.check_integrity()
    return tokens, ends


def run_alone(make_parts, name, requests) -> dict[int, list[int]]:
    """Each request by itself, its prompt in one batch."""
    parts = make_parts(name, n_slots=1, n_ctx=256, token_budget=256)
    return {r.request_id: run(parts, [r])[0][r.request_id] for r in requests}


@pytest.mark.parametrize("recipe", GENERATING, ids=lambda recipe: recipe.name)
def test_outputs_do_not_depend_on_batching(make_parts, recipe):
    """
    Six requests over three slots in chunks of 16 give the tokens of runs alone.
    """
    requests = make_requests()

    tokens, _ = run(make_parts(recipe.name, token_budget=16), requests)

    assert tokens == run_alone(make_parts, recipe.name, requests)


class Failing:
    """Lets one decode end with another code, after libllama did half of it or nothing."""

    def __init__(self, executor, step: int, code: int, *, half: bool = False) -> None:
        self._executor, self._step, self._code, self._half = executor, step, code, half
        self._n_steps = 0
        self.status = DecodeStatus.OK

    def __call__(self, plan):
        step, self._n_steps = self._n_steps, self._n_steps + 1
        if step != self._step:
            return self._executor.execute(plan)
        self._executor._drop()
        context = self._executor.context
        context.step = self._fail
        result = self._executor.execute(plan)
        if self._executor.context is context:
            del context.step
        self.status = result.status
        return result

    def _fail(self, batch, samplers, *, ahead):
        if self._half:
            n_tokens, batch.n_tokens = batch.n_tokens, max(batch.n_tokens // 2, 1)
            self._executor.context.decode(batch)
            batch.n_tokens = n_tokens
        return StepOutcome(self._code, [], [], 0, 0)


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba", "jamba"])
@pytest.mark.parametrize("step", [0, 2, 9])
@pytest.mark.parametrize("half", [False, True])
def test_an_aborted_step_changes_no_output(make_parts, name, step, half):
    """
    Whatever the abort left in memory is found out and used, or computed again.
    """
    requests = make_requests(3)
    parts = make_parts(name, token_budget=16)
    failing = Failing(parts.executor, step, 2, half=half)

    tokens, _ = run(parts, requests, failing)

    assert failing.status is DecodeStatus.ABORTED
    assert tokens == run_alone(make_parts, name, requests)


class Losing:
    """Loses the slot of one request in one step, as when a restore or a cut fails."""

    def __init__(self, executor, step: int, request_id: int) -> None:
        self._executor, self._step, self._request_id = executor, step, request_id
        self._n_steps = 0
        self.not_restored = frozenset()

    def __call__(self, plan):
        step, self._n_steps = self._n_steps, self._n_steps + 1
        [slot] = [w.slot for w in plan.works if w.request_id == self._request_id] or [0]
        if step == self._step:
            self._executor._lost |= self._executor._drop() | {slot}
            self._executor.context.seq_rm(slot)
        result = self._executor.execute(plan)
        self.not_restored |= result.not_restored
        return result


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba", "jamba"])
@pytest.mark.parametrize("step", [3, 9])
@pytest.mark.parametrize("request_id", [0, 1])
def test_a_slot_that_is_lost_beside_another_changes_no_output(
    make_parts, name, step, request_id
):
    """
    Its request is computed again, and the works beside it are taken in.
    """
    requests = make_requests(2)
    parts = make_parts(name, token_budget=16)
    losing = Losing(parts.executor, step, request_id)

    tokens, _ = run(parts, requests, losing)

    assert len(losing.not_restored) == 1
    assert tokens == run_alone(make_parts, name, requests)


@pytest.mark.parametrize("step", [0, 2, 9])
def test_no_space_changes_no_output(make_parts, step):
    """
    Code 1 leaves the memory as it was: smaller steps or a preemption follow.
    """
    requests = make_requests(3)
    parts = make_parts(token_budget=16)
    failing = Failing(parts.executor, step, 1)

    tokens, _ = run(parts, requests, failing)

    assert failing.status is DecodeStatus.NO_SPACE
    assert tokens == run_alone(make_parts, "llama", requests)


@pytest.mark.parametrize("code", [-2, -3, -1000])
def test_a_broken_context_is_built_again(make_parts, code):
    """
    All requests are computed again, and have the tokens of runs alone.
    """
    requests = make_requests(5)
    parts = make_parts(token_budget=16)
    before = parts.executor.context
    failing = Failing(parts.executor, 2, code)

    tokens, ends = run(parts, requests, failing)

    assert failing.status is DecodeStatus.FAILED
    assert before.closed
    assert [ends[i].error for i in range(5)] == [None] * 5
    assert tokens == run_alone(make_parts, "llama", requests)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_refused_cut_empties_the_slot(make_parts, name):
    """
    What could not be cut is computed again, and no cut is asked for after that.
    """
    parts = make_parts(name, n_slots=1, deterministic=False)
    asked = refuse_cuts(parts.executor)
    prompts = [make_prompt(0, 60), make_prompt(0, 40) + make_prompt(1, 5)]

    first = [Request(i, p, 4, sampling=GREEDY) for i, p in enumerate(prompts)]
    tokens, ends = run(parts, first)
    later = [Request(i + 2, p, 4, sampling=GREEDY) for i, p in enumerate(prompts)]
    tokens_later, _ = run(parts, later)

    assert {i: len(said) for i, said in tokens.items()} == {0: 4, 1: 4}
    assert list(tokens_later.values()) == list(tokens.values())
    assert ends[1].n_cached == 0
    assert len(asked) <= 1


def refuse_cuts(executor) -> list[tuple[int, int]]:
    """Let the memory forget whole slots only, as recurrent memory does."""
    context, asked = executor.context, []
    seq_rm = context.seq_rm

    def refuse(slot, p0=-1, p1=-1):
        highest = context.seq_pos_max(slot)
        if 0 < p0 <= (-1 if highest is None else highest):
            asked.append((slot, p0))
            return False
        return seq_rm(slot, p0, p1)

    context.seq_rm = refuse
    return asked


def test_a_bad_batch_is_a_status(make_parts):
    """
    libllama refuses positions that do not follow; the executor goes on.
    """
    parts = make_parts()
    request = make_requests(1)[0]
    parts.executor.open(request)

    def compute(pos):
        work = Prefill(0, 0, pos, request.tokens, samples=True)
        return parts.executor.execute(StepPlan(works=(work,)))

    good, result = compute(0), compute(50)

    assert good.status is DecodeStatus.OK
    assert result.status is DecodeStatus.INVALID
    assert isinstance(result.error, InvalidBatch)


def test_too_many_tokens_never_reach_libllama(make_parts):
    """
    A batch over n_batch would end the process: it is refused before.
    """
    parts = make_parts(n_ctx=256)
    request = Request(0, array("i", [3] * 5000), 1, sampling=GREEDY)
    parts.executor.open(request)
    plan = StepPlan(works=(Prefill(0, 0, 0, request.tokens, samples=True),))

    assert parts.executor.execute(plan).status is DecodeStatus.INVALID


def test_a_shift_closes_the_gap(make_parts):
    """
    After a shift the next position follows the last one kept.
    """
    parts = make_parts(deterministic=False)
    request = Request(0, make_prompt(0, 20), 1, sampling=GREEDY)
    parts.executor.open(request)
    first = StepPlan(works=(Prefill(0, 0, 0, request.tokens, samples=True),))
    [sampled] = parts.executor.execute(first).outputs

    decode = Decode(0, 0, 12, array("i", sampled.tokens))
    second = StepPlan(moves=(Shift(0, 4, 8),), works=(decode,))
    result = parts.executor.execute(second)

    assert result.status is DecodeStatus.OK
    assert parts.executor.context.seq_pos_max(0) == 12


def test_a_full_slot_shifts_and_goes_on(make_parts):
    """
    With context_full="shift" a request outlives its slot.
    """
    parts = make_parts(n_slots=1, n_ctx=256, context_full="shift", deterministic=False)
    limit = parts.scheduler.limits.n_ctx_slot
    request = Request(0, make_prompt(0, limit - 20), 100, sampling=GREEDY)

    _, ends = run(parts, [request])

    assert ends[0].n_output == 100
    assert parts.scheduler.stats().shifted >= 1


def test_memory_pressure_preempts_and_finishes_all(make_parts):
    """
    More tokens than cells: requests give way, come back, and all are served.
    """
    parts = make_parts(n_slots=4, n_ctx=256, deterministic=False)
    requests = [Request(i, make_prompt(i, 60), 100, sampling=GREEDY) for i in range(4)]

    _, ends = run(parts, requests)

    assert [ends[i].n_output for i in range(4)] == [100] * 4
    assert parts.scheduler.stats().preempted > 0


def test_ignored_ends_are_never_sampled(make_parts):
    """
    llama-ends wants to end; with ignore_eos it goes on to max_tokens.
    """
    parts = make_parts("llama-ends")
    eog = parts.vocab.eog_tokens
    plain = SamplingParams(temperature=0, seed=0)

    def run_all(sampling, first_id):
        requests = [
            Request(first_id + i, make_prompt(i, 6), 40, sampling, stop_token_ids=eog)
            for i in range(10)
        ]
        return run(parts, requests)

    stopping_ends = run_all(plain, 0)[1]
    ignoring_tokens, ignoring_ends = run_all(GREEDY, 10)

    assert {end.reason for end in stopping_ends.values()} >= {FinishReason.STOP}
    assert {end.n_output for end in ignoring_ends.values()} == {40}
    assert not eog & {token for said in ignoring_tokens.values() for token in said}


def test_a_seed_gives_the_same_tokens_again(make_parts):
    """
    Sampling depends on the seed and on nothing that ran before.
    """
    parts = make_parts()

    def sample(request_id, seed):
        params = SamplingParams(temperature=2, top_k=0, seed=seed, ignore_eos=True)
        request = Request(request_id, make_prompt(0, 9), 20, sampling=params)
        return run(parts, [request])[0][request_id]

    assert sample(0, seed=5) == sample(1, seed=5)
    assert sample(2, seed=5) != sample(3, seed=6)


def test_a_failing_sampler_is_the_error_of_its_row(make_parts):
    """
    The other rows of the step have their tokens.
    """
    executor = make_parts().executor
    for request in make_requests(2):
        executor.open(request)
    executor._open.by_id[0].sampler.close()  # its rows fail from now on
    works = tuple(Prefill(i, i, 0, array("i", [5, 6]), True) for i in range(2))

    result = executor.execute(StepPlan(works=works))

    assert result.status is DecodeStatus.OK
    failed, sampled = result.outputs
    assert isinstance(failed, RowFailed)
    assert isinstance(failed.error, SamplingFailed)
    assert isinstance(sampled, Sampled)
