"""Retries, breakers, limits of load and of time, with clocks that tests turn."""

import re
from datetime import UTC, datetime
from itertools import repeat

import anyio
import pytest
from anyio.lowlevel import checkpoint

from pyllama_raw import Usage
from pyllama_raw.errors import (
    ConfigError,
    InvalidRequest,
    ModelNotFound,
    PyllamaError,
)
from pyllama_raw.runners import (
    Backoff,
    Breaker,
    CachedModel,
    Limits,
    MockRunner,
    ModelCache,
    OwnServer,
    Pool,
    Prices,
    RemoteRunner,
    RunnerCapabilities,
    RunnerManager,
    SpawnedRunner,
    Timeouts,
    capabilities,
)
from pyllama_raw.runners.capabilities import VERBS
from pyllama_raw.runners.connection import retry_after_s
from pyllama_raw.runners.errors import (
    AuthFailed,
    Backpressure,
    CircuitOpen,
    ContentFiltered,
    NetworkError,
    NotReady,
    QueueTimeout,
    RateLimited,
    RemoteRefused,
    RunnerDied,
    RunnerTimeout,
    ServerError,
    UnexpectedAnswer,
    as_json,
    from_json,
)
from pyllama_raw.runners.guards import (
    RetryBudget,
    Turnstile,
    duration_s,
    retried,
    timed,
)
from tests.support.hostile import Unreadable
from tests.support.loops import anyio_backend  # noqa: F401

BUSY = ServerError(503, "busy")
EXAMPLES = [
    Backpressure("full", 2.0),
    QueueTimeout(30),
    RateLimited("slow down", 5.0),
    BUSY,
    RunnerTimeout("first_token", 3),
    NetworkError("gone"),
    RunnerDied(-9, "the end"),
    NotReady("a server", 120.0, "the end"),
    CircuitOpen(1.0, 31.0),
    AuthFailed("no such key"),
    RemoteRefused(403, "no", "forbidden", None),
    ContentFiltered("withheld"),
    UnexpectedAnswer("unexpected status 302"),
]


NAN = float("nan")
WRONG = {
    "Limits.max_concurrency": lambda: Limits(max_concurrency=0),
    "Limits.rpm": lambda: Limits(rpm=True),
    "Limits.queue_timeout_s": lambda: Limits(queue_timeout_s=NAN),
    "Limits.when_full": lambda: Limits(when_full="drop"),
    "Timeouts.total_s": lambda: Timeouts(total_s=-1),
    "Timeouts.between_tokens_s": lambda: Timeouts(between_tokens_s=[5]),
    "Backoff.factor": lambda: Backoff(factor=NAN),
    "Backoff.jitter": lambda: Backoff(jitter=0.5),
    "threshold": lambda: Breaker(0),
    "rest_s": lambda: Breaker(rest_s=NAN),
    "router": lambda: Pool({"a": MockRunner()}, "fastest"),
    "weights['a']": lambda: Pool({"a": MockRunner()}, weights={"a": NAN}),
    "runners['a']": lambda: Pool({"a": "http://localhost"}),
    "CachedModel.make": lambda: CachedModel("model.gguf"),
    "CachedModel.sleep_s": lambda: CachedModel(MockRunner, sleep_s=NAN),
    "models['a']": lambda: ModelCache({"a": MockRunner}),
    "models": lambda: ModelCache(["a"]),
    "budget['CPU']": lambda: ModelCache({}, budget={"CPU": NAN}),
    "max_models": lambda: ModelCache({}, max_models=0),
    "Prices.prompt": lambda: Prices(NAN, 1.0),
    "drain_s": lambda: RunnerManager(drain_s=NAN),
    "max_wait_s": lambda: ModelCache({}, max_wait_s=NAN),
    "program": lambda: SpawnedRunner("model.gguf"),
    "start_s": lambda: SpawnedRunner(OwnServer(), start_s=NAN),
    "model": lambda: RemoteRunner("http://localhost", 5),
}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


# -- errors -------------------------------------------------------------------


