"""Several runners: who gets a request, who rests, and how one is exchanged."""

import anyio
import anyio.lowlevel
import pytest

from pyllama_raw import SamplingParams, Usage
from pyllama_raw.errors import (
    ClosedError,
    ConfigError,
    EngineFault,
    EngineStopped,
    Unsupported,
)
from pyllama_raw.runners import (
    KeptRunners,
    LocalRunner,
    ManagedState,
    MockRunner,
    OwnServer,
    Pool,
    Prices,
    RebuildCause,
    RemoteRunner,
    RunnerCapabilities,
    RunnerCounts,
    RunnerHealth,
    RunnerManager,
    SpawnedRunner,
)
from pyllama_raw.runners.errors import Backpressure, NetworkError
from pyllama_raw.runners.manager import runner_for
from tests.limits import LIMIT_S
from tests.loops import anyio_backend  # noqa: F401

pytestmark = pytest.mark.anyio

FEW = SamplingParams(max_tokens=2)


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Sick(MockRunner):
    """A runner that is not well."""

    is_well = False

    async def health(self) -> RunnerHealth:
        return RunnerHealth(self.is_well, self.is_well)


class Stillborn(MockRunner):
    """A runner that cannot start."""

    async def start(self) -> None:
        raise NetworkError("nobody is there")


def counts(*runners: MockRunner) -> list[int]:
    return [len(runner.requests) for runner in runners]


async def ask(runner, prompt="a prompt", n=1, **options):
    for _ in range(n):
        result = await runner.generate(prompt, FEW, **options).collect()
    return result


# -- pools --------------------------------------------------------------------


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


# -- managers -----------------------------------------------------------------


async def test_a_runner_that_is_well_is_not_restarted():
    """
    One of the same specification stays, unless it is sick.
    """
    runners = []

    def make(spec):
        runners.append(Sick(name=spec))
        runners[-1].is_well = True
        return runners[-1]

    manager = RunnerManager(make)
    first = await manager.swap("m", "a.gguf")
    same = await manager.swap("m", "a.gguf")
    runners[0].is_well = False
    third = await manager.swap("m", "a.gguf")

    assert first is same is runners[0]
    assert third is runners[1] is manager.get("m")


async def test_requests_end_on_the_runner_that_gives_way():
    """
    New ones go to the new runner meanwhile; then the old one is closed.
    """
    goes_on = anyio.Event()

    async def hold(index):
        if index:
            await goes_on.wait()

    runners = {"a": MockRunner(before=hold), "b": MockRunner(["new"])}
    manager = RunnerManager(runners.__getitem__)
    await manager.swap("m", "a")
    with anyio.fail_after(LIMIT_S):
        async with manager.get("m").generate("a", FEW) as run:
            await anext(run)
            async with anyio.create_task_group() as group:
                group.start_soon(manager.swap, "m", "b")
                await anyio.wait_all_tasks_blocked()
                new = await ask(manager.get("m"))
                was_open = (await runners["a"].health()).ready
                goes_on.set()
                old = await run.collect()

    assert (old.text, new.text) == ("hello world", "new")
    assert was_open
    assert not (await runners["a"].health()).ready


async def test_a_start_that_fails_is_a_state():
    """
    The old runner goes on; a name that never had one tells why.
    """
    runners = {"a": MockRunner(), "b": Stillborn()}
    manager = RunnerManager(runners.__getitem__)
    await manager.swap("m", "a")
    for name in ("m", "n"):
        with pytest.raises(NetworkError):
            await manager.swap(name, "b")

    state = manager.state("m")
    assert (state.state, state.spec, state.serves) == (ManagedState.FAILED, "b", "a")
    assert manager.get("m") is runners["a"]
    assert not (await runners["b"].health()).ready  # it was closed
    with pytest.raises(NetworkError):
        manager.get("n")
    with pytest.raises(ConfigError, match="there are m, n"):
        manager.get("other")


async def test_removing_and_closing_close():
    """
    Once each.
    """
    runners = {"a": MockRunner(), "b": MockRunner()}
    manager = RunnerManager(runners.__getitem__)
    await manager.swap("m", "a")
    await manager.swap("n", "b")
    await manager.remove("m")
    await manager.remove("m")
    await manager.aclose()

    assert [(await runner.health()).ready for runner in runners.values()] == [
        False,
        False,
    ]
    assert manager.state("n") is None


class Slow(MockRunner):
    """A runner that starts when it may, or is stopped before."""

    def __init__(self, spec: str, may_start: anyio.Event) -> None:
        super().__init__(name=spec)
        self._may_start = may_start

    async def start(self) -> None:
        await self._may_start.wait()


@pytest.mark.parametrize("verb", ["remove", "aclose"])
@pytest.mark.parametrize("ends", ["at once", "by itself"])
async def test_a_runner_that_starts_while_its_name_goes_is_closed(verb, ends):
    """
    Each swap that runs or waits raises ClosedError; no runner stays open, whether its start
    can be broken off or not.
    """
    runners, errors, starts = [], [], {name: anyio.Event() for name in "abc"}
    starts["a"].set()

    def make(spec):
        runners.append((Slow if ends == "at once" else Stubborn)(spec, starts[spec]))
        return runners[-1]

    async def let_start():
        await (
            anyio.wait_all_tasks_blocked()
        )  # the manager waits for the end of the start
        if ends == "by itself":
            starts["b"].set()

    async def swap(spec):
        try:
            await manager.swap("n", spec)
        except ClosedError as error:
            errors.append(error)

    manager = RunnerManager(make, drain_s=0.0)
    with anyio.fail_after(LIMIT_S):
        await manager.swap("n", "a")
        async with anyio.create_task_group() as group:
            for spec in ("b", "c"):
                group.start_soon(swap, spec)
                await anyio.wait_all_tasks_blocked()
            group.start_soon(let_start)
            await (manager.remove("n") if verb == "remove" else manager.aclose())

    assert len(errors) == 2
    assert [(runner.name, runner._closed) for runner in runners] == [
        ("a", True),
        ("b", True),
    ]
    with pytest.raises(ConfigError):
        manager.get("n")


