"""Twelve models over memory for four: real models behind a real server, in orders that are hard."""

import random
import shutil
import signal
import subprocess
import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import anyio
import httpx
import pytest

from pyllama_raw import ContextConfig, EngineConfig, SchedulerConfig, estimate_memory
from pyllama_raw.errors import ModelTooLarge
from pyllama_raw.runners import CachedModel, LocalRunner, ModelCache
from pyllama_raw.serve import make_app
from tests.core.residency_support import least_loads
from tests.serve.support import serving
from tests.serve.test_gate import client_of
from tests.support.limits import LIMIT_S
from tests.support.tiny import tiny_model

pytestmark = [pytest.mark.native]

NAMES = "ABCDEFGHIJKL"
ROOM, N_STREAMS, N_REQUESTS, SAMPLE_S = 4, 16, 200, 0.01
CONFIG = EngineConfig(
    context=ContextConfig(n_ctx=256, n_threads=1, n_threads_batch=1),
    scheduler=SchedulerConfig(n_slots=4),
)


def orders(n: int) -> dict[str, str]:
    draw = random.Random(1)  # noqa: S311
    weights = [1 / (rank + 1) for rank in range(len(NAMES))]
    return {
        "random": "".join(draw.choices(NAMES, k=n)),
        "zipf": "".join(draw.choices(NAMES, weights, k=n)),
        "abaaca": ("ABAACA" * n)[:n],
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """The same tiny model as twelve files, which are twelve models."""
    folder = tmp_path_factory.mktemp("models")
    for name in NAMES:
        shutil.copy(tiny_model("llama"), folder / f"{name}.gguf")
    return folder


class Loads(Counter):
    """Counts loads, of models that fail now and then."""

    def __init__(self, files, fails_each=0):
        super().__init__()
        self._files, self._fails_each = files, fails_each

    def model(self, name: str) -> CachedModel:
        async def count(engine):
            self[name] += 1
            if self._fails_each and sum(self.values()) % self._fails_each == 0:
                raise RuntimeError("a file that fails")

        path = self._files / f"{name}.gguf"
        return CachedModel(
            lambda _: LocalRunner(path, CONFIG, name=name, on_open=count)
        )


@pytest.mark.anyio
async def test_a_model_has_as_many_cells_as_the_budget_has_room_for():
    """
    Not fewer than fit_ctx: one that takes more with so many is too large, whatever is free.
    """
    path = tiny_model("llama")

    def config(n_ctx):
        context = ContextConfig(n_ctx=n_ctx, n_threads=1, n_threads_batch=1)
        return EngineConfig(fit_ctx=512, context=context)

    def n_bytes(n_ctx):
        return estimate_memory(path, config(n_ctx)).total_bytes

    async def loaded(budget):
        def make(_):
            return LocalRunner(path, config(8192), room={"CPU": budget})

        models = {"A": CachedModel(make)}
        async with ModelCache(models, budget={"CPU": budget}) as cache:
            await cache.load("A")
            engine = cache.loaded()["A"].engine
            return engine.stats().n_cells, cache.status("A").n_bytes["CPU"]

    with anyio.fail_after(LIMIT_S):
        fitting = await loaded(n_bytes(3072))
        with pytest.raises(ModelTooLarge):
            await loaded(n_bytes(512) - 1)

    assert fitting == (3072, n_bytes(3072))


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["random", "zipf", "abaaca"])
async def test_twelve_models_over_memory_for_four(name, files, anyio_backend_name):
    """
    All requests are answered; the budget is never exceeded, sampled each 10 ms; loads are at
    most 1.3 times those of who knows the whole order and serves it as it is.
    """
    order = orders(N_REQUESTS)[name]
    need = estimate_memory(files / "A.gguf", CONFIG).total_bytes
    budget = int((ROOM + 0.5) * need)
    loads, texts, n_used = Loads(files), Counter(), 0
    models = {model: loads.model(model) for model in NAMES}
    queue = iter(order)
    cache = ModelCache(models, budget={"CPU": budget})

    async def sample():
        nonlocal n_used
        while True:
            n_used = max(n_used, budget - cache.free()["CPU"])
            await anyio.sleep(SAMPLE_S)

    async def ask(client):
        for model in queue:
            body = {"model": model, "prompt": "Once", "max_tokens": 4, "temperature": 0}
            answer = await client.post("/v1/completions", json=body)
            texts[answer.status_code, answer.json()["choices"][0]["text"]] += 1

    with anyio.fail_after(2 * LIMIT_S):
        async with cache, serving(make_app(cache), anyio_backend_name) as url:
            limits = httpx.Limits(max_connections=N_STREAMS)
            async with (
                httpx.AsyncClient(
                    base_url=url, timeout=LIMIT_S, limits=limits
                ) as client,
                anyio.create_task_group() as group,
            ):
                group.start_soon(sample)
                async with anyio.create_task_group() as streams:
                    for _ in range(N_STREAMS):
                        streams.start_soon(ask, client)
                group.cancel_scope.cancel()

    [(status, _)], [n] = texts.keys(), texts.values()
    assert (status, n) == (200, N_REQUESTS)
    assert need <= n_used <= budget
    assert loads.total() <= 1.3 * least_loads(order, ROOM)


