"""Errors of a service: one of ours each, tries after them, limits of time, and its health."""

import anyio
import anyio.lowlevel
import httpx2
import pytest

from pyllama_raw.errors import (
    PromptTooLong,
    Unsupported,
)
from pyllama_raw.runners import (
    Backoff,
    Breaker,
    RebuildCause,
    RemoteRunner,
    RunnerCounts,
    Timeouts,
)
from pyllama_raw.runners.errors import (
    AuthFailed,
    CircuitOpen,
    ContentFiltered,
    NetworkError,
    RateLimited,
    RemoteRefused,
    RunnerTimeout,
    ServerError,
    UnexpectedAnswer,
)
from tests.runners.stub import (
    DONE,
    answer_of,
    chunk,
    event,
    honest,
    refusal,
    runner_of,
    said,
    stream,
    stub_of,
)
from tests.support.loops import anyio_backend  # noqa: F401

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize(
    ("reply", "kind", "n_tries"),
    [
        (refusal(400), RemoteRefused, 1),
        (refusal(401), AuthFailed, 1),
        (refusal(403), RemoteRefused, 1),
        (refusal(404), RemoteRefused, 1),
        (refusal(408), ServerError, 4),
        (refusal(409), ServerError, 4),
        (refusal(429), RateLimited, 4),
        (refusal(500), ServerError, 4),
        (refusal(503), ServerError, 4),
        (refusal(503, code="server_is_overloaded"), RateLimited, 4),
        (refusal(302), UnexpectedAnswer, 1),
        (refusal(400, code="unsupported", param="model"), Unsupported, 1),
        (refusal(400, n_prompt_tokens=200, n_ctx=128), PromptTooLong, 1),
        (httpx2.Response(502, text="<html>bad gateway"), ServerError, 4),
        (httpx2.ConnectError("refused"), NetworkError, 4),
        (httpx2.ConnectTimeout("late"), RunnerTimeout, 4),
        (lambda _: stream(event({"error": {"code": 500}})), ServerError, 4),
        (httpx2.Response(200, text="no stream"), UnexpectedAnswer, 1),
    ],
    ids=range(18),
)
async def test_a_status_is_an_error_of_ours(reply, kind, n_tries):
    """
    What may pass is tried again, three times; the rest once.
    """
    runner = runner_of(reply)
    with pytest.raises(kind):
        await answer_of(runner)

    assert len(stub_of(runner).requests) == n_tries


async def test_an_error_within_a_stream_has_the_status_of_its_type():
    """
    After the first delta nothing is asked again.
    """
    failed = event({"error": {"message": "slow", "type": "rate_limit_error"}})
    runner = runner_of(stream(chunk("a"), failed))
    with pytest.raises(RateLimited):
        await answer_of(runner)

    assert len(stub_of(runner).requests) == 1


async def test_withheld_text_is_an_error_that_is_final():
    """
    Another try would be withheld, too.
    """
    runner = runner_of(stream(chunk("a", "content_filter"), DONE))
    with pytest.raises(ContentFiltered):
        await answer_of(runner)

    assert len(stub_of(runner).requests) == 1


async def test_a_try_after_a_failure_gives_one_text():
    """
    Whatever failed first: no connection, load, or a stream without a token.
    """
    runner = runner_of(
        httpx2.ConnectError("no"), refusal(503), stream(DONE), stream(*said("a", "b"))
    )
    result = await answer_of(runner)

    assert (result.text, len(stub_of(runner).requests)) == ("ab", 4)


async def test_two_faults_open_the_breaker():
    """
    The third request is not sent, and the runner is not ready.
    """
    runner = runner_of(refusal(503), backoff=Backoff(max_retries=0), breaker=Breaker(2))
    async with runner:
        kinds = []
        for _ in range(3):
            try:
                await runner.generate("a").collect()
            except (ServerError, CircuitOpen) as error:
                kinds.append(type(error))
        health = await runner.health()

    assert kinds == [ServerError, ServerError, CircuitOpen]
    assert len(stub_of(runner).requests) == 2
    assert (health.live, health.ready) == (True, False)


async def test_another_key_is_for_new_requests():
    """
    Those under way keep the old one.
    """
    goes_on = anyio.Event()
    reply = stream(chunk("a"), goes_on.wait, *said("b"))
    runner = runner_of(reply, stream(*said("c")), api_key="old")
    async with runner, runner.generate("a") as run:
        await anext(run)
        await runner.rebuild("new")
        new = await runner.generate("a").collect()
        goes_on.set()
        result = await run.collect()

    keys = [headers["authorization"] for _, _, headers in stub_of(runner).requests]
    assert keys == ["Bearer old", "Bearer new"]
    assert (result.text, new.text) == ("ab", "c")


async def test_a_service_that_hangs_has_a_limit():
    """
    Before the first token, which is tried again, and after it, which is not.
    """
    for first, what, n_tries in (
        ([], "first_token", 2),
        ([chunk("a")], "between_tokens", 1),
    ):
        stalled = [stream(*first, anyio.sleep_forever) for _ in range(2)]
        limits = Timeouts(first_token_s=0.05, between_tokens_s=0.05)
        backoff = Backoff(first_s=0, max_retries=1)
        runner = runner_of(*stalled, timeouts=limits, backoff=backoff)
        with pytest.raises(RunnerTimeout) as caught:
            await answer_of(runner)

        assert (caught.value.phase, len(stub_of(runner).requests)) == (what, n_tries)


async def test_health_has_a_short_limit_of_its_own():
    """
    A service that does not answer is not live, and nobody waits for long.
    """

    class Silent(httpx2.AsyncBaseTransport):
        async def handle_async_request(self, request):
            await anyio.sleep_forever()

    limits = Timeouts(health_s=0.01)
    async with RemoteRunner("http://a", "m", timeouts=limits, transport=Silent()) as r:
        health = await r.health()

    assert (health.live, health.ready) == (False, False)
    assert health.detail == "no answer within 0.01 s"


@pytest.mark.parametrize(
    ("status", "live", "ready"),
    [(200, True, True), (503, True, False), (500, False, False)],
)
async def test_health_is_what_the_service_says(status, live, ready):
    """
    One that loads or drains lives, and takes nothing.
    """
    answers = httpx2.MockTransport(lambda _: httpx2.Response(status))
    async with RemoteRunner("http://a", "m", transport=answers) as runner:
        health = await runner.health()

    assert (health.live, health.ready) == (live, ready)


async def test_beginning_anew_closes_the_breaker():
    """
    For causes of a service; a key that is not given stays.
    """
    runner = runner_of(
        refusal(500),
        honest,
        breaker=Breaker(1),
        api_key="k",
        backoff=Backoff(max_retries=0),
    )
    async with runner:
        with pytest.raises(ServerError):
            await runner.generate("a").collect()
        await runner.rebuild(cause=RebuildCause.CONFIG_CHANGED)
        result = await runner.generate("a").collect()
        with pytest.raises(Unsupported):
            await runner.rebuild(cause=RebuildCause.DEVICE_POISONED)

    assert result.text == "hello world"
    assert stub_of(runner).requests[-1][2]["authorization"] == "Bearer k"
    assert runner.counts == RunnerCounts(n_requests=2, n_failed=1)


async def test_tries_are_told_and_counted(caplog):
    """
    A line for each, with the reason.
    """
    runner = runner_of(refusal(500), honest)
    await answer_of(runner)

    assert runner.counts == RunnerCounts(n_requests=1, n_retries=1)
    assert "m at a: try 1 failed, another one in 0.0 s: the server answered 500" in (
        caplog.text
    )
