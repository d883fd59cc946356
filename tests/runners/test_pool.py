"""Several runners behind one: who gets a request, who rests, and who served it."""

import anyio
import anyio.lowlevel
import pytest

from pyllama_raw import SamplingParams, Usage
from pyllama_raw.errors import (
    ConfigError,
    EngineFault,
    EngineStopped,
    Unsupported,
)
from pyllama_raw.runners import (
    LocalRunner,
    MockRunner,
    OwnServer,
    Pool,
    Prices,
    RebuildCause,
    RemoteRunner,
    RunnerCapabilities,
    RunnerCounts,
    RunnerHealth,
    SpawnedRunner,
)
from pyllama_raw.runners.errors import Backpressure, NetworkError
from tests.runners.pooled import FEW, Clock, Sick, Stillborn, ask, counts
from tests.support.limits import LIMIT_S
from tests.support.loops import anyio_backend  # noqa: F401

pytestmark = pytest.mark.anyio


async def test_round_robin_takes_turns():
    """
    One after the other.
    """
    a, b, c = MockRunner(), MockRunner(), MockRunner()
    async with Pool({"a": a, "b": b, "c": c}, "round_robin") as pool:
        await ask(pool, n=6)

    assert counts(a, b, c) == [2, 2, 2]


async def test_open_requests_spread_by_weight():
    """
    Of four that are open at once, a runner of weight 3 has three.
    """
    a, b = MockRunner(), MockRunner()
    async with Pool({"a": a, "b": b}, "least_load", weights={"b": 3.0}) as pool:
        runs = [pool.generate("a prompt", FEW) for _ in range(4)]
        for run in runs:
            await run.__aenter__()
        n_requests = counts(a, b)
        for run in runs:
            await run.__aexit__()

    assert n_requests == [1, 3]


async def test_prompts_with_one_beginning_stay_together():
    """
    So does what one client asks; unrelated prompts spread.
    """
    runners = {name: MockRunner() for name in "abcd"}
    async with Pool(runners) as pool:
        start = "the same beginning of a long prompt " * 40
        for end in ("one", "two", "three"):
            await ask(pool, start + end)
        together = sorted(counts(*runners.values()))
        for index in range(8):
            await ask(pool, f"{index} " * 200, client="me")
        homes = sorted(counts(*runners.values()))
        for index in range(40):
            await ask(pool, f"{index} is unrelated " * 100)
        spread = counts(*runners.values())

    assert together == [0, 0, 0, 3]
    assert homes in ([0, 0, 3, 8], [0, 0, 0, 11])
    assert min(spread) > 0


async def test_what_fails_before_its_first_delta_goes_to_another():
    """
    The runner that failed rests; when it has, it is asked again.
    """
    clock = Clock()
    bad, good = MockRunner(error=NetworkError("gone")), MockRunner()
    pool = Pool({"a": bad, "b": good}, "round_robin", rest_s=10, clock=clock)
    async with pool:
        first = await ask(pool)
        await ask(pool, n=3)
        rested = counts(bad, good)
        clock.now += 10
        await ask(pool, n=2)

    assert first.text == "hello world"
    assert rested == [1, 4]
    assert len(bad.requests) == 2


async def test_what_fails_later_is_the_readers():
    """
    Nobody gets the same text twice.
    """
    bad, good = MockRunner(error=EngineFault("gone"), n_before=1), MockRunner()
    async with Pool({"a": bad, "b": good}, "round_robin") as pool:
        with pytest.raises(EngineFault):
            await ask(pool)

    assert counts(bad, good) == [1, 0]


async def test_a_full_runner_has_not_failed():
    """
    Another one serves, and the full one is asked again next time.
    """
    full, other = MockRunner(error=Backpressure("full")), MockRunner()
    async with Pool({"a": full, "b": other}, "round_robin") as pool:
        await ask(pool, n=4)

    assert len(other.requests) == 4
    assert len(full.requests) > 1


async def test_one_that_is_closed_is_as_one_that_failed():
    """
    Others serve, and it is not asked for a while; so is one whose engine has stopped.
    """
    stopped = MockRunner(error=EngineStopped("the thread ended"))
    closed, well = MockRunner(), MockRunner()
    runners = {"a": stopped, "b": closed, "c": well}
    async with Pool(runners, "round_robin", clock=Clock()) as pool:
        await closed.aclose()
        await ask(pool, n=6)

    assert counts(stopped, closed, well) == [1, 0, 6]


