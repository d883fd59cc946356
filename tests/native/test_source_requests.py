"""
Requests of a model whose encoder reads prompts: each has the tokens it has alone.

Sums in 32 bits, of cells too, and no table of 16 bits (this T5 has ReLU): what is computed
beside changes last digits only, on every CPU. Near ties may part outputs.
"""

import os
from array import array
from itertools import count
from random import Random

import pytest

from pyllama_raw import (
    AsyncEngine,
    ContextConfig,
    Engine,
    EngineConfig,
    FinishReason,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.core.request import Finished, NewTokens, Request, TokenLogprobs
from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.opening import build
from pyllama_raw.errors import DecodeFailed, InvalidBatch
from pyllama_raw.native.libllama import lib
from tests.support.native_loops import anyio_backend  # noqa: F401
from tests.support.near_ties import parting
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

N_CASES = int(os.environ.get("PYLLAMA_RAW_TEST_CASES", "8"))
CONTEXT = ContextConfig(
    n_ctx=2048, n_threads=1, type_k="f32", type_v="f32", flash_attn="off", n_ubatch=256
)
CONFIG = EngineConfig(context=CONTEXT, scheduler=SchedulerConfig(n_slots=8))
GREEDY = SamplingParams(temperature=0, ignore_eos=True, seed=1, logprobs=2)


@pytest.fixture
def bench():
    made = Bench()
    yield made
    lib.plr_fail_decode(0, 0, -1)
    made.parts.release()


class Bench:
    """An engine on the tiny T5, driven step by step."""

    def __init__(self, config: EngineConfig = CONFIG, model: str = "t5") -> None:
        self.parts = build(tiny_model(model), config)
        self.tokens: dict[int, list[int]] = {}
        self.scores: dict[int, list[TokenLogprobs]] = {}
        self.ends: dict[int, Finished] = {}
        clock = count()
        self.driver = Driver(
            self.parts.scheduler, self.parts.executor, lambda: next(clock), self.tell
        )
        self.ids = count()

    def tell(self, events) -> None:
        for event in events:
            if isinstance(event, NewTokens):
                self.tokens[event.request_id] += event.tokens
                self.scores[event.request_id] += event.logprobs
            elif isinstance(event, Finished):
                self.ends[event.request_id] = event
                self.parts.executor.close(event.request_id)

    def add(self, source, max_tokens, sampling=GREEDY) -> int:
        request_id = next(self.ids)
        self.tokens[request_id], self.scores[request_id] = [], []
        tokens = array("i", [self.parts.decoder_start])
        request = Request(
            request_id,
            tokens,
            max_tokens,
            sampling=sampling,
            source=array("i", source),
        )
        self.driver.add([request], 0)
        return request_id

    def run(self) -> None:
        while self.driver.step():
            self.parts.scheduler.check_integrity()

    def alone(self, *request) -> list[TokenLogprobs]:
        request_id = self.add(*request)
        self.run()
        return self.scores[request_id]

    def partings(self, alone, ids) -> list[tuple[int, float] | None]:
        """Where outputs *ids* leave those that were computed alone."""
        return [parting(one, self.tokens[i]) for one, i in zip(alone, ids, strict=True)]

    def lengths(self, ids) -> list[int]:
        return [len(self.tokens[i]) for i in ids]

    @property
    def n_steps(self) -> int:
        return self.parts.scheduler.stats().steps


def draw(random: Random) -> tuple[list[int], int]:
    """A source and how many tokens are wanted."""
    n_source = random.randint(1, 80)
    return [random.randrange(40, 300) for _ in range(n_source)], random.randint(1, 40)


@pytest.mark.parametrize("seed", range(N_CASES))
def test_requests_that_join_and_leave_are_as_alone(bench, seed):
    """
    Of 16 requests that come at random, some of which leave, all have their own tokens.
    """
    random = Random(seed)  # noqa: S311
    requests = [draw(random) for _ in range(16)]
    alone = [bench.alone(*request) for request in requests]
    ids: list[int] = []
    for request in requests:
        ids.append(bench.add(*request))
        for _ in range(random.randrange(6)):
            bench.driver.step()
        if random.random() < 0.2:
            bench.driver.cancel(random.choice(ids))
    bench.run()

    whole = [bench.ends[i].reason is FinishReason.LENGTH for i in ids]
    lengths = zip(map(len, alone), bench.lengths(ids), strict=True)
    assert bench.partings(alone, ids) == [None] * 16
    assert [one == two for one, two in lengths] == whole
    assert sum(whole) >= 10


def test_equal_requests_share_their_steps(bench):
    """
    Eight at once take at most 1.2 times the steps of one.
    """
    source, n_tokens = list(range(50, 80)), 40
    before = bench.n_steps
    alone = bench.alone(source, n_tokens)
    n_alone = bench.n_steps - before

    ids = [bench.add(source, n_tokens) for _ in range(8)]
    bench.run()

    assert bench.partings([alone] * 8, ids) == [None] * 8
    assert bench.lengths(ids) == [n_tokens] * 8
    assert bench.n_steps - before - n_alone <= 1.2 * n_alone


def test_a_request_that_loses_its_slot_goes_on(bench):
    """
    Cells for 256 tokens are less than three outputs need; each is as with enough of them.
    """
    requests = [(list(range(50 + 20 * i, 70 + 20 * i)), 120) for i in range(3)]
    alone = [bench.alone(*request) for request in requests]
    few = Bench(
        CONFIG.model_copy(update={"context": CONTEXT.model_copy(update={"n_ctx": 256})})
    )
    try:
        ids = [few.add(*request) for request in requests]
        few.run()
    finally:
        few.parts.release()

    assert few.partings(alone, ids) == [None] * 3
    assert few.lengths(ids) == [120] * 3
    assert few.parts.scheduler.stats().preempted > 0


@pytest.mark.parametrize("code", [-1, -2, -3, 1, 2])
@pytest.mark.parametrize("n_until", range(10))
def test_a_failure_of_the_moment_changes_nothing(bench, code, n_until):
    """
    Whichever decode or read fails once, all outputs are those of undisturbed requests.
    """
    random = Random(2)  # noqa: S311
    requests = [(draw(random)[0], 12) for _ in range(4)]
    alone = [bench.alone(*request) for request in requests]
    lib.plr_fail_decode(code, n_until, -1)

    ids = [bench.add(*request) for request in requests[:2]]
    for _ in range(4):
        bench.driver.step()
    ids += [bench.add(*request) for request in requests[2:]]
    bench.run()

    assert bench.partings(alone, ids) == [None] * 4
    assert bench.lengths(ids) == [12] * 4


@pytest.mark.parametrize(("code", "error"), [(-1, InvalidBatch), (-3, DecodeFailed)])
def test_a_source_that_cannot_be_read_ends_alone(bench, code, error):
    """
    A newcomer whose reads fail gets the error; those that run keep their tokens.
    """
    random = Random(3)  # noqa: S311
    requests = [(draw(random)[0], 12) for _ in range(3)]
    alone = [bench.alone(*request) for request in requests]
    ids = [bench.add(*request) for request in requests[:2]]
    for _ in range(4):
        bench.driver.step()
    newcomer = bench.add(*requests[2])
    lib.plr_fail_decode(code, -1, 2)  # all of its slot
    while newcomer not in bench.ends:
        bench.driver.step()
    lib.plr_fail_decode(0, 0, -1)
    bench.run()

    assert isinstance(bench.ends[newcomer].error, error)
    assert bench.partings(alone[:2], ids) == [None] * 2
    assert bench.lengths(ids) == [12] * 2


def test_a_gate_of_gelu_shares_steps_too():
    """
    A T5 as Flan-T5: outputs may part, because libllama rounds its GELU to 16 bits.
    """
    gated = Bench(model="t5-gated")
    try:
        ids = [gated.add(list(range(50 + i, 80)), 30) for i in range(8)]
        gated.run()
    finally:
        gated.parts.release()

    assert gated.lengths(ids) == [30] * 8
    assert gated.n_steps < 60


@pytest.mark.anyio
async def test_requests_are_those_of_every_model():
    """
    Streams, several outputs, seeds, stops, log-probabilities and full slots work alike.
    """
    few = EngineConfig(
        context=CONTEXT.model_copy(update={"n_ctx": 512}),
        scheduler=SchedulerConfig(n_slots=2, context_full="shift"),
    )
    async with AsyncEngine.open(tiny_model("t5"), few) as engine:
        long = SamplingParams(temperature=0, max_tokens=10**6, ignore_eos=True)
        full = await engine.complete("a text", long)
        async with engine.generate("a text", GREEDY) as generation:
            deltas = [delta.text async for delta in generation]
        stop = full.text[3:5]
        stopped = await engine.complete(
            "a text", SamplingParams(temperature=0, stop=(stop,), max_tokens=50)
        )
        seeded = SamplingParams(n=3, seed=5, max_tokens=8, temperature=1.5)
        some = await engine.complete_n("a text", seeded)
        same = await engine.complete_n("a text", seeded)
        scored = await engine.complete(
            "a text", SamplingParams(temperature=0, logprobs=2, max_tokens=4)
        )
        late = await engine.complete("a text", long, deadline_s=1e-9)
        n_source = await engine.count("a text")

    assert (full.finish_reason, full.usage.completion_tokens) == ("length", 511)
    assert full.usage.prompt_tokens == n_source
    assert full.text.startswith("".join(deltas))
    assert stopped.text == full.text[: full.text.index(stop)]
    assert [one.token_ids for one in some] == [one.token_ids for one in same]
    assert len({one.token_ids for one in some}) == 3
    assert [one.token_id for one in scored.logprobs] == list(full.token_ids[:4])
    assert late.finish_reason is FinishReason.DEADLINE


def test_a_blocking_engine_reads_prompts_too():
    """
    Token ids are a source as they are, and the vocabulary says what begins an output.
    """
    with Engine.open(tiny_model("t5"), CONFIG) as engine:
        start = engine.info.vocab.decoder_start
        result = engine.complete([50, 60, 70], SamplingParams(max_tokens=3))

    assert (start.token_id, start.text) == (316, "<|pad|>")
    assert result.usage.prompt_tokens == 3