@pytest.mark.anyio
async def test_sleeps_clients_that_leave_and_loads_that_fail_lose_nobody(files):
    """
    Each request that its client waits for has its text, or a 503 with a time if its load has failed;
    afterwards nobody runs or waits, and the same requests are answered.
    """
    draw = random.Random(2)  # noqa: S311
    order = iter(orders(N_REQUESTS)["random"])
    need = estimate_memory(files / "A.gguf", CONFIG).total_bytes
    loads, answers, n_left = Loads(files, fails_each=9), Counter(), 0
    models = {
        model: replace(loads.model(model), sleep_s=0.02, unload_s=0.2)
        for model in NAMES
    }
    cache = ModelCache(models, budget={"CPU": int((ROOM + 0.5) * need)})

    async def ask(client):
        nonlocal n_left
        for model in order:
            leaves_s = draw.choice([LIMIT_S, LIMIT_S, LIMIT_S, 0.03])
            body = {"model": model, "prompt": "Once", "max_tokens": 4, "temperature": 0}
            with anyio.move_on_after(leaves_s) as scope:
                answer = await client.post("/v1/completions", json=body)
            if scope.cancelled_caught:
                n_left += 1
            else:
                has_time = "retry-after" in answer.headers
                answers[answer.status_code, has_time] += 1

    with anyio.fail_after(2 * LIMIT_S):
        async with cache, serving(make_app(cache), "asyncio") as url:
            async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:
                async with anyio.create_task_group() as streams:
                    for _ in range(N_STREAMS):
                        streams.start_soon(ask, client)
                statuses = [cache.status(model) for model in NAMES]
                loads._fails_each = 0
                for model in NAMES:
                    body = {"model": model, "prompt": "Once", "max_tokens": 4}
                    # One that has failed rests, and longer after a second failure.
                    answer = await client.post("/v1/completions", json=body)
                    while answer.is_error:
                        await anyio.sleep(float(answer.headers["retry-after"]))
                        answer = await client.post("/v1/completions", json=body)
    busy = [status for status in statuses if status.n_running or status.n_waiting]

    assert {*answers} <= {(200, False), (503, True)}
    assert answers.total() + n_left == N_REQUESTS
    assert busy == []