def test_retries_and_breakers_are_steered_by_flags():
    """
    A limit of the service may pass; a fault of it counts as well; all others neither.
    """
    flags = {
        type(error).__name__: (error.is_retryable, error.counts_as_circuit_failure)
        for error in EXAMPLES
        if error.is_retryable or error.counts_as_circuit_failure
    }

    assert flags == {
        "RateLimited": (True, False),
        "ServerError": (True, True),
        "RunnerTimeout": (True, True),
        "NetworkError": (True, True),
        "RunnerDied": (True, True),
        "NotReady": (True, True),
    }


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda error: error.code)
def test_an_error_comes_back_from_json(error):
    """
    With its class, its message and its attributes; the kind is in snake case.
    """
    fields = as_json(error)
    copy = from_json(fields)

    assert fields["kind"] == error.code == error.code.lower()
    assert (type(copy), str(copy), vars(copy)) == (
        type(error),
        str(error),
        vars(error),
    )


def test_an_error_of_an_unknown_kind_keeps_its_message():
    """
    A newer program may have told it.
    """
    error = from_json({"kind": "newer", "message": "a message"})

    assert (type(error), str(error)) == (PyllamaError, "a message")


# -- retries ------------------------------------------------------------------


def test_waits_grow_to_a_limit():
    """
    100 ms, twice as long each time, at most 2 s.
    """
    ceilings = [Backoff().ceiling_s(attempt) for attempt in (0, 1, 2, 10)]

    assert ceilings == [0.1, 0.2, 0.4, 2.0]


def test_jitter_is_between_the_half_and_all():
    """
    So those that failed together do not come back together.
    """
    ranges = []
    backoff = Backoff(jitter=lambda low, high: ranges.append((low, high)) or low)

    assert backoff.wait_s(1, BUSY) == 0.1
    assert ranges == [(0.1, 0.2)]


def test_three_tries_more_are_made():
    """
    Tries 0 to 2 are followed by another one, 3 gives up; so does what can never succeed.
    """
    backoff = Backoff(jitter=max)

    waits = [backoff.wait_s(attempt, BUSY) for attempt in range(4)]
    assert waits == [0.1, 0.2, 0.4, None]
    assert backoff.wait_s(0, ContentFiltered("no")) is None


def test_what_the_service_says_wins():
    """
    Retry-After: 5 is a wait of 5 s; nobody waits for hours.
    """
    assert Backoff().wait_s(0, RateLimited("", 5.0)) == 5.0
    assert Backoff().wait_s(0, RateLimited("", float("inf"))) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("12", 12.0),
        ("  3 ", 3.0),
        ("garbage", None),
        (None, None),
        ("-1", None),
        ("Wed, 21 Oct 2015 07:28:10 GMT", 10.0),
        ("Wed, 21 Oct 2015 07:27:00 GMT", 0.0),
    ],
)
def test_retry_after_is_a_number_or_a_date(text, seconds):
    """
    Anything else is as if it were not there.
    """
    now = datetime(2015, 10, 21, 7, 28, tzinfo=UTC)

    assert retry_after_s(text, now) == seconds


class Tries:
    """Sources that fail as told, one after the other."""

    def __init__(self, *tries):
        self.left = [*tries]
        self.waits = []

    async def sleep(self, seconds):
        self.waits.append(seconds)

    async def __call__(self):
        for item in self.left.pop(0):
            if isinstance(item, Exception):
                raise item
            yield item

    async def read(self, budget=None, read=None):
        read = [] if read is None else read
        budget = budget or RetryBudget(Backoff(jitter=max))
        budget.earn()
        async for item in retried(self, budget.wait_s, sleep=self.sleep):
            read.append(item)
        return read


@pytest.mark.anyio
async def test_what_fails_before_the_first_delta_is_tried_again():
    """
    The request is taken on once, whichever try did so.
    """
    tries = Tries([BUSY], [None, BUSY], [None, "a", "b"])

    assert await tries.read() == [None, "a", "b"]
    assert tries.waits == [0.1, 0.2]


@pytest.mark.anyio
async def test_nothing_is_tried_again_after_the_first_delta():
    """
    A reader would have the same text twice.
    """
    tries, read = Tries([None, "a", BUSY], [None, "a", "b"]), []
    with pytest.raises(ServerError):
        await tries.read(read=read)

    assert (read, tries.waits) == ([None, "a"], [])


