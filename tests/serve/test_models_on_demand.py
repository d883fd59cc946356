"""A service whose models are loaded when requests name them, on fakes."""

import json
from contextlib import asynccontextmanager
from math import nan
from threading import Event

import anyio
import anyio.lowlevel
import httpx
import pytest
from anyio import to_thread

from pyllama_raw.errors import ConfigError, ModelLoadFailed
from pyllama_raw.runners import CachedModel, LocalRunner, ModelCache, RunnerMemory
from pyllama_raw.serve import ServeConfig, make_app
from pyllama_raw.testing import FakeExecutor, fake_limits
from tests.engine.support import HeldSteps
from tests.serve.support import chatting
from tests.serve.test_gate import CHAT, PATH
from tests.support.limits import LIMIT_S
from tests.support.loops import anyio_backend  # noqa: F401

pytestmark = pytest.mark.anyio
FACTS = (
    "/v1/models",
    "/models",
    "/v1/models/a",
    "/metrics",
    "/health",
    "/readyz",
    "/livez",
    "/props",
)
UNLOADED = {
    "value": "unloaded",
    "args": [],
    "running": 0,
    "waiting": 0,
    "pinned": False,
    "bytes": {},
}


class Sized(LocalRunner):
    """A model that takes one byte, and opens as the test says."""

    def __init__(self, name, error=None, executor=None):
        super().__init__(chatting(executor), name=name)
        self._error = error

    async def memory(self):
        return RunnerMemory({"CPU": 1})

    async def start(self):
        await anyio.lowlevel.checkpoint()
        if self._error is not None:
            raise self._error


def cache_of(names="ab", room=1, errors=None, executors=None, **options):
    def model(name):
        error, executor = (errors or {}).get(name), (executors or {}).get(name)
        return CachedModel(lambda _: Sized(name, error, executor), key=name)

    return ModelCache({n: model(n) for n in names}, budget={"CPU": room}, **options)


@asynccontextmanager
async def serving_models(cache=None, refresh=None, autoload=True, **options):
    """A client of a service over a cache."""
    async with cache or cache_of() as models:
        config = ServeConfig(**options)
        app = make_app(models, config, refresh=refresh, autoload=autoload)
        transport = httpx.ASGITransport(app)
        with anyio.fail_after(LIMIT_S):
            async with httpx.AsyncClient(
                transport=transport, base_url="http://a"
            ) as client:
                yield client, models


async def states(client):
    models = (await client.get("/v1/models")).json()["data"]
    return {model["id"]: model["status"]["value"] for model in models}


async def until(cache, name, state):
    with cache.events() as events:
        while cache.status(name).state != state:
            await events.receive()


async def chat(client, model, **fields):
    return await client.post(PATH, json=CHAT | {"model": model} | fields)


async def test_a_request_loads_the_model_that_it_names():
    """
    Another one gives way to it; the list tells which are there, and what they can do.
    """
    async with serving_models() as (client, _):
        before = (await client.get("/v1/models")).json()["data"]
        first = await chat(client, "a")
        middle = await states(client)
        second = await chat(client, "b")
        after = (await client.get("/v1/models")).json()["data"]

    assert [model["status"] for model in before] == [UNLOADED] * 2
    assert (first.status_code, first.json()["model"]) == (200, "a")
    assert middle == {"a": "loaded", "b": "unloaded"}
    assert (second.status_code, second.json()["model"]) == (200, "b")
    assert [model["status"]["value"] for model in after] == ["unloaded", "loaded"]
    assert [model.get("max_model_len") is not None for model in after] == [False, True]
    assert after[1]["architecture"]["input_modalities"] == ["text"]


async def test_facts_neither_load_nor_keep_a_model():
    """
    However often they are asked; of a model that is not loaded some say so.
    """
    async with serving_models() as (client, cache):
        for path in FACTS * 5:
            assert (await client.get(path)).status_code == 200
        refused = [
            await client.get(path, params={"model": "a"})
            for path in ("/props", "/slots")
        ]
        of_none = await client.get("/slots")
        status = cache.status("a")

    assert [answer.status_code for answer in refused] == [400, 400]
    assert refused[0].json()["error"]["message"] == "model is not loaded"
    assert "model name is missing" in of_none.json()["error"]["message"]
    assert (status.state, status.n_running) == ("unloaded", 0)


