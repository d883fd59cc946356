"""Models as a cache, over runners that load when they may: on both event loops."""

from math import inf

import anyio
import anyio.lowlevel
import pytest

from pyllama_raw.errors import (
    ClosedError,
    ConfigError,
    ModelLoadFailed,
    ModelNotFound,
    ModelTooLarge,
    ModelUnavailable,
    QueueFull,
    SnapshotFailed,
    WrongUse,
)
from pyllama_raw.runners import (
    CachedModel,
    MockRunner,
    ModelCache,
    ModelState,
    RunnerHealth,
    RunnerMemory,
)
from pyllama_raw.runners.errors import RunnerDied
from tests.runners.pooled import FEW, Clock, ask
from tests.support.limits import LIMIT_S
from tests.support.loops import anyio_backend  # noqa: F401

pytestmark = pytest.mark.anyio


class Loading(MockRunner):
    """A runner that takes a part of the memory, and loads when it may."""

    def __init__(self, name, n_bytes=1, *, may_load=None, errors=(), **options):
        super().__init__(name=name, **options)
        self.n_bytes, self.may_load, self.errors = n_bytes, may_load, [*errors]
        self.log: list[str] = []

    async def memory(self):
        return RunnerMemory({"CPU": self.n_bytes}, {"CPU": 0})

    async def start(self):
        self.log.append("start")
        await self._ready()

    async def wake(self):
        self.log.append("wake")
        await self._ready()

    async def sleep(self):
        self.log.append("sleep")
        await self._ready()

    async def aclose(self):
        self.log.append("close")
        await super().aclose()

    async def _ready(self):
        await anyio.lowlevel.checkpoint()
        if self.may_load is not None:
            await self.may_load.wait()
        if self.errors:
            raise self.errors.pop(0)


class Shelf:
    """Models by name, of which some fit, and all runners that were runners for them."""

    def __init__(self, names="ABC", room=1, clock=None, model=None, **options):
        self.runners: dict[str, list[Loading]] = {name: [] for name in names}
        self.make = {name: {} for name in names}
        self.clock = clock or Clock()
        models = {
            name: CachedModel(self._maker(name), **(model or {})) for name in names
        }
        self.cache = ModelCache(
            models, budget={"CPU": room}, clock=self.clock, **options
        )

    def _maker(self, name):
        def make(_):
            self.runners[name].append(Loading(name, **self.make[name]))
            return self.runners[name][-1]

        return make

    @property
    def states(self):
        return {name: str(self.cache.status(name).state) for name in self.cache}

    @property
    def logs(self):
        return {n: [r.log for r in runners] for n, runners in self.runners.items()}


async def idle():
    await anyio.wait_all_tasks_blocked()


async def test_a_model_loads_for_those_who_ask_for_it():
    """
    Once for all; another one gives way when nobody uses it any more.
    """
    shelf = Shelf()
    with anyio.fail_after(LIMIT_S):
        async with shelf.cache as cache:
            states = [shelf.states]
            async with anyio.create_task_group() as group:
                for _ in range(3):
                    group.start_soon(ask, cache.runner("A"))
            states.append(shelf.states)
            result = await ask(cache.runner("B"))
            states.append(shelf.states)
            free = cache.free()
    unloaded, loaded = "unloaded", "loaded"

    assert states == [
        {"A": unloaded, "B": unloaded, "C": unloaded},
        {"A": loaded, "B": unloaded, "C": unloaded},
        {"A": unloaded, "B": loaded, "C": unloaded},
    ]
    assert (result.text, result.served_by) == ("hello world", "B")
    assert shelf.logs == {"A": [["start", "close"]], "B": [["start", "close"]], "C": []}
    assert free == {"CPU": 0}


async def test_what_runs_is_never_ended():
    """
    B waits for the stream of A, which is told whole.
    """
    goes_on = anyio.Event()
    shelf = Shelf()
    shelf.make["A"] = {"before": lambda at: goes_on.wait() if at else idle()}
    with anyio.fail_after(LIMIT_S):
        async with shelf.cache as cache, anyio.create_task_group() as group:
            async with cache.runner("A").generate("x", FEW) as run:
                await anext(run)
                group.start_soon(ask, cache.runner("B"))
                await idle()
                states = shelf.states
                waiting = cache.n_waiting
                goes_on.set()
                result = await run.collect()

    assert (states["A"], states["B"], waiting) == ("loaded", "unloaded", 1)
    assert result.text == "hello world"
    assert shelf.logs["B"] == [["start", "close"]]


