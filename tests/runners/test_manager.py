"""Runners by name: how one is exchanged."""

import anyio
import anyio.lowlevel
import pytest

from pyllama_raw.errors import (
    ClosedError,
    ConfigError,
)
from pyllama_raw.runners import (
    LocalRunner,
    ManagedState,
    MockRunner,
    RemoteRunner,
    RunnerManager,
)
from pyllama_raw.runners.errors import NetworkError
from pyllama_raw.runners.pool import runner_for
from tests.runners.pooled import FEW, Sick, Stillborn, ask
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