async def test_bodies_that_wait_for_models_have_a_limit():
    """
    One beyond it is a 503 that names the option; a request whose model is there has its answer.
    """
    cache = cache_of("abc", max_waiting_bytes=1)
    answers = []

    async def ask(client):
        answers.append(await chat(client, "b"))

    async with serving_models(cache) as (client, models):
        async with models.lent("a"):
            async with anyio.create_task_group() as group:
                group.start_soon(ask, client)
                while not models.n_waiting:
                    await anyio.lowlevel.checkpoint()
                refused = await chat(client, "c")
                served = await chat(client, "a")
                models.unload("a")
                group.cancel_scope.cancel()

    error = refused.json()["error"]
    assert (refused.status_code, error["code"]) == (503, "server_is_overloaded")
    assert "max_model_waiting_bytes" in error["message"]
    assert refused.headers["retry-after"] == "1"
    assert served.status_code == 200
    assert answers == []


async def test_requests_of_many_models_share_room_for_one():
    """
    All are served, whatever their order.
    """
    async with serving_models(cache_of("abc")) as (client, cache):
        answers = []

        async def ask(model):
            answers.append(await chat(client, model))

        async with anyio.create_task_group() as group:
            for model in "abaaca" * 4:
                group.start_soon(ask, model)

        assert [answer.status_code for answer in answers] == [200] * 24
        assert sum(cache.status(name).state == "loaded" for name in "abc") == 1


async def test_a_client_that_leaves_lets_its_model_go():
    """
    Another model gets the room at once.
    """
    steps = HeldSteps()
    cache = cache_of(executors={"a": FakeExecutor(fake_limits(), on_step=steps)})
    async with serving_models(cache) as (client, _):
        async with anyio.create_task_group() as group:
            group.start_soon(chat, client, "a")
            await to_thread.run_sync(steps.wait_for_one)
            group.cancel_scope.cancel()
        n_running = cache.status("a").n_running
        steps.allow(9)
        other = await chat(client, "b")

    assert (n_running, other.status_code) == (0, 200)


async def test_models_are_loaded_and_unloaded_by_hand():
    """
    In llama-server's words, also for what is not there.
    """
    async with serving_models() as (client, cache):
        loaded = await client.post("/models/load", json={"model": "a"})
        await cache.load("a")
        again = await client.post("/models/load", json={"model": "a"})
        here = await states(client)
        gone = await client.post("/models/unload", json={"model": "a"})
        await until(cache, "a", "unloaded")
        twice = await client.post("/models/unload", json={"model": "a"})
        unknown = [
            await client.post(path, json={"model": "z"})
            for path in ("/models/load", "/models/unload")
        ]
        wrong = await client.post("/models/load", json={})

    assert (loaded.status_code, loaded.json()) == (200, {"success": True})
    assert again.json()["error"]["message"] == "model is already running"
    assert here["a"] == "loaded"
    assert (gone.status_code, gone.json()) == (200, {"success": True})
    assert twice.json()["error"]["message"] == "model is not running"
    assert [answer.status_code for answer in unknown] == [404, 400]
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "model")


async def test_a_load_that_fails_is_a_503_with_a_time():
    """
    Also for who comes before that time; the list says that it has failed.
    """
    cache = cache_of(errors={"a": ModelLoadFailed("a.gguf", "no such file")})
    async with serving_models(cache) as (client, _):
        answers = [await chat(client, "a") for _ in range(2)]
        [model, _] = (await client.get("/v1/models")).json()["data"]
        other = await chat(client, "b")

    assert [answer.status_code for answer in answers] == [503, 503]
    assert [answer.headers["retry-after"] for answer in answers] == ["1", "1"]
    error = answers[0].json()["error"]
    assert error["code"] == "model_unavailable"
    assert "a.gguf" not in error["message"]
    assert model["status"]["failed"] is True
    assert model["status"]["error"] == "model_load_failed"
    assert other.status_code == 200


@pytest.mark.parametrize("by", ["query", "service"])
async def test_a_model_may_have_to_be_loaded_by_hand(by):
    """
    ?autoload=false of a request, and --no-autoload of the service.
    """
    async with serving_models(autoload=by != "service") as (client, _):
        query = "?autoload=false" if by == "query" else ""
        refused = await client.post(PATH + query, json=CHAT | {"model": "a"})
        allowed = await client.post(PATH + "?autoload=true", json=CHAT | {"model": "a"})
        then = await client.post(PATH + query, json=CHAT | {"model": "a"})

    assert refused.status_code == 400
    assert refused.json()["error"]["message"] == "model is not loaded"
    assert (allowed.status_code, then.status_code) == (200, 200)