async def test_a_load_belongs_to_those_who_wait_for_it():
    """
    It goes on while one of them waits, and ends with the last one. The next one begins anew.
    """
    shelf = Shelf()
    may_load = anyio.Event()
    shelf.make["A"] = {"may_load": may_load}
    with anyio.fail_after(LIMIT_S):
        async with shelf.cache as cache:
            async with anyio.create_task_group() as first:
                async with anyio.create_task_group() as second:
                    first.start_soon(ask, cache.runner("A"))
                    second.start_soon(ask, cache.runner("A"))
                    await idle()
                    second.cancel_scope.cancel()
                await idle()
                states = [shelf.states["A"]]
                first.cancel_scope.cancel()
            await idle()
            states.append(shelf.states["A"])
            may_load.set()
            await ask(cache.runner("A"))

    assert states == ["loading", "unloaded"]
    assert shelf.logs["A"] == [["start", "close"], ["start", "close"]]


@pytest.mark.parametrize("step", ["memory", "start"])
async def test_a_load_that_fails_is_tried_again_later(step, caplog):
    """
    All who wait have a ModelUnavailable, and all who come before the time; the log says why.
    """
    shelf, failure = Shelf(), ModelLoadFailed("a.gguf", "no such file")
    errors = []

    async def fail():
        with pytest.raises(ModelUnavailable, match="model_load_failed") as raised:
            await ask(shelf.cache.runner("A"))
        errors.append(raised.value)

    async def memory():
        if shelf.clock.now == 0:
            raise failure
        return RunnerMemory({"CPU": 1})

    def make(_):
        runner = Loading("A", errors=[failure] if step == "start" else [])
        runner.memory = memory if step == "memory" else runner.memory
        shelf.runners["A"].append(runner)
        if len(shelf.runners["A"]) > 1:
            runner.errors.clear()
        return runner

    shelf.cache._entries["A"].model = CachedModel(make)
    with anyio.fail_after(LIMIT_S):
        async with shelf.cache as cache:
            async with anyio.create_task_group() as group:
                group.start_soon(fail)
                group.start_soon(fail)
            await fail()
            status = cache.status("A")
            shelf.clock.now = 1.5
            result = await ask(cache.runner("A"))
            after = cache.status("A")

    assert [error.retry_after_s for error in errors] == [1.0] * 3
    assert (status.state, status.error) == (ModelState.UNLOADED, failure)
    assert (result.text, after.error) == ("hello world", None)
    assert "A cannot be loaded" in caplog.text


async def test_an_error_of_no_kind_of_ours_is_told_as_others():
    """
    Its name stands where the code of an error of ours does.
    """
    shelf = Shelf()
    shelf.make["A"] = {"errors": [ZeroDivisionError("oh")]}
    with anyio.fail_after(LIMIT_S):
        async with shelf.cache as cache:
            with pytest.raises(ModelUnavailable, match="ZeroDivisionError"):
                await cache.load("A")

            assert str(cache.status("A").error) == "ZeroDivisionError: oh"


async def test_an_idle_model_sleeps_and_wakes_for_a_request():
    """
    After its time it is unloaded. Facts neither wake it nor keep it awake.
    """
    clock = Clock()
    shelf = Shelf(clock=clock, model={"sleep_s": 5.0, "unload_s": 60.0})
    states = []

    async def later(s):
        clock.now += s
        shelf.cache._turn()
        await idle()
        states.append(shelf.states["A"])

    with anyio.fail_after(LIMIT_S):
        async with shelf.cache as cache:
            await ask(cache.runner("A"))
            await later(4.0)
            await later(2.0)
            asleep = [await cache.runner("A").health(), cache.runner("A").capabilities]
            states.append(shelf.states["A"])
            await ask(cache.runner("A"))
            await later(6.0)
            await later(60.0)

    assert states == ["loaded", "sleeping", "sleeping", "sleeping", "unloaded"]
    assert asleep[0].live
    assert shelf.logs["A"] == [["start", "sleep", "wake", "sleep", "close"]]