@pytest.mark.anyio
async def test_retries_have_a_budget():
    """
    A service that is down gets a tenth more load, not three times more.
    """
    budget = RetryBudget(Backoff(), share=0.1, at_least=1)
    tries = Tries([BUSY], ["a"], [BUSY], *[["b"]] * 10, [BUSY], ["c"])
    await tries.read(budget)
    with pytest.raises(ServerError):
        await tries.read(budget)
    for _ in range(10):
        await tries.read(budget)

    assert await tries.read(budget) == ["c"]


# -- breakers -----------------------------------------------------------------


def test_a_breaker_opens_and_lets_one_probe_pass():
    """
    Two failures open it; after a rest one request passes, whose success closes it.
    """
    clock = Clock()
    breaker = Breaker(2, 30.0, clock)
    for _ in range(2):
        breaker.check()
        breaker.failed(BUSY)
    with pytest.raises(CircuitOpen) as caught:
        breaker.check()
    times = caught.value.opened_at, caught.value.retry_at
    clock.now += 30
    half = breaker.state
    breaker.check()
    with pytest.raises(CircuitOpen):
        breaker.check()
    breaker.succeeded()
    breaker.check()

    assert times == (100.0, 130.0)
    assert (half, breaker.state) == ("half_open", "closed")


def test_a_probe_that_fails_opens_again_and_one_that_leaves_makes_room():
    """
    Nobody waits for a probe whose caller has gone.
    """
    clock = Clock()
    breaker = Breaker(1, 30.0, clock)
    breaker.failed(BUSY)
    clock.now += 30
    breaker.check()
    breaker.left()
    breaker.check()
    breaker.failed(BUSY)

    assert breaker.state == "open"


def test_faults_of_callers_open_no_breaker():
    """
    A refusal is an answer: the service is well. open() opens at once, for as long as told.
    """
    clock = Clock()
    breaker = Breaker(2, 30.0, clock)
    for error in (BUSY, AuthFailed("no"), BUSY):
        breaker.failed(error)
    before = breaker.state
    breaker.open(5.0)
    after = breaker.state
    clock.now += 5

    assert (before, after) == ("closed", "open")
    assert breaker.state == "half_open"


# -- limits of load -----------------------------------------------------------


def test_the_third_request_of_two_in_a_minute_is_refused():
    """
    It is told when there is room, which is so a minute after the first.
    """
    clock = Clock()
    gate = Turnstile(Limits(rpm=2), clock)
    gate.count()
    clock.now += 20
    gate.count()
    with pytest.raises(Backpressure) as caught:
        gate.count()
    clock.now += 40
    gate.count()

    assert caught.value.reason == "requests-per-minute limit reached (2/2)"
    assert caught.value.retry_after_s == 40


def test_tokens_of_a_minute_are_counted():
    """
    A request counts one at least.
    """
    gate = Turnstile(Limits(tpm=10), Clock())
    gate.count(0)
    gate.count(9)

    with pytest.raises(
        Backpressure, match=r"tokens-per-minute limit reached \(10/10\)"
    ):
        gate.count(1)


def test_headers_of_the_service_are_limits():
    """
    Nothing left until 1.5 s from now.
    """
    clock = Clock()
    gate = Turnstile(Limits(), clock)
    gate.note_headers(
        {"x-ratelimit-remaining-requests": "1", "x-ratelimit-reset-requests": "1s"}
    )
    gate.count()
    gate.note_headers(
        {"x-ratelimit-remaining-tokens": "0", "x-ratelimit-reset-tokens": "1.5s"}
    )
    with pytest.raises(Backpressure):
        gate.count()
    clock.now += 1.5
    gate.count()


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("6m0s", 360.0),
        ("20ms", 0.02),
        ("1.5", 1.5),
        ("1h2m", 3720.0),
        ("", None),
        ("x1s", None),
    ],
)
def test_durations_of_headers(text, seconds):
    """
    As services write them.
    """
    assert duration_s(text) == seconds


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("limits", "error"),
    [
        (Limits(max_concurrency=1, when_full="reject"), Backpressure),
        (Limits(max_concurrency=1, max_queue=0), Backpressure),
        (Limits(max_concurrency=1, queue_timeout_s=0.001), QueueTimeout),
    ],
)
async def test_who_finds_no_place_is_told(limits, error):
    """
    At once, or when its time in the queue is over; the place comes back.
    """
    gate = Turnstile(limits)
    async with gate.entered():
        with pytest.raises(error):
            async with gate.entered():
                pass
    async with gate.entered():
        pass


