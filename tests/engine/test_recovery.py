"""Decodes that fail in libllama: what runs is computed again, and nothing is lost."""

import logging
import os
from array import array
from contextlib import contextmanager
from itertools import chain, repeat

import pytest

from pyllama_raw import EngineConfig, SamplingParams
from pyllama_raw.core.request import Finished, Request, Scoring
from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.opening import build
from pyllama_raw.errors import ContextFailed, DecodeFailed, InvalidBatch
from pyllama_raw.native.libllama import lib
from pyllama_raw.options.config import ContextConfig, SchedulerConfig
from tests.support.held import check_held
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

N_STREAMS = 8
STRIDE = int(os.environ.get("PYLLAMA_RAW_TEST_STRIDE", "9"))  # 1: a failure at any step
NAMES = ["llama", "gemma3", "mamba", "jamba"]  # one of each class of memory
GREEDY = SamplingParams(temperature=0, seed=0, ignore_eos=True)
DRAWN = SamplingParams(
    temperature=1.5,
    top_k=0,
    seed=7,
    repeat_penalty=1.3,
    frequency_penalty=0.5,
    ignore_eos=True,
)
WATCHED = SamplingParams(temperature=0, seed=0, ignore_eos=True, logprobs=2)
SCORED = SamplingParams(temperature=0, seed=0, ignore_eos=True, prompt_logprobs=1)


def make_requests(sampling=GREEDY, max_tokens=10) -> list[Request]:
    return [
        Request(i, make_prompt(i, 5 + 6 * i), max_tokens, sampling=sampling, **scored)
        for scored in [
            {"scoring": None if sampling.prompt_logprobs is None else Scoring()}
        ]
        for i in range(N_STREAMS)
    ]


def make_prompt(number: int, n_tokens: int) -> array:
    return array("i", [3 + (number * 37 + i * 11) % 200 for i in range(n_tokens)])


@contextmanager
def opened(path, *, deterministic=True, **options):
    context = ContextConfig(n_ctx=N_STREAMS * 128, n_threads=1)
    scheduler = SchedulerConfig(n_slots=N_STREAMS, token_budget=64, **options)
    parts = build(
        path,
        EngineConfig(context=context, scheduler=scheduler, deterministic=deterministic),
    )
    try:
        yield parts
    finally:
        lib.plr_fail_decode(0, 0, -1)
        parts.release()


class Served:
    """What came of requests that were all there at the start, told as to `complete`."""

    def __init__(self, parts, requests, code=0, n_until=0, seq_id=-1) -> None:
        self.tokens = {r.request_id: [] for r in requests}
        self.logprobs = {r.request_id: [] for r in requests}
        self.ends = {}
        scheduler = parts.scheduler
        driver = Driver(scheduler, parts.executor, lambda: 0.0, self._take)
        driver.add(requests, 0.0)
        before = scheduler.stats()
        lib.plr_fail_decode(code, n_until, seq_id)
        while driver.step():
            scheduler.check_integrity()
            assert scheduler.stats().steps < before.steps + 5000
        lib.plr_fail_decode(0, 0, -1)
        check_held(parts)
        after = scheduler.stats()
        self.n_steps = after.steps - before.steps
        self.n_failed = after.failed_steps - before.failed_steps
        self.n_rebuilt = after.rebuilds - before.rebuilds
        scheduler.clear_cache()

    def _take(self, events) -> None:
        for event in events:
            if isinstance(event, Finished):
                self.ends[event.request_id] = event
            else:
                self.tokens[event.request_id] += event.tokens
                self.logprobs[event.request_id].append(event.logprobs)

    @property
    def errors(self) -> dict:
        return {i: e.error for i, e in self.ends.items() if e.error is not None}

    @property
    def scores(self) -> dict:
        return {i: end.prompt_logprobs for i, end in self.ends.items()}


def check_any_step(path, requests, code=-3) -> list[int]:
    """
    A failure at each step loses nothing; returns the steps whose tokens or log-probabilities
    differ.
    """
    whole = serve(path, requests)
    differ = []
    for step in range(0, whole.n_steps, STRIDE):
        run = serve(path, requests, code, step)
        assert run.errors == {}
        assert run.n_failed in (0, 1)  # 0: of a step that was dropped anyway
        assert run.scores == whole.scores
        if (run.tokens, run.logprobs) != (whole.tokens, whole.logprobs):
            differ.append(step)
    return differ


def serve(path, requests, code=0, n_until=0, seq_id=-1) -> Served:
    """All *requests* on a new engine."""
    with opened(path) as parts:
        return Served(parts, requests, code, n_until, seq_id)


