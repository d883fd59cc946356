"""Replicas on a Ray cluster of this machine, with real processes and real signals."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import asynccontextmanager
from functools import partial

import anyio
import httpx
import psutil
import pytest

from pyllama_raw import ContextConfig, EngineConfig, SchedulerConfig
from pyllama_raw.serve.deployment import Deployment
from tests.support.tiny import tiny_model

pytest.importorskip("ray.serve", reason="needs the extra ray")

from benchmarks.peers.on_ray import end, ray_cluster, run

pytestmark = [
    pytest.mark.native,
    pytest.mark.nightly,
    pytest.mark.anyio,
    pytest.mark.filterwarnings("ignore"),  # Ray's own
]
LONG = {"max_tokens": 1900, "ignore_eos": True, "stream": True, "temperature": 0}


@pytest.fixture
def anyio_backend():
    return "asyncio"


def deployment(n_slots: int = 4) -> Deployment:
    config = EngineConfig(
        context=ContextConfig(n_ctx=2048 * n_slots, n_threads=1),
        scheduler=SchedulerConfig(n_slots=n_slots),
    )
    return Deployment(models={"m": str(tiny_model("llama"))}, configs={"m": config})


def test_the_example_serves_until_it_is_interrupted():
    """
    A cluster of its own, in a process of its own.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "examples/ray_cluster.py", "--port", str(port)]
    command += ["--model", str(tiny_model("llama")), "--replicas", "1"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    with process:
        for line in process.stderr:
            if "is ready at" in line:
                break
        answer = httpx.get(f"http://127.0.0.1:{port}/v1/models", timeout=60)
        process.send_signal(signal.SIGINT)
        process.stderr.read()

    assert [model["id"] for model in answer.json()["data"]] == ["assistant"]


@pytest.fixture(scope="module")
def cluster():
    with ray_cluster() as url:
        yield url


@asynccontextmanager
async def replicas(cluster, n, max_replicas=None, **options):
    serving = partial(run, n_replicas=n, max_replicas=max_replicas)
    await anyio.to_thread.run_sync(serving, deployment(**options))
    async with httpx.AsyncClient(base_url=cluster, timeout=120) as http:
        yield http


def engine_processes() -> list[psutil.Process]:
    """Those of this test's own cluster."""
    return [
        process
        for process in psutil.Process().children(recursive=True)
        if "ServeReplica:default:engines" in " ".join(process.cmdline())
    ]


async def stream(http, prompt, ends, beginnings):
    """Append to *ends* how the stream of *prompt* ended: "done", or the code of its error."""
    is_first = True
    body = LONG | {"prompt": prompt}
    async with http.stream("POST", "/v1/completions", json=body) as response:
        end = str(response.status_code)
        async for line in response.aiter_lines():
            if is_first:
                is_first = False
                beginnings.release()
            if line == "data: [DONE]":
                end = "done"
            elif '"error"' in line:
                end = json.loads(line.removeprefix("data: "))["error"]["code"]
    ends.append(end)


async def test_the_application_answers_as_it_does_alone(cluster, tmp_path):
    """
    Statuses, headers and bodies come through, whole and streamed; made as Ray's command does.
    """
    from ray import serve

    from pyllama_raw.replicas.cluster import application

    file = tmp_path / "service.toml"
    file.write_text(f"[models.m]\npath = '{tiny_model('llama')}'\n")
    app = application({"config": str(file), "n_cpus": "0.5"})
    await anyio.to_thread.run_sync(partial(serve.run, app, route_prefix="/"))
    async with httpx.AsyncClient(base_url=cluster, timeout=120) as http:
        body = {"prompt": "hello", "max_tokens": 4, "temperature": 0}
        answer = await http.post("/v1/completions", json=body)
        wrong = await http.post("/v1/completions", json={"prompt": "a", "nobody": 1})
        lines = (await http.post("/v1/completions", json=body | {"stream": True})).text
        metrics = await http.get("/metrics")

    parts = [json.loads(line[6:]) for line in lines.split("\n\n") if "{" in line]
    text = "".join(part["choices"][0]["text"] for part in parts)
    assert (answer.status_code, wrong.status_code) == (200, 400)
    assert "x-cached-tokens" in answer.headers
    assert wrong.json()["error"]["param"] == "nobody"
    assert text == answer.json()["choices"][0]["text"]
    assert "vllm:num_requests_running" in metrics.text


async def test_a_replica_that_is_killed_takes_along_only_what_it_has_begun(cluster):
    """
    Streams that had tokens are told of it; those without any go on at the other replica.
    """
    ends = []
    async with replicas(cluster, 2, n_slots=1) as http:
        beginnings = anyio.Semaphore(0)
        async with anyio.create_task_group() as group:
            for number in range(12):
                group.start_soon(stream, http, f"{number:04} of them", ends, beginnings)
            for _ in range(2):  # a slot each: so both have told tokens
                await beginnings.acquire()
            os.kill(engine_processes()[0].pid, signal.SIGKILL)

    assert sorted(ends) == ["done"] * 11 + ["replica_ended"]


async def test_a_new_version_takes_over_without_a_failed_request(cluster):
    """
    Ray starts and ends replicas while requests come.
    """
    statuses, done, new = [], anyio.Event(), deployment(n_slots=5)

    async def ask(http):
        body = {"prompt": "again and again", "max_tokens": 8}
        while not done.is_set():
            statuses.append((await http.post("/v1/completions", json=body)).status_code)

    async with replicas(cluster, 2) as http:
        before = {process.pid for process in engine_processes()}
        async with anyio.create_task_group() as group:
            for _ in range(3):
                group.start_soon(ask, http)
            await anyio.to_thread.run_sync(partial(run, new, n_replicas=2))
            done.set()
        after = {process.pid for process in engine_processes()}

    assert len(statuses) > 10
    assert set(statuses) == {200}
    assert not before & after


async def test_another_replica_comes_while_requests_wait(cluster):
    """
    Ray adds one where more requests are open than there are slots, and none of them fails.
    """
    statuses = []

    async def ask(http):
        body = {"prompt": "once upon", "max_tokens": 200, "ignore_eos": True}
        while not {process.pid for process in engine_processes()} - before:
            statuses.append((await http.post("/v1/completions", json=body)).status_code)

    await anyio.to_thread.run_sync(end, "/")  # or Ray keeps the replicas that there are
    async with replicas(cluster, 1, max_replicas=2, n_slots=1) as http:
        before = {process.pid for process in engine_processes()}
        with anyio.fail_after(180):
            async with anyio.create_task_group() as group:
                for _ in range(6):
                    group.start_soon(ask, http)

    assert set(statuses) == {200}
