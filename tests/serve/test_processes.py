"""Models of a service in processes of their own: real ones, which are killed."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path

import anyio
import httpx
import pytest

from tests.support.limits import LIMIT_S
from tests.support.tiny import tiny_model

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(sys.platform != "linux", reason="looks for processes in /proc"),
]
CONFIG = """
[loading]
models_dir = "{folder}"
model_processes = true
{more}
[context]
n_ctx = 8192
n_threads = 1
n_threads_batch = 1
[scheduler]
n_slots = 2
"""
LONG = {"prompt": "Once", "max_tokens": 6000, "temperature": 0, "ignore_eos": True}
SHORT = {"prompt": "Once", "max_tokens": 8, "temperature": 0}


@contextmanager
def started(folder, more="", environment=None):
    """A server of two models in processes, its address and its process."""
    for name in "ab":
        shutil.copy(tiny_model("llama"), folder / f"{name}.gguf")
    file = folder / "service.toml"
    file.write_text(CONFIG.format(folder=folder, more=more))
    flags = ["--config", str(file), "--port", "0"]
    command = [sys.executable, "-m", "pyllama_raw", "serve", *flags]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **(environment or {})},
    )
    try:
        lines = iter(process.stderr.readline, "")
        url = next(line for line in lines if line.startswith("serving at")).split()[-1]
        yield url, process
    finally:
        process.kill()
        process.wait()
        process.stderr.close()


def processes_of(server: int) -> dict[str, int]:
    """The processes of models that *server* has started, by the names of the models."""
    processes = {}
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError, IndexError):
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            variables = (folder / "environ").read_bytes().split(b"\0")
            content = [v for v in variables if v.startswith(b"PYLLAMA_RAW_PROCESS=")]
            if parent == server and content:
                [name] = json.loads(content[0].partition(b"=")[2])["models"]
                processes[name] = int(folder.name)
    return processes


def states(client):
    return {
        m["id"]: m["status"]["value"] for m in client.get("/v1/models").json()["data"]
    }


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    with started(tmp_path_factory.mktemp("models")) as (url, process):
        yield url, process


@pytest.fixture
def client(service):
    with httpx.Client(base_url=service[0], timeout=LIMIT_S) as client:
        yield client


def test_a_model_that_is_killed_takes_nothing_along(service, client):
    """
    Its stream ends with an error, another model's goes on to its end, and the next request loads it again.
    """
    url, server = service
    ends = {}

    async def read(name, has_begun):
        body = LONG | {"model": name, "stream": True}
        async with (
            httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as own,
            own.stream("POST", "/v1/completions", json=body) as answer,
        ):
            events = []
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    events.append(line[6:])
                    has_begun.set()
            ends[name] = (answer.status_code, events[-1], len(events))

    async def run():
        begun = {name: anyio.Event() for name in "ab"}
        with anyio.fail_after(LIMIT_S):
            async with anyio.create_task_group() as group:
                for name, event in begun.items():
                    group.start_soon(read, name, event)
                for event in begun.values():
                    await event.wait()
                os.kill(processes_of(server.pid)["a"], signal.SIGKILL)

    anyio.run(run)
    again = client.post("/v1/completions", json=SHORT | {"model": "a"})

    status, last, n_events = ends["a"]
    error = json.loads(last)["error"]
    assert (status, error["code"]) == (200, "model_unavailable")
    assert n_events < LONG["max_tokens"]
    assert ends["b"][:2] == (200, "[DONE]")
    assert again.status_code == 200