async def test_a_model_that_cannot_sleep_stays_awake():
    """
    Its requests go on.
    """
    clock = Clock()
    shelf = Shelf(clock=clock, model={"sleep_s": 5.0})
    with anyio.fail_after(LIMIT_S):
        async with shelf.cache as cache:
            await cache.load("A")
            shelf.runners["A"][0].errors = [SnapshotFailed("llama_state", 0, "no")]
            clock.now += 6
            cache._turn()
            await idle()

            assert shelf.states["A"] == "loaded"
            assert (await ask(cache.runner("A"))).text == "hello world"


async def test_a_request_says_how_long_its_model_stays():
    """
    0 is not at all.
    """
    shelf = Shelf()
    with anyio.fail_after(LIMIT_S):
        async with shelf.cache as cache:
            async with cache.lent("A", keep_alive_s=inf):
                pass
            stays = shelf.states["A"]
            async with cache.lent("A", keep_alive_s=0.0):
                pass
            await idle()

            assert (stays, shelf.states["A"]) == ("loaded", "unloaded")


async def test_a_model_is_unloaded_by_hand():
    """
    What runs ends first; a load is ended, and its waiters with it.
    """
    shelf = Shelf()
    shelf.make["B"] = {"may_load": anyio.Event()}
    with anyio.fail_after(LIMIT_S):
        async with shelf.cache as cache:
            async with cache.lent("A"):
                cache.unload("A")
                await idle()
                states = [shelf.states["A"]]
            await idle()
            states.append(shelf.states["A"])
            async with anyio.create_task_group() as group:

                async def wait():
                    with pytest.raises(ModelUnavailable, match="unloaded while"):
                        await cache.load("B")

                group.start_soon(wait)
                await idle()
                cache.unload("B")
            await idle()

            assert states == ["loaded", "unloaded"]
            assert shelf.states["B"] == "unloaded"


async def test_loads_that_nobody_waits_for_are_told_by_events():
    """
    As are their failures; a reader that is gone costs nothing.
    """
    shelf = Shelf()
    shelf.make["B"] = {"errors": [ZeroDivisionError("oh")]}
    with anyio.fail_after(LIMIT_S):
        async with shelf.cache as cache:
            with cache.events() as events:
                cache.begin("A")
                first = [await events.receive() for _ in range(2)]
                cache.begin("B")
                second = [await events.receive() for _ in range(3)]
            cache.begin("A")
            await idle()

    changes = [(event.model, str(event.state)) for event in first + second]
    assert changes == [
        ("A", "loading"),
        ("A", "loaded"),
        ("A", "unloaded"),
        ("B", "loading"),
        ("B", "unloaded"),
    ]
    assert [event.error is not None for event in second] == [False, False, True]


async def test_a_sick_runner_is_loaded_anew():
    """
    It is asked every ten seconds, when somebody comes.
    """
    clock, shelf = Clock(), None
    shelf = Shelf(clock=clock)
    with anyio.fail_after(LIMIT_S):
        async with shelf.cache as cache:
            await cache.load("A")

            async def health():
                return RunnerHealth(live=False, ready=False, detail="dead")

            shelf.runners["A"][0].health = health
            await cache.load("A")
            young = len(shelf.runners["A"])
            clock.now += 11
            await cache.load("A")

    assert young == 1
    assert shelf.logs["A"] == [["start", "close"], ["start", "close"]]