@pytest.mark.parametrize(
    ("name", "code"), [*[(name, -3) for name in NAMES], ("llama", -1), ("jamba", -1000)]
)
def test_a_decode_that_fails_once_changes_no_token(name, code):
    """
    At whichever step of eight deterministic streams, begun ahead or not: no error, and
    the tokens of an undisturbed run.
    """
    assert check_any_step(tiny_model(name), make_requests(), code) == []


@pytest.mark.parametrize(
    "sampling", [DRAWN, WATCHED, SCORED], ids=["drawn", "watched", "scored"]
)
def test_samplers_and_scores_do_not_notice(sampling):
    """
    Nothing is drawn, penalised or scored twice, and log-probabilities have the same bits.
    """
    assert check_any_step(tiny_model("llama"), make_requests(sampling)) == []


def test_the_default_model_loses_no_token(model_path):
    """
    As with the tiny models, at one step; at any if the stride is 1.
    """
    with opened(model_path) as parts:
        requests = make_requests(max_tokens=4)[::2]
        whole = Served(parts, requests)
        again = Served(parts, requests)  # prompts take turns from here on as later
        steps = range(again.n_steps) if STRIDE == 1 else [again.n_steps // 2]

        runs = [Served(parts, requests, -3, step) for step in steps]

    assert [run.errors for run in runs] == [{}] * len(runs)
    assert [run.tokens for run in runs] == [whole.tokens] * len(runs)


def test_a_shared_pool_loses_no_request():
    """
    Without `deterministic` outputs are whole, too; last digits may differ.
    """
    with opened(tiny_model("llama"), deterministic=False) as parts:
        requests = make_requests()
        n_steps = Served(parts, requests).n_steps

        runs = [Served(parts, requests, -3, k) for k in range(0, n_steps, STRIDE)]

    assert [run.errors for run in runs] == [{}] * len(runs)
    assert all(len(t) == 10 for run in runs for t in run.tokens.values())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("code", "error"), [(-1, InvalidBatch), (-3, DecodeFailed), (-2, DecodeFailed)]
)
def test_only_who_always_fails_ends(name, code, error):
    """
    A decode with one certain request fails whenever; the others have all their tokens.
    """
    requests = make_requests()
    with opened(tiny_model(name)) as parts:
        whole = Served(parts, requests)

        run = Served(parts, requests, code, -1, seq_id=3)

    assert list(run.errors) == [3]
    assert isinstance(run.errors[3], error)
    assert run.tokens == whole.tokens | {3: []}
    assert run.n_failed <= 4


def test_a_context_that_always_fails_ends_all_and_serves_again(caplog):
    """
    Every request has the error of libllama, rebuilds are bounded, counted and logged, and
    when it works again so does the engine.
    """
    requests = make_requests()
    with opened(tiny_model("llama")) as parts:
        whole = Served(parts, requests)
        with caplog.at_level(logging.WARNING, logger="pyllama_raw"):
            broken = Served(parts, requests, -3, -1)
        later = Served(parts, requests)

    assert sorted(broken.errors) == list(range(N_STREAMS))
    assert broken.n_failed == broken.n_rebuilt <= 4 * N_STREAMS
    ours = [each.getMessage() for each in caplog.records if each.name == "pyllama_raw"]
    assert len(ours) == broken.n_rebuilt
    assert f"rebuild {broken.n_rebuilt}" in ours[-1]
    assert later.tokens == whole.tokens


def make_nothing(lanes):
    """As the executor makes a context, while memory is short."""
    raise ContextFailed("llama_init_from_model", None, "no memory")


@pytest.mark.parametrize("name", ["llama", "jamba"])
@pytest.mark.parametrize("n_short", [1, 2])
def test_a_context_that_cannot_be_made_anew_is_tried_again(name, n_short):
    """
    Memory that is short for a moment ends neither the engine nor a request.
    """
    requests = make_requests()
    with opened(tiny_model(name)) as parts:
        whole = Served(parts, requests)
        makers = chain([make_nothing] * n_short, repeat(parts.executor._make_context))

        def make(lanes):
            return next(makers)(lanes)

        parts.executor._make_context = make

        run = Served(parts, requests, -3, whole.n_steps // 2)

    assert run.errors == {}
    assert run.tokens == whole.tokens


def test_an_engine_without_memory_tells_all_and_serves_again():
    """
    Requests end with the error, the engine does not, and it closes without a context.
    """
    requests = make_requests()
    with opened(tiny_model("llama")) as parts:
        whole = Served(parts, requests)
        make, parts.executor._make_context = parts.executor._make_context, make_nothing
        short = Served(parts, requests, -3, whole.n_steps // 2)
        parts.executor._make_context = make
        later = Served(parts, requests)
        parts.executor._make_context = make_nothing
        Served(parts, requests, -3, 0)

    assert {type(error) for error in short.errors.values()} == {ContextFailed}
    assert later.tokens == whole.tokens