async def test_a_body_says_how_long_its_model_stays():
    """
    0 is not at all, as a number and as a time; what is no time is refused.
    """
    async with serving_models() as (client, cache):
        for keep_alive in (-1, "5m"):
            await chat(client, "a", keep_alive=keep_alive)
            assert cache.status("a").state == "loaded"
        for keep_alive in (0, "0s"):
            await chat(client, "a", keep_alive=keep_alive)
            await until(cache, "a", "unloaded")
        wrong = await chat(client, "a", keep_alive="soon")
        body = json.dumps(CHAT | {"model": "a", "keep_alive": nan})
        no_number = await client.post(PATH, content=body)

    for answer in (wrong, no_number):
        assert (answer.status_code, answer.json()["error"]["param"]) == (
            400,
            "keep_alive",
        )


async def test_who_waits_for_a_model_is_told_that_the_service_ends():
    """
    In words for clients: another service may have the model.
    """
    answers = []

    async def ask(client):
        answers.append(await chat(client, "b"))

    async with (
        serving_models() as (client, cache),
        cache.lent("a"),
        anyio.create_task_group() as group,
    ):
        group.start_soon(ask, client)
        while not cache.n_waiting:
            await anyio.lowlevel.checkpoint()
        cache.refuse()

    [answer] = answers
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "server_is_draining"


async def test_reads_of_the_list_are_shared():
    """
    By all who came before one began, and none runs beside another; one that fails is tried again.
    """
    n_reads, statuses, may_go_on = 0, [], Event()

    def refresh():
        nonlocal n_reads
        n_reads += 1
        assert may_go_on.wait(LIMIT_S)
        if n_reads == 2:
            raise ConfigError("a file that is just being written")
        return {}

    async def ask(client):
        answer = await client.get("/models", params={"reload": "1"})
        statuses.append(answer.status_code)

    async with serving_models(refresh=refresh) as (client, cache):
        async with anyio.create_task_group() as group:
            group.start_soon(ask, client)
            while n_reads < 1:
                await anyio.lowlevel.checkpoint()
            for _ in range(8):
                group.start_soon(ask, client)
            await anyio.wait_all_tasks_blocked()
            may_go_on.set()
        names = [*cache]

    assert n_reads == 3
    assert sorted(statuses) == [200] * 8 + [500]
    assert names == []


async def test_reads_of_the_list_take_a_fifth_of_a_thread(monkeypatch):
    """
    Whoever asks for another one waits until the rest after the last one is over.
    """
    clock, rests = 0.0, []

    def refresh():
        nonlocal clock
        clock += 2.0
        return {}

    async def rest(wait_s):
        nonlocal clock
        rests.append(wait_s)
        clock += wait_s

    monkeypatch.setattr("pyllama_raw.serve.service.monotonic", lambda: clock)
    monkeypatch.setattr("pyllama_raw.serve.service.sleep", rest)
    async with serving_models(refresh=refresh) as (client, _):
        for _ in range(2):
            await client.get("/models", params={"reload": "1"})
        clock += 3.0
        await client.get("/models", params={"reload": "1"})

    assert rests == [0.0, 8.0, 5.0]


async def test_an_adapter_that_is_not_there_loads_nothing():
    """
    A model that is not loaded has the adapters that are loaded with it; of one that is loaded it is looked for.
    """
    adapters = frozenset({"poet"})
    models = {"a": CachedModel(lambda _: Sized("a"), key=1, adapters=adapters)}
    async with serving_models(ModelCache(models)) as (client, cache):
        refused = await chat(client, "a:nope")
        state = cache.status("a").state
        await chat(client, "a:poet")
        then = cache.status("a").state
        again = await chat(client, "a:nope")

    assert (refused.status_code, state, then) == (404, "unloaded", "loaded")
    assert again.status_code == 404