async def test_the_list_of_models_can_be_another_one():
    """
    What is gone or changed leaves as soon as it is idle; who waits for what is gone is told.
    """

    def model(name, key):
        return CachedModel(
            lambda _: runners.setdefault((name, key), Loading(name)), key=key
        )

    runners: dict = {}
    cache = ModelCache(
        {name: model(name, 1) for name in "ABC"}, budget={"CPU": 3}, clock=Clock()
    )
    with anyio.fail_after(LIMIT_S):
        async with cache, anyio.create_task_group() as group:
            await cache.load("A")
            await cache.load("C")
            runners["B", 1] = Loading("B", may_load=anyio.Event())

            async def wait():
                with pytest.raises(ModelNotFound):
                    await cache.load("B")

            async with cache.lent("A") as runner:
                group.start_soon(wait)
                await idle()
                cache.replace(
                    {"A": model("A", 2), "C": model("C", 1), "D": model("D", 1)}
                )
                await idle()
                is_open = not runner._closed
                names = [*cache]
            await idle()
            names_then = [*cache]
            await cache.load("A")
            logs = {key: [*runner.log] for key, runner in runners.items()}
            group.cancel_scope.cancel()

    assert is_open
    assert "D" in names
    assert names_then == ["A", "C", "D"]
    assert logs["A", 1] == ["start", "close"]
    assert logs["A", 2] == ["start"]
    assert logs["C", 1] == ["start"]


class Mortal(Loading):
    """A runner with a process of its own, which ends when the test says so."""

    def __init__(self, name, **options):
        super().__init__(name, **options)
        self.dies = anyio.Event()

    @property
    def has_ended(self):
        return self.dies.is_set()

    async def death(self):
        await self.dies.wait()
        return RunnerDied(-9)


async def test_a_model_that_dies_leaves_and_is_loaded_again():
    """
    Those who use it end first, and another model stays as it is; the next failure says how long to wait.
    """
    runners = []

    def make(_):
        runners.append(Mortal("A"))
        return runners[-1]

    models = {"A": CachedModel(make), "B": CachedModel(lambda _: Loading("B"))}
    states = []
    with anyio.fail_after(LIMIT_S):
        async with ModelCache(models, budget={"CPU": 2}, clock=Clock()) as cache:

            def note():
                status = cache.status("A")
                states.append((str(status.state), status.error and status.error.code))

            async with cache.lent("B"), cache.lent("A"):
                runners[0].dies.set()
                await idle()
                note()
            await idle()
            note()
            async with cache.lent("A"):
                note()
                runners[1].dies.set()
                await idle()
            await idle()
            with pytest.raises(ModelUnavailable, match="runner_died") as refusal:
                await cache.load("A")
            other = cache.status("B").state

    assert states == [
        ("loaded", "runner_died"),
        ("unloaded", "runner_died"),
        ("loaded", None),
    ]
    assert [runner.log for runner in runners] == [["start", "close"]] * 2
    assert (refusal.value.retry_after_s, other) == (1.0, "loaded")


async def test_a_request_behind_the_end_of_a_process_is_served_by_the_next_one():
    """
    Its client saw the end of another request there, before the cache was woken for it.
    """
    runners = []

    def make(_):
        runners.append(Mortal("A"))
        return runners[-1]

    with anyio.fail_after(LIMIT_S):
        async with ModelCache({"A": CachedModel(make)}, clock=Clock()) as cache:
            await cache.load("A")
            await idle()
            runners[0].dies.set()
            async with cache.lent("A") as runner:
                is_next = runner is runners[1]

    assert is_next
    assert [runner.log for runner in runners] == [["start", "close"]] * 2


def listed(shelf, **keys):
    """Models of a shelf as a list has them: each with its key."""
    return {n: CachedModel(shelf._maker(n), sleep_s=9, key=k) for n, k in keys.items()}


@pytest.mark.parametrize("middle", [{}, {"A": 2}])
async def test_a_model_that_comes_back_to_the_list_is_there(middle):
    """
    Also if it was still in use when it was gone, or another one, for a moment.
    """
    shelf = Shelf("")
    shelf.runners["A"], shelf.make["A"] = [], {}
    with anyio.fail_after(LIMIT_S):
        async with shelf.cache as cache:
            cache.replace(listed(shelf, A=1))
            async with cache.lent("A"):
                cache.replace(listed(shelf, **middle))
                cache.replace(last := listed(shelf, A=1))
                names = [*cache]
            await idle()
            await cache.load("A")
            model = cache._entries["A"].model

    assert (names, [*cache]) == (["A"], ["A"])
    assert model is last["A"]


