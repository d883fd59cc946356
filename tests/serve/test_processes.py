"""Models of a service in processes of their own: real ones, which are killed."""

import json
import os
import re
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
model_processes = {processes}
{more}
[context]
n_ctx = 4096
n_threads = 1
n_threads_batch = 1
[scheduler]
n_slots = 2
"""
LONG = {"prompt": "Once", "max_tokens": 1500, "temperature": 0, "ignore_eos": True}
SHORT = {"prompt": "Once", "max_tokens": 8, "temperature": 0}


@contextmanager
def started(folder, more="", environment=None, *, processes=True):
    """A server of two models in processes, its address and its process."""
    for name in "ab":
        shutil.copy(tiny_model("llama"), folder / f"{name}.gguf")
    file = folder / "service.toml"
    has = str(processes).lower()
    file.write_text(CONFIG.format(folder=folder, more=more, processes=has))
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


CHAT = {
    "messages": [{"role": "user", "content": "Once"}],
    "max_tokens": 4,
    "temperature": 0,
}
CALLS = [
    ("POST", "/v1/completions", SHORT),
    ("POST", "/v1/completions", SHORT | {"stream": True, "logprobs": 1}),
    ("POST", "/v1/completions", SHORT | {"max_tokens": "many"}),
    ("POST", "/v1/completions", SHORT | {"prompt": "Once " * 9000}),
    ("POST", "/completion", SHORT | {"n_predict": 3}),
    ("POST", "/v1/chat/completions", CHAT),
    ("POST", "/v1/chat/completions", CHAT | {"messages": [], "x": 1}),
    ("POST", "/v1/messages", CHAT | {"stream": True}),
    (
        "POST",
        "/v1/responses",
        {"input": "Once", "max_output_tokens": 4, "temperature": 0},
    ),
    ("POST", "/v1/embeddings", {"input": ["Once", "upon"]}),
    ("POST", "/v1/rerank", {"query": "Once", "documents": ["upon"]}),
    ("POST", "/tokenize", {"content": "Once upon", "with_pieces": True}),
    ("POST", "/detokenize", {"tokens": [5, 6]}),
    ("POST", "/apply-template", CHAT),
    ("POST", "/v1/completions?autoload=false", SHORT),
    ("GET", "/props?model=a", None),
    ("GET", "/slots?model=a", None),
    ("GET", "/tokenizer_info", None),
    ("GET", "/v1/models", None),
    ("GET", "/v1/models/a", None),
    ("GET", "/v1/models/nope", None),
    ("GET", "/lora-adapters", None),
    ("PUT", "/lora-adapters", {"name": "x", "path": "/nowhere"}),
    ("DELETE", "/lora-adapters/x?model=a", None),
    ("POST", "/slots/0?action=erase&model=a", {}),
    ("POST", "/slots/7?action=erase&model=a", {}),
    ("GET", "/props", None),
    ("GET", "/slots", None),
    ("GET", "/props?model=b", None),
    ("GET", "/health", None),
    ("GET", "/nowhere", None),
]
# What differs from call to call, or by the size of a process.
VARYING = re.compile(
    r'"(id|created|created_at|completed_at|started|stats|timings|bytes|item_id|\w+_ms|\w+_s|\w+_per_second)":'
    r'("[^"]*"|[\d.e+-]+|null|\{[^{}]*(\{[^{}]*\})*[^{}]*\})'
)
TEXT = re.compile(r'"text":("(?:[^"\\]|\\.)*")')


def answers_of(folder, *, processes):
    """Statuses, headers that say something, and contents of CALLS; and names of metrics."""
    answers = []
    with (
        started(folder, processes=processes) as (url, _),
        httpx.Client(base_url=url, timeout=LIMIT_S) as client,
    ):
        for method, path, body in CALLS:
            answer = client.request(
                method, path, json=None if body is None else {"model": "a"} | body
            )
            headers = {
                name: answer.headers.get(name)
                for name in ("content-type", "x-ignored-fields", "x-cached-tokens")
            }
            text = VARYING.sub(r'"\1":0', answer.text)
            is_json = headers["content-type"] == "application/json"
            # How many tokens an event has is a matter of time.
            events = text.split("\n\n")
            texts = "".join(map(json.loads, TEXT.findall(text)))
            content = (
                json.loads(text) if is_json else (events[0][:40], texts, events[-2])
            )
            answers.append(((method, path), answer.status_code, headers, content))
        lines = client.get("/metrics").text.splitlines()
    names = {line.partition(" ")[0] for line in lines if not line.startswith("#")}
    return answers, {n for n in names if "http_" not in n and "_created" not in n}


def test_a_model_in_a_process_answers_as_one_that_is_here(tmp_path_factory):
    """
    All dialects, streams, refusals, facts and metrics, with their statuses and headers.
    """
    folder = tmp_path_factory.mktemp("same")
    theirs, names_of_theirs = answers_of(folder, processes=True)
    ours, names = answers_of(folder, processes=False)

    for answer, here in zip(theirs, ours, strict=True):
        assert answer == here
    assert names_of_theirs == names