async def test_a_request_waits_for_its_model_as_long_as_it_may():
    """
    Not longer than max_wait_s of its body.
    """
    steps = HeldSteps()
    cache = cache_of(executors={"a": FakeExecutor(fake_limits(), on_step=steps)})
    async with serving_models(cache) as (client, _):
        async with anyio.create_task_group() as group:
            group.start_soon(chat, client, "a")
            await to_thread.run_sync(steps.wait_for_one)
            late = await chat(client, "b", max_wait_s=0.05)
            steps.allow(9)
            group.cancel_scope.cancel()

    assert (late.status_code, late.json()["error"]["code"]) == (503, "waited_too_long")
    assert "retry-after" in late.headers


async def test_names_as_llama_server_has_them():
    """
    A request has to name a model, and one that is there: 400 with its words.
    """
    options = {"in_place_of": "llama-server", "aliases": {"other": "b"}}
    async with serving_models(**options) as (client, _):
        missing = await client.post(PATH, json=CHAT)
        unknown = await chat(client, "z")
        by_alias = await chat(client, "other")
        props = (await client.get("/props")).json()

    assert (
        missing.json()["error"]["message"] == "model name is missing from the request"
    )
    assert unknown.json()["error"]["message"] == "model 'z' not found"
    assert (missing.status_code, unknown.status_code) == (400, 400)
    assert by_alias.json()["model"] == "b"
    assert (props["role"], props["models_autoload"]) == ("router", True)


async def test_without_a_name_the_first_that_is_there_is_asked():
    """
    Elsewhere than in the place of llama-server.
    """
    async with serving_models() as (client, _):
        first = await client.post(PATH, json=CHAT)
        await chat(client, "b")
        second = await client.post(PATH, json=CHAT)
        unknown = await chat(client, "z")
        tokens = await client.post("/tokenize", json={"content": "x"})

    assert [first.json()["model"], second.json()["model"]] == ["a", "b"]
    assert (unknown.status_code, tokens.status_code) == (404, 200)


async def test_the_list_is_read_anew():
    """
    ?reload=1: what is gone leaves, what is new can be asked for.
    """

    def refresh():
        return {"b": new.model("b"), "c": new.model("c")}

    class new:  # noqa: N801
        @staticmethod
        def model(name):
            return CachedModel(lambda _: Sized(name), key=name)

    async with serving_models(refresh=refresh) as (client, _):
        await chat(client, "a")
        await client.get("/models", params={"reload": "1"})
        names = await states(client)
        answer = await chat(client, "c")
        gone = await chat(client, "a")

    assert names == {"b": "unloaded", "c": "unloaded"}
    assert (answer.status_code, gone.status_code) == (200, 404)


async def test_events_tell_what_becomes_of_models():
    """
    In the form of llama-server's, until the client leaves.
    """
    async with cache_of() as cache:
        app = make_app(cache)
        sent, group = [], None

        async def send(message):
            sent.append(message.get("body", b""))
            if b'"exit_code"' in sent[-1]:
                group.cancel_scope.cancel()

        async def receive():
            await anyio.sleep_forever()

        scope = {
            "type": "http", "method": "GET", "path": "/models/sse", "headers": [],
            "query_string": b"", "http_version": "1.1", "root_path": "",
        }  # fmt: skip
        with anyio.fail_after(LIMIT_S):
            async with anyio.create_task_group() as group:
                group.start_soon(app, scope, receive, send)
                await anyio.wait_all_tasks_blocked()
                await cache.load("a")
                cache.unload("a")

    frames = [
        json.loads(line[6:])
        for line in b"".join(sent).split(b"\n\n")
        if line[:5] == b"data:"
    ]
    assert {(f["model"], f["event"]) for f in frames} == {("a", "model_status")}
    assert [f["data"]["status"] for f in frames if "progress" not in f["data"]] == [
        "loading",
        "loaded",
        "unloaded",
    ]


async def test_elsewhere_models_are_loaded_at_the_start():
    """
    Loads by hand are refused by name, and keep_alive is named as ignored.
    """
    async with chatting() as engine:
        transport = httpx.ASGITransport(make_app({"a": engine}))
        async with httpx.AsyncClient(
            transport=transport, base_url="http://a"
        ) as client:
            loaded = await client.post("/models/load", json={"model": "a"})
            answer = await chat(client, "a", keep_alive="5m")
            models = (await client.get("/v1/models")).json()["data"]

    assert (loaded.status_code, loaded.json()["error"]["code"]) == (400, "unsupported")
    assert answer.headers["x-ignored-fields"] == "keep_alive"
    assert "status" not in models[0]
