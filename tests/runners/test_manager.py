"""Runners by name and by use: how one is exchanged, and when one is given up."""

import anyio
import anyio.lowlevel
import pytest

from pyllama_raw.errors import (
    ClosedError,
    ConfigError,
)
from pyllama_raw.runners import (
    KeptRunners,
    LocalRunner,
    ManagedState,
    MockRunner,
    RemoteRunner,
    RunnerManager,
)
from pyllama_raw.runners.errors import NetworkError
from pyllama_raw.runners.pool import runner_for
from tests.runners.pooled import FEW, Clock, Sick, Stillborn, ask
from tests.support.limits import LIMIT_S
from tests.support.loops import anyio_backend  # noqa: F401

pytestmark = pytest.mark.anyio


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
