"""Models of a service in processes of their own: real ones, which are killed."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import anyio
import httpx
import pytest

from pyllama_raw.errors import PyllamaError
from pyllama_raw.runners.errors import NetworkError, RunnerDied
from pyllama_raw.serve import ServeConfig, processes
from pyllama_raw.serve.processes import Lines, ModelProcess, ProcessModel
from scripts.tiny_models.recipe import N_CTX_TRAIN
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
        with suppress(OSError, ValueError, LookupError):
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


def test_the_process_in_front_opens_no_library(service, client):
    """
    Neither for the budget nor for the sizes of models, so no driver can take it along.
    """
    _, server = service
    client.post("/v1/completions", json=SHORT | {"model": "a"}).raise_for_status()
    pids = [server.pid, processes_of(server.pid)["a"]]
    maps = [Path(f"/proc/{pid}/maps").read_text() for pid in pids]

    assert ["libllama" in text for text in maps] == [False, True]


def test_a_request_that_got_nothing_yet_is_a_503_with_a_time(service, client):
    """
    The list says that the model has failed, and events tell it; a client that leaves ends its request there.
    """
    _, server = service
    answers = []

    async def ask(body):
        async with httpx.AsyncClient(base_url=service[0], timeout=LIMIT_S) as own:
            answers.append(await own.post("/v1/completions", json=body))

    async def until_running(n):
        while n_running(client) != n:  # noqa: ASYNC110 - nothing tells of it
            await anyio.sleep(0.02)

    async def run():
        with anyio.fail_after(LIMIT_S):
            async with anyio.create_task_group() as group:
                group.start_soon(ask, LONG | {"model": "b"})
                await until_running(1)
                group.cancel_scope.cancel()
            await until_running(0)
            async with anyio.create_task_group() as group:
                group.start_soon(ask, LONG | {"model": "b"})
                await until_running(1)
                os.kill(processes_of(server.pid)["b"], signal.SIGKILL)

    client.post("/v1/completions", json=SHORT | {"model": "b"}).raise_for_status()
    anyio.run(run)
    status = client.get("/v1/models/b").json()["status"]
    again = client.post("/v1/completions", json=SHORT | {"model": "b"})

    [answer] = answers
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "model_unavailable"
    assert (status["value"], status["error"]) == ("unloaded", "runner_died")
    assert again.status_code == 200


def test_a_process_that_is_silent_is_told_as_such(service, client):
    """
    By /livez, which stays 200, and in the metrics, where its counts are missing; other models' are there.
    """
    _, server = service
    for name in "ab":
        client.post("/v1/completions", json=SHORT | {"model": name}).raise_for_status()
    pid = processes_of(server.pid)["a"]
    os.kill(pid, signal.SIGSTOP)
    try:
        livez = client.get("/livez")
        lines = client.get("/metrics").text.splitlines()
    finally:
        os.kill(pid, signal.SIGCONT)
    again = client.get("/livez").json()["models"]

    assert (livez.status_code, livez.json()) == (
        200,
        {"status": "ok", "models": {"a": "silent", "b": "ok"}},
    )
    name = "pyllama_raw:model_process_answers"
    answers = {line for line in lines if line.startswith(name)}
    assert answers == {
        f'{name}{{model_name="{n}"}} {v}' for n, v in (("a", 0.0), ("b", 1.0))
    }
    counted = [
        line for line in lines if line.startswith("vllm:generation_tokens_total{")
    ]
    assert len(counted) == 1
    assert again == {"a": "ok", "b": "ok"}


class AnsweringProcess(ModelProcess):
    """A process that says *status* of itself, or nothing, once *faults* connections have failed."""

    def __init__(self, status, faults=0):
        super().__init__(SimpleNamespace(name="a"), lambda _: None)
        self._status, self._child, self.ends = status, self, []
        self._faults = faults

    @asynccontextmanager
    async def exchange(self, method, path):
        self._faults -= 1
        if self._faults >= 0:
            raise NetworkError("too many open files", is_sent=False)
        if self._status is None:
            raise RunnerDied(None)
        content = json.dumps({"status": self._status}).encode()

        async def aread():
            return content

        yield SimpleNamespace(aread=aread)

    async def end(self, limit_s):
        self.ends.append(limit_s)


def test_a_process_that_never_says_what_a_model_takes_is_killed(tmp_path, monkeypatch):
    """
    Whoever asked gets an error after the limit, and its claims are free again.
    """
    silent = tmp_path / "python"
    silent.write_text(f"#!/bin/sh\necho $$ > {tmp_path}/pid\nexec sleep 600\n")
    silent.chmod(0o755)
    monkeypatch.setenv("PYLLAMA_RAW_PYTHON", str(silent))
    monkeypatch.setattr(processes, "START_S", 2.0)

    with pytest.raises(PyllamaError, match="within 2 s, and was killed"):
        anyio.run(processes.device_bytes)
    pid = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists()


@pytest.mark.parametrize(
    ("status", "expected"),
    [("ok", (True, "ok", [])), ("stalled", (False, "stalled", [0.0])),
     (None, (False, "silent", [0.0]))],
)  # fmt: skip
def test_a_process_that_hangs_is_ended(status, expected):
    """
    Whether it says so or nothing: its requests would never end by themselves.
    """
    process = AnsweringProcess(status)
    health = anyio.run(process.health)

    assert (health.ready, health.detail, process.ends) == expected


def test_a_connection_that_fails_ends_no_process():
    """
    It may be the fault of this process, which has no descriptor left: the question is asked again.
    """
    process = AnsweringProcess("ok", faults=2)
    health = anyio.run(process.health)

    assert (health.ready, health.detail, process.ends) == (True, "ok", [])


def test_lines_of_a_process_come_with_its_name(caplog, monkeypatch):
    """
    So many in a while, then how many there were; not those that are written for the service itself.
    """
    monkeypatch.setattr(processes, "MAX_LINES", 3)
    times = iter([*range(9), 100])
    lines = Lines("a", lambda: next(times))
    for text in ["loaded 0.5", "", "serving at x", *map(str, range(9)), "later"]:
        lines(text)

    texts = [record.getMessage() for record in caplog.records]
    assert texts == ["a: 0", "a: 1", "a: 2", "a: 6 more lines are left out", "a: later"]


def n_running(client) -> int:
    slots = client.get("/slots", params={"model": "b"}).json()
    return sum(slot["is_processing"] for slot in slots)


def exchange_of(service, method, address, body=b"", headers=()):
    """Status and JSON of an answer to a request whose address and headers are sent byte for byte."""
    lines = [b"%b %b HTTP/1.1" % (method, address), b"host: here", *headers]
    lines += [b"content-length: %d" % len(body), b"connection: close, x-mine"]
    host, port = urlsplit(service[0]).hostname, urlsplit(service[0]).port
    with socket.create_connection((host, port), LIMIT_S) as connection:
        connection.sendall(b"\r\n".join([*lines, b"", body]))
        answer = connection.makefile("rb").read()
    head, _, content = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(content)


def test_addresses_and_headers_are_sent_on_byte_for_byte(service, client):
    """
    Other letters in either, an address that a client would resolve to another one, and one of any length.
    """
    client.post("/v1/completions", json=SHORT | {"model": "a"}).raise_for_status()
    body = json.dumps(SHORT | {"model": "a"}).encode()
    letters = [b"x-name: \xe9\xff", b"x-mine: 1", b"X-Pyllama-Sender: nobody"]
    completed = exchange_of(service, b"POST", b"/v1/completions", body, letters)
    props = exchange_of(service, b"GET", b"/props?model=a&x=%C3%BC&y=a/../b")
    others = [
        exchange_of(service, b"GET", b"/v1/models/a:" + path)
        for path in (b"/../../../props", b"/./x", b"/../../../metrics?x")
    ]
    long = exchange_of(service, b"GET", b"/props?model=a&x=" + b"x" * 65_200)

    assert (completed[0], props[0]) == (200, 200)
    assert [(status, answer["error"]["code"]) for status, answer in others] == [
        (404, "model_not_found")
    ] * 3
    assert (long[0], long[1]["error"]["param"]) == (400, "query")


def test_a_process_ends_with_its_service(tmp_path):
    """
    Also if that is killed; a signal lets it end by itself.
    """
    returned, left = [], []
    for number in (signal.SIGTERM, signal.SIGKILL):
        with (
            started(tmp_path) as (url, server),
            httpx.Client(base_url=url, timeout=LIMIT_S) as client,
        ):
            client.post(
                "/v1/completions", json=SHORT | {"model": "a"}
            ).raise_for_status()
            [process] = processes_of(server.pid).values()
            server.send_signal(number)
            returned.append(server.wait(LIMIT_S))
            for _ in range(500):
                if not is_running(process):
                    break
                time.sleep(0.01)
            left.append(is_running(process))

    assert returned == [0, -signal.SIGKILL]
    assert left == [False, False]


def is_running(pid: int) -> bool:
    try:
        return (
            Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        )
    except OSError:
        return False


RESTING = """
[loading.memory]
CPU = 4_000_000_000
[models.a]
sleep_idle_s = 0.2
"""


def test_a_process_sleeps_and_is_unloaded(tmp_path):
    """
    Facts wake nothing, and a request finds its prefix; keep_alive counts, and each key sees its own.
    """
    keys = {"PYLLAMA_RAW_API_KEYS": "admin secret,me mine,you yours"}
    log = tmp_path / "access.jsonl"
    more = f'{RESTING}\n[service]\naccess_log = "{log}"\nsalt_by_key = true'

    def ask(client, key, **fields):
        headers = {"authorization": f"Bearer {key}"}
        body = SHORT | {"model": "a"} | fields
        return client.post("/v1/completions", json=body, headers=headers)

    with (
        started(tmp_path, more, keys) as (url, server),
        httpx.Client(
            base_url=url, timeout=LIMIT_S, headers={"authorization": "Bearer secret"}
        ) as client,
    ):
        first = ask(client, "mine", keep_alive="5m")
        wait_until(client, "a", "sleeping")
        facts = [
            client.get(path, params={"model": "a"}).status_code
            for path in ("/props", "/slots", "/metrics", "/v1/models", "/v1/models/a")
            * 3
        ]
        is_sleeping = client.get("/props", params={"model": "a"}).json()["is_sleeping"]
        state, pids = states(client)["a"], processes_of(server.pid)
        second = ask(client, "mine")
        same = processes_of(server.pid) == pids
        of_other = ask(client, "yours")
        refused = client.get(
            "/metrics", headers={"authorization": "Bearer mine"}
        ).status_code
        ask(client, "mine", keep_alive=0)
        wait_until(client, "a", "unloaded")
        after = processes_of(server.pid)
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    counts = [
        (line["client"], line["model"], line["prompt_tokens"], line["output_tokens"])
        for line in lines
        if line["path"] == "/v1/completions"
    ]

    assert {*facts} == {200}
    assert (is_sleeping, state, same) == (True, "sleeping", True)
    assert second.json()["choices"] == first.json()["choices"]
    assert int(second.headers["x-cached-tokens"]) > 0
    assert int(of_other.headers["x-cached-tokens"]) == 0
    assert (refused, after) == (403, {})
    usage = first.json()["usage"]
    count = usage["prompt_tokens"], usage["completion_tokens"]
    # A line is written once its counts were asked for, when the next request may have ended already.
    assert sorted(counts) == [(name, "a", *count) for name in ("me", "me", "me", "you")]


def wait_until(client, name, state):
    for _ in range(1000):
        if states(client)[name] == state:
            return
        time.sleep(0.02)
    raise AssertionError(f"{name} is {states(client)[name]}")


def test_llama_server_as_a_router_has_processes(tmp_path):
    """
    PYLLAMA_RAW_MODEL_PROCESSES of pyllama-llama-server; unloading ends the process.
    """
    for name in "ab":
        shutil.copy(tiny_model("llama"), tmp_path / f"{name}.gguf")
    flags = ["--models-dir", str(tmp_path), "--port", "0"]
    command = [sys.executable, "-m", "pyllama_raw.cli.llama_server", *flags]
    environment = {**os.environ, "PYLLAMA_RAW_MODEL_PROCESSES": "1"}
    server = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, env=environment
    )
    try:
        lines = iter(server.stderr.readline, "")
        url = next(line for line in lines if line.startswith("serving at")).split()[-1]
        with httpx.Client(base_url=url, timeout=LIMIT_S) as client:
            body = {"prompt": "Once", "n_predict": 4, "model": "b", "ignore_eos": True}
            answer = client.post("/completion", json=body)
            props = client.get("/props", params={"model": "b"}).json()
            listed = client.get("/v1/models").json()
            before = processes_of(server.pid)
            client.post("/models/unload", json={"model": "b"}).raise_for_status()
            wait_until(client, "b", "unloaded")
            after = processes_of(server.pid)
    finally:
        server.kill()
        server.wait()
        server.stderr.close()

    assert answer.json()["timings"]["predicted_n"] == 4
    assert props["default_generation_settings"]["n_ctx"] == N_CTX_TRAIN
    assert [model["name"] for model in listed["models"]] == ["b"]
    assert [model["meta"]["n_ctx"] for model in listed["data"] if "meta" in model] == [
        N_CTX_TRAIN
    ]
    assert ([*before], after) == (["b"], {})


def end_itself(path, config):
    """Look into a file that ends the process."""
    os.kill(os.getpid(), signal.SIGKILL)


def test_who_looks_into_a_file_is_another_process():
    """
    A file that ends whoever opens it is an error here, also where its options are filled in.
    """
    file = str(tiny_model("llama"))
    model = ProcessModel("a", file, None, (), ServeConfig(), {}, end_itself)

    with pytest.raises(PyllamaError, match="ended with -9"):
        anyio.run(model.memory)


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
    r'"(id|created|created_at|completed_at|started|timings|bytes|item_id|\w+_ms|\w+_s|\w+_per_second)":'
    r'("[^"]*"|[\d.e+-]+|null|\{[^{}]*(\{[^{}]*\})*[^{}]*\})'
)
UNEQUAL = re.compile("http_|_created|process_answers")  # metrics of one of both
TEXT = re.compile(r'"text":("(?:[^"\\]|\\.)*")')


def without_stats(fields):
    """Counters of steps differ, as requests meet in them by chance."""
    fields.pop("stats", None)
    return fields


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
                json.loads(text, object_hook=without_stats)
                if is_json
                else (events[0][:40], texts, events[-2])
            )
            answers.append(((method, path), answer.status_code, headers, content))
        lines = client.get("/metrics").text.splitlines()
    names = {line.partition(" ")[0] for line in lines if not line.startswith("#")}
    return answers, {n for n in names if not UNEQUAL.search(n)}


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