async def test_a_runner_that_has_rested_gets_one_probe():
    """
    Whatever comes meanwhile goes to others.
    """
    clock, goes_on = Clock(), anyio.Event()
    bad, good = MockRunner(error=NetworkError("gone"), before=None), MockRunner()
    pool = Pool({"a": bad, "b": good}, "round_robin", rest_s=10, clock=clock)

    async def hold(_):
        await goes_on.wait()

    async with pool:
        await ask(pool)
        clock.now += 10
        bad._before = hold
        with anyio.fail_after(LIMIT_S):
            async with anyio.create_task_group() as group:
                for _ in range(4):
                    group.start_soon(ask, pool)
                await anyio.wait_all_tasks_blocked()
                n_requests = counts(bad, good)
                goes_on.set()

    assert n_requests == [2, 4]


async def test_all_that_rest_are_better_than_none():
    """
    The error of the last one is told.
    """
    bad = MockRunner(error=NetworkError("gone"))
    async with Pool({"a": bad}) as pool:
        for _ in range(2):
            with pytest.raises(NetworkError):
                await ask(pool)

    assert len(bad.requests) == 2


async def test_health_takes_out_those_that_are_not_well():
    """
    The pool is well while one is.
    """
    sick, well = Sick(), MockRunner()
    async with Pool({"a": sick, "b": well}, "round_robin") as pool:
        health = await pool.health()
        await ask(pool, n=4)

    assert (health.live, health.ready, health.detail) == (True, True, "ready: b")
    assert counts(sick, well) == [0, 4]


async def test_a_pool_can_what_all_can():
    """
    The smallest context, and words that all take.
    """
    one = RunnerCapabilities(n=True, logprobs=True, n_ctx=8, sampling=frozenset({"n"}))
    two = RunnerCapabilities(n=True, n_ctx=4)
    pool = Pool({"a": MockRunner(capabilities=one), "b": MockRunner(capabilities=two)})

    assert pool.capabilities == RunnerCapabilities(
        n=True, n_ctx=4, sampling=frozenset({"n"})
    )
    for runners, weights in (({}, {}), ({"a": MockRunner()}, {"b": 1.0})):
        with pytest.raises(ConfigError):
            Pool(runners, weights=weights)


async def test_a_pool_that_cannot_start_closes_what_has_started():
    """
    Nobody has got it, so nobody could; the error is that of the member.
    """
    well, bad = MockRunner(), Stillborn()
    with pytest.raises(NetworkError):
        async with Pool({"a": well, "b": bad}):
            pass

    assert (well._closed, bad._closed) == (True, True)


async def test_a_result_says_who_served_it(caplog):
    """
    The member of a pool by its name there; what moved is counted, and told in the log.
    """
    bad = MockRunner(error=NetworkError("broke"))
    async with Pool({"a": bad, "b": MockRunner()}, "round_robin", name="both") as pool:
        result = await ask(pool)
        alone = await ask(MockRunner(name="only"))

    assert (result.served_by, alone.served_by) == ("b", "only")
    assert pool.counts == RunnerCounts(n_requests=1, n_moves=1)
    assert bad.counts == RunnerCounts(n_requests=1, n_failed=1)
    assert "both: from a to b: broke" in caplog.text
    assert "a rests for 10 s after 1 failures in a row" in caplog.text


async def test_a_member_that_has_not_begun_is_not_kept_away():
    """
    Only a request can load it.
    """

    class Unloaded(MockRunner):
        async def health(self) -> RunnerHealth:
            return RunnerHealth(live=True, ready=False, is_idle=True)

    unloaded, well = Unloaded(), MockRunner()
    async with Pool({"a": unloaded, "b": well}, "round_robin") as pool:
        await pool.health()
        await ask(pool, n=4)

    assert counts(unloaded, well) == [2, 2]


async def test_what_is_asked_for_can_be_estimated_and_summed():
    """
    Ids are counted, texts reckoned; counts of usage add up.
    """
    prices = Prices(1.0, 2.0)
    runner = MockRunner()
    runner._prices = prices
    params = SamplingParams(max_tokens=10, n=2)
    ids, text = runner.estimate([1, 2, 3], params), runner.estimate("a" * 9, params)
    total = Usage(1, 2, 1, "host") + Usage(10, 20, 5, "host", 3, 4)

    assert (ids.n_prompt, text.n_prompt, text.n_output) == (3, 3, 20)
    assert ids.cost == prices.cost(Usage(3, 20, 0))
    assert total == Usage(11, 22, 6, "host", 3, 4)


async def test_what_cannot_begin_anew_says_so():
    """
    A fake has nothing that could; a name says where each computes.
    """
    with pytest.raises(Unsupported, match="rebuild"):
        await MockRunner().rebuild(cause=RebuildCause.MANUAL)

    kinds = [
        runner.kind
        for runner in (
            MockRunner(),
            LocalRunner("a.gguf"),
            SpawnedRunner(OwnServer()),
            RemoteRunner("http://a", "m"),
            Pool({"a": MockRunner()}),
        )
    ]
    assert kinds == ["other", "local_cpu", "child", "remote", "several"]