async def test_what_a_changed_model_takes_is_asked_before_it_is_loaded():
    """
    Also for those who waited while it changed; what takes less than it counts would exceed the budget.
    """
    shelf, n_bytes = Shelf("AB", room=5), []
    with anyio.fail_after(LIMIT_S):
        async with shelf.cache as cache, anyio.create_task_group() as group:
            cache.replace(listed(shelf, A=1, B=1))
            await idle()

            async def wait():
                async with cache.lent("A"):
                    n_bytes.append(cache.status("A").n_bytes)

            async with cache.lent("A"):
                shelf.make["A"] = {"n_bytes": 4}
                cache.replace(listed(shelf, A=2, B=1))
                group.start_soon(wait)
                await idle()
            await idle()
            n_bytes += [cache.free()]

    assert n_bytes == [{"CPU": 4}, {"CPU": 1}]


@pytest.mark.parametrize("error", [None, ZeroDivisionError("oh")])
@pytest.mark.parametrize("keys", [{}, {"A": 2}])
async def test_the_size_of_a_model_that_is_gone_says_nothing_of_another(error, keys):
    """
    Nor does its failure, if the list becomes another one while a runner is asked.
    """
    shelf, may_tell = Shelf("A", room=5), anyio.Event()
    outcomes = []

    async def memory():
        await may_tell.wait()
        if error is not None:
            raise error
        return RunnerMemory({"CPU": 3})

    def make(_):
        runner = Loading("A")
        runner.memory = memory
        return runner

    async def wait():
        try:
            await cache.load("A")
        except ModelNotFound as refusal:
            outcomes.append(refusal.code)
        else:
            outcomes.append(cache.status("A").n_bytes)

    with anyio.fail_after(LIMIT_S):
        async with shelf.cache as cache:
            cache.replace({"A": CachedModel(make, key=1)})
            async with anyio.create_task_group() as group:
                group.start_soon(wait)
                await idle()
                cache.replace(listed(shelf, **keys))
                may_tell.set()

    assert outcomes == [{"CPU": 1} if keys else "model_not_found"]


@pytest.mark.parametrize("way", ["sleep", "wake"])
@pytest.mark.parametrize("keys", [{"A": 1}, {}])
async def test_what_is_to_leave_leaves_on_its_way_to_sleep_and_back(way, keys):
    """
    A model that is unloaded, or gone from the list, does not sleep on.
    """
    clock = Clock()
    shelf = Shelf("A", clock=clock, model={"sleep_s": 9, "key": 1})
    with anyio.fail_after(LIMIT_S):
        async with shelf.cache as cache:
            await cache.load("A")
            may_go_on = anyio.Event()
            if way == "sleep":
                shelf.runners["A"][0].may_load = may_go_on
            clock.now += 10
            cache.replace(listed(shelf, A=1))
            await idle()
            shelf.runners["A"][0].may_load = may_go_on
            if way == "wake":
                cache.begin("A")
                await idle()
            before = shelf.states
            if keys:
                cache.unload("A")
            cache.replace(listed(shelf, **keys))
            may_go_on.set()
            await idle()
            after = shelf.states

    assert before == {"A": "leaving" if way == "sleep" else "loading"}
    assert after == ({"A": "unloaded"} if keys else {})


async def test_a_model_that_is_too_large_is_told_of_as_other_failures():
    """
    Although its load does not begin: who began it for nobody reads of it.
    """
    shelf = Shelf()
    shelf.make["A"] = {"n_bytes": 2}
    with anyio.fail_after(LIMIT_S):
        async with shelf.cache as cache:
            with cache.events() as events:
                cache.begin("A")
                event = await events.receive()
            status = cache.status("A")

    assert (event.model, event.state) == ("A", "unloaded")
    assert isinstance(event.error, ModelTooLarge)
    assert status.error is event.error