@pytest.mark.anyio
async def test_a_model_that_slept_goes_on_where_it_was(files):
    """
    The next turn gives the same text, and its prefix is still cached.
    """
    body = {
        "model": "A",
        "prompt": "Once upon a time",
        "max_tokens": 8,
        "temperature": 0,
    }
    model = replace(Loads(files).model("A"), sleep_s=0.05)
    cache = ModelCache({"A": model})
    with anyio.fail_after(LIMIT_S):
        async with cache, client_of(make_app(cache)) as client:
            first = await client.post("/v1/completions", json=body)
            with cache.events() as events:
                while cache.status("A").state != "sleeping":
                    await events.receive()
            facts = [
                await client.get(path) for path in ("/props", "/slots", "/metrics")
            ]
            state = cache.status("A").state
            second = await client.post("/v1/completions", json=body)

    assert [answer.status_code for answer in facts] == [200] * 3
    assert facts[0].json()["is_sleeping"] is True
    assert state == "sleeping"
    assert second.json()["choices"] == first.json()["choices"]
    assert int(second.headers["x-cached-tokens"]) > 0


@pytest.mark.parametrize("program", ["pyllama-raw", "pyllama-llama-server"])
def test_a_folder_is_served_by_a_command(program, files):
    """
    Models load when they are asked for; a signal ends the process, whatever is loaded.
    """
    module = "pyllama_raw.cli.llama_server" if "llama-" in program else "pyllama_raw"
    verb = [] if "llama-" in program else ["serve"]
    flags = ["--models-dir", str(files), "--port", "0", "--models-max", "2"]
    command = [sys.executable, "-m", module, *verb, *flags]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    with process, closing_by_kill(process):
        lines = iter(process.stderr.readline, "")
        url = next(line for line in lines if line.startswith("serving at")).split()[-1]
        with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
            statuses = [states_of(client)]
            for model in ("A", "B", "C"):
                body = {"model": model, "prompt": "Once", "max_tokens": 2}
                client.post("/v1/completions", json=body).raise_for_status()
            statuses.append(states_of(client))
            loaded = client.post("/models/load", json={"model": "D"}).json()
        process.send_signal(signal.SIGTERM)
        returned = process.wait(LIMIT_S)

    assert statuses[0] == {"unloaded": 12}
    assert statuses[1] == {"unloaded": 10, "loaded": 2}
    assert (loaded, returned) == ({"success": True}, 0)


FACTS = (
    *("/health", "/livez", "/readyz", "/v1/models", "/models", "/props"),
    *("/slots", "/metrics", "/lora-adapters"),
)
N_SCRAPES = 120  # of all facts; an hour of them, as monitors ask


def test_scrapes_neither_keep_a_model_awake_nor_wake_it(files):
    """
    It falls asleep while facts are asked without a pause, sleeps through an hour of scrapes, and then
    answers a request.
    """
    module, file = "pyllama_raw.cli.llama_server", str(files / "A.gguf")
    flags = ["-m", file, "-c", "256", "--port", "0", "--metrics"]
    command = [sys.executable, "-m", module, *flags, "--sleep-idle-seconds", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    with process, closing_by_kill(process):
        lines = iter(process.stderr.readline, "")
        url = next(line for line in lines if line.startswith("serving at")).split()[-1]
        with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
            body = {"prompt": "Once", "n_predict": 2, "temperature": 0}
            first = client.post("/completion", json=body).json()
            for _ in iter(lambda: scrape(client), True):
                pass
            sleeps = {scrape(client) for _ in range(N_SCRAPES)}
            second = client.post("/completion", json=body).json()
            is_asleep = scrape(client)
        process.send_signal(signal.SIGTERM)
        returned = process.wait(LIMIT_S)

    assert (sleeps, is_asleep) == ({True}, False)
    assert (second["content"], returned) == (first["content"], 0)


def scrape(client) -> bool:
    """Ask for all facts; whether the model sleeps."""
    answers = {path: client.get(path).raise_for_status() for path in FACTS}
    return answers["/props"].json()["is_sleeping"]


@contextmanager
def closing_by_kill(process):
    try:
        yield
    finally:
        process.kill()


def states_of(client) -> dict[str, int]:
    models = client.get("/v1/models").json()["data"]
    return Counter(model["status"]["value"] for model in models)