class Stubborn(Slow):
    """A runner whose start goes on, as one in a thread does."""

    async def start(self) -> None:
        with anyio.CancelScope(shield=True):
            await self._may_start.wait()


async def test_a_manager_that_closes_waits_for_no_request():
    """
    A runner that gives way serves its requests until then; no other one is made afterwards.
    """
    holds = anyio.Event()
    runners = {"a": MockRunner(before=lambda _: holds.wait()), "b": MockRunner()}
    manager = RunnerManager(runners.__getitem__)
    with anyio.fail_after(LIMIT_S):
        await manager.swap("m", "a")
        async with anyio.create_task_group() as group, runners["a"].generate("x"):
            group.start_soon(manager.swap, "m", "b")
            await anyio.wait_all_tasks_blocked()
            is_open = not runners["a"]._closed
            await manager.aclose()
            closed = [runner._closed for runner in runners.values()]

    assert (is_open, closed) == (True, [True, True])
    with pytest.raises(ClosedError):
        await manager.swap("m", "b")


async def test_a_runner_is_known_by_its_specification():
    """
    Files and addresses; for others the message says what there is.
    """
    kinds = [
        type(runner_for(spec))
        for spec in ("a.gguf", "hf:a/b/c.GGUF", "http://a:80/v1#m")
    ]

    assert kinds == [LocalRunner, LocalRunner, RemoteRunner]
    for spec in ("a.bin", "http://a:80/v1", ""):
        with pytest.raises(ConfigError, match="FILE"):
            runner_for(spec)


# -- kept runners -------------------------------------------------------------


async def test_the_longest_unused_gives_way():
    """
    1, 2, both used, then 3: 1 is gone, and was closed.
    """
    gone, runners = [], {key: MockRunner() for key in (1, 2, 3)}
    cache = KeptRunners[int](2, evicted=gone.append, clock=Clock())
    none = cache.hit_rate
    await cache.put(1, runners[1])
    await cache.put(2, runners[2])
    got = [await cache.get(1), await cache.get(2)]
    await cache.put(3, runners[3])

    assert got == [runners[1], runners[2]]
    assert (await cache.get(1), gone, len(cache)) == (None, [1], 2)
    assert (none, cache.hit_rate) == (None, 2 / 3)
    assert not (await runners[1].health()).ready


async def test_what_is_sick_or_unused_is_given_up():
    """
    Health is asked every 10 s, and 60 s without use are too many.
    """
    clock, sick, other = Clock(), Sick(), MockRunner()
    cache = KeptRunners[str](clock=clock)
    await cache.put("sick", sick)
    await cache.put("other", other)
    young = await cache.get("sick")
    clock.now += 10
    runners_then = [await cache.get("sick"), await cache.get("other")]
    clock.now += 61
    expired = await cache.get("other")
    await cache.aclose()

    assert young is sick
    assert runners_then == [None, other]
    assert expired is None
    assert len(cache) == 0


async def test_a_runner_that_is_given_up_serves_its_calls_to_their_end():
    """
    By number, and by its health: the stream goes on, and the runner is closed with its end.
    """
    clock, sick = Clock(), Sick(before=lambda _: goes_on.wait())
    for give_up in ("number", "health"):
        goes_on = anyio.Event()
        serving = sick if give_up == "health" else MockRunner(before=sick._before)
        cache = KeptRunners[str](1, clock=clock)
        await cache.put("a", serving)
        with anyio.fail_after(LIMIT_S):
            async with serving.generate("x") as run:
                if give_up == "number":
                    await cache.put("b", MockRunner())
                else:
                    clock.now += 10
                    await cache.get("a")
                was_open = not serving._closed
                goes_on.set()
                result = await run.collect()

        assert (was_open, result.text) == (True, "hello world")
        assert (serving._closed, await cache.get("a")) == (True, None)


async def test_closing_kept_runners_ends_what_serves_still():
    """
    Also those that were given up before; what evicted() raises ends nothing.
    """
    holds = anyio.Event()
    serving = MockRunner(before=lambda _: holds.wait())
    cache = KeptRunners[str](1, evicted=lambda _: 1 / 0)
    await cache.put("a", serving)
    with anyio.fail_after(LIMIT_S):
        async with serving.generate("x"):
            await cache.put("b", MockRunner())
            await cache.aclose()
            is_closed = serving._closed

    assert (is_closed, len(cache)) == (True, 0)


async def test_nothing_is_kept_once_all_is_closed():
    """
    A runner that is put then, or meanwhile, is closed.
    """
    cache, late = KeptRunners[str](), MockRunner()
    await cache.aclose()
    with pytest.raises(ClosedError):
        await cache.put("a", late)

    assert (late._closed, len(cache)) == (True, 0)


async def test_a_pool_that_cannot_start_closes_what_has_started():
    """
    Nobody has got it, so nobody could; the error is that of the member.
    """
    well, bad = MockRunner(), Stillborn()
    with pytest.raises(NetworkError):
        async with Pool({"a": well, "b": bad}):
            pass

    assert (well._closed, bad._closed) == (True, True)


# -- who serves, and how often ------------------------------------------------


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