async def test_what_cannot_be_is_refused():
    """
    Unknown names, models beyond the budget, claims beyond the queue, caches that are closed or not
    entered, and budgets of nothing.
    """
    shelf = Shelf(room=2, max_waiting=1)
    shelf.make["A"] = {"n_bytes": 3}
    shelf.make["B"] = {"may_load": anyio.Event()}
    with pytest.raises(WrongUse, match="async with"):
        await shelf.cache.load("A")
    with anyio.fail_after(LIMIT_S):
        async with shelf.cache as cache:
            with pytest.raises(ModelNotFound, match="there are A, B, C"):
                cache.runner("other")
            with pytest.raises(ModelTooLarge, match="A takes 3 of CPU and at most 2"):
                await cache.load("A")
            async with anyio.create_task_group() as group:
                group.start_soon(ask, cache.runner("B"))
                await idle()
                with pytest.raises(QueueFull, match="max_waiting"):
                    await cache.load("C")
                group.cancel_scope.cancel()
    with pytest.raises(ClosedError):
        await shelf.cache.load("C")
    with pytest.raises(ConfigError, match="no room"):
        ModelCache({}, budget={"CPU": 0})
    with pytest.raises(ConfigError, match="already"):
        ModelCache({"A": CachedModel(Loading)}).add("A", CachedModel(Loading))


async def test_requests_that_wait_have_bytes_that_are_bounded():
    """
    One that would wait beyond them is refused by name, and one whose model is there is not. One alone may have more.
    """
    shelf = Shelf(room=2, max_waiting_bytes=10)
    goes_on = anyio.Event()
    shelf.make["B"] = {"may_load": goes_on}
    claims = []

    async def claim(name, n_bytes):
        claims.append(await shelf.cache.claim(name, n_bytes=n_bytes))

    with anyio.fail_after(LIMIT_S):
        async with shelf.cache as cache:
            await claim("A", 4)
            async with anyio.create_task_group() as group:
                group.start_soon(claim, "B", 11)
                await idle()
                await claim("A", 4)
                with pytest.raises(QueueFull) as caught:
                    await claim("C", 4)
                goes_on.set()
            for claimed in claims:
                cache.release(claimed)
            await claim("C", 11)
            cache.release(claims[-1])

    error = caught.value
    assert (error.knob, error.value, error.limit) == ("max_waiting_bytes", 15, 10)
    assert [claimed.model for claimed in claims] == ["A", "A", "B", "C"]


async def test_closing_ends_waits_and_lets_run_what_may():
    """
    Those who wait have a ClosedError, and what runs has drain_s.
    """
    shelf = Shelf()
    goes_on = anyio.Event()
    shelf.make["A"] = {"before": lambda _: goes_on.wait()}
    errors = []
    with anyio.fail_after(LIMIT_S):
        async with shelf.cache as cache, anyio.create_task_group() as group:

            async def wait():
                with pytest.raises(ClosedError) as raised:
                    await cache.load("B")
                errors.append(raised.value)

            async with cache.runner("A").generate("x", FEW) as run:
                group.start_soon(wait)
                await idle()
                group.start_soon(cache.aclose, 60.0)
                await idle()
                goes_on.set()
                result = await run.collect()

    assert len(errors) == 1
    assert result.text == "hello world"


@pytest.mark.parametrize(("question", "n"), [("memory", 2), ("health", 1)])
async def test_closing_ends_those_who_have_asked_a_runner(question, n):
    """
    What it takes nobody waits for any more, and how it is ends in no wait for a turn.
    """
    clock = Clock()
    shelf, errors, may_tell = Shelf("A", clock=clock), [], anyio.Event()

    async def health():
        await may_tell.wait()
        return RunnerHealth(live=True, ready=True)

    def make(_):
        runner = Loading("A")
        runner.memory = anyio.sleep_forever if question == "memory" else runner.memory
        runner.health = health
        return runner

    async def wait():
        with pytest.raises(ClosedError) as raised:
            await cache.load("A")
        errors.append(raised.value)

    with anyio.fail_after(LIMIT_S):
        async with shelf.cache as cache:
            cache.replace({"A": CachedModel(make, key=1)})
            if question == "health":
                await cache.load("A")
                clock.now += 60
            async with anyio.create_task_group() as group:
                for _ in range(n):
                    group.start_soon(wait)
                await idle()
                cache.refuse()
                may_tell.set()

    assert len(errors) == n


async def test_runners_that_are_there_stay():
    """
    They need no block, no budget, and no load; they are closed with the cache.
    """
    runner = MockRunner(name="A")
    cache = ModelCache(there={"A": runner})
    result = await ask(cache.runner("A"))
    names = {**cache.loaded()}
    await cache.aclose()

    assert result.text == "hello world"
    assert names == {"A": runner}
    assert runner._closed