# -- limits of time -----------------------------------------------------------


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("n_before", "limits", "what"),
    [
        (0, {"first_token_s": 0.01}, "first_token"),
        (1, {"first_token_s": 0.01}, "first_token"),
        (2, {"between_tokens_s": 0.01}, "between_tokens"),
        (2, {"total_s": 0.01}, "total"),
    ],
)
async def test_a_source_that_hangs_is_named_by_its_limit(n_before, limits, what):
    """
    And is closed.
    """
    ended = []

    async def source():
        try:
            for item in (None, "a")[:n_before]:
                await checkpoint()
                yield item
            await anyio.sleep_forever()
        finally:
            ended.append(True)

    with pytest.raises(RunnerTimeout) as caught:
        async for _ in timed(source(), Timeouts(**limits)):
            pass

    assert (caught.value.phase, ended) == (what, [True])


# -- money --------------------------------------------------------------------


def test_prices_are_for_a_million_tokens():
    """
    Cached ones have their own; of a sum, four fifths are the prompt.
    """
    own = Prices(prompt=1.0, completion=2.0, cached=0.5)

    assert own.cost(Usage(1000, 100, 400)).usd == pytest.approx(0.001)
    assert own.estimate(1000).usd == pytest.approx(0.0012)
    assert own.estimate(0).usd == own.estimate(1).usd


def test_prices_of_known_models():
    """
    The package genai-prices knows them; None of others.
    """
    pytest.importorskip("genai_prices")
    price = capabilities.Prices.known("gpt-4o-mini", "openai")

    assert price is not None
    assert 0 < price.prompt < price.completion
    assert capabilities.Prices.known("no-such-model-at-all") is None


@pytest.mark.parametrize("name", WRONG)
def test_wrong_options_of_runners_are_told_by_name(name):
    """
    Before anything is sent or loaded.
    """
    with pytest.raises(ConfigError, match=f"^{re.escape(name)}="):
        WRONG[name]()


@pytest.mark.anyio
@pytest.mark.parametrize("prompt", [range(10**12), 5, None, object()])
async def test_what_cannot_be_sent_is_refused_before_it_is_copied(prompt):
    """
    A range is small until it is written as JSON, so its length is asked first.
    """
    runner = MockRunner(capabilities=RunnerCapabilities(VERBS, token_ids=True))
    for ask in (runner.generate, runner.estimate):
        with pytest.raises(InvalidRequest, match="prompt"):
            ask(prompt)
    for call in (
        runner.embed(prompt),
        runner.embed([prompt]),
        runner.embed(repeat("a")),
        runner.rank("a", prompt),
        runner.rank("a", [prompt]),
    ):
        with pytest.raises(InvalidRequest):
            await call


@pytest.mark.parametrize("name", ["client", "cache_salt", "tools"])
def test_what_a_pool_reads_of_a_request_is_checked_first(name):
    """
    An option of another kind is refused by name.
    """
    with pytest.raises(InvalidRequest, match=name):
        Pool({"a": MockRunner()}).generate("a", **{name: Unreadable()})


def test_params_of_a_run_are_sampling_params():
    """
    Anything else is refused by name, as an engine does.
    """
    for ask in (MockRunner().generate, MockRunner().estimate):
        with pytest.raises(InvalidRequest, match="params"):
            ask("a", {"max_tokens": 3})


@pytest.mark.anyio
async def test_a_cache_names_what_it_was_asked_for():
    """
    A model of a name that is none, and a wait that is none; it goes on and can be closed.
    """
    async with ModelCache({"a": CachedModel(lambda _: MockRunner())}) as cache:
        with pytest.raises(ModelNotFound):
            cache.status(["a"])
        with pytest.raises(InvalidRequest, match="drain_s"):
            await cache.aclose(NAN)
        result = await cache.runner("a").generate("x").collect()

    assert result.text == "hello world"
