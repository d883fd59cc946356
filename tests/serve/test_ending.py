"""The end of the process: what runs goes on, what comes is sent elsewhere."""

import json
import signal
import subprocess
import sys
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import anyio
import httpx
import pytest

from tests.serve.support import LIMIT_S
from tests.serve.wire import PATH, chat, wire
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

ROOT = Path(__file__).resolve().parents[2]
N_STREAMS = 16


@contextmanager
def process():
    """The command, and its address, which it says once it listens."""
    command = [sys.executable, "-m", "pyllama_raw", "serve", tiny_model("llama")]
    command += ["--port", "0", "--drain-s", str(LIMIT_S)]
    options = {"cwd": ROOT, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **options) as running:
        try:
            lines = iter(running.stderr.readline, "")
            line = next(line for line in lines if "serving at" in line)
            yield running, line.split()[-1]
        finally:
            running.kill()


@asynccontextmanager
async def streaming(url, texts, **fields):
    """A client beside so many streams, all of which the engine has; then their ends."""
    usage = {"include_usage": True}
    body = chat(ignore_eos=True, stream_options=usage, **fields)
    with anyio.fail_after(LIMIT_S):
        async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as client:
            async with anyio.create_task_group() as group:
                for _ in range(N_STREAMS):
                    group.start_soon(read, url, body, texts)
                while (await stats(client))["submitted"] < N_STREAMS:
                    pass
                yield client


async def stats(client):
    return (await client.get("/props")).json()["stats"]


async def read(url, body, texts):
    """One stream, until the service closes the connection."""
    async with wire(url) as client:
        await client.post(body)
        texts.append((await client.head(), await client.rest()))


def ends_of(texts):
    """Status, tokens and the reason of each stream, and whether it was whole."""
    for (status, _), text in texts:
        events = [part.partition(b"data: ")[2] for part in text.split(b"\n\n")]
        values = [json.loads(each) for each in events if each.startswith(b"{")]
        (usage,) = (each["usage"] for each in values if each["usage"])
        (choice,) = (
            choice
            for each in values
            for choice in each["choices"]
            if choice["finish_reason"]
        )
        reason = choice.get("x_finish", choice["finish_reason"])
        yield status, usage["completion_tokens"], reason, events.count(b"[DONE]")


def test_a_signal_takes_nothing_from_streams():
    """
    After SIGTERM the probe says so at once, new requests are refused with what to do, all
    streams come to their last token and [DONE], and the process ends with 0.
    """
    texts, found = [], {}

    async def talk(running, url):
        async with streaming(url, texts, max_tokens=150) as client:
            running.send_signal(signal.SIGTERM)
            while (await client.get("/readyz")).status_code == 200:
                pass
            found["live"] = await client.get("/livez")
            found["new"] = await client.post(PATH, content=chat())

    with process() as (running, url):
        anyio.run(talk, running, url)
        code = running.wait(LIMIT_S)

    assert code == 0
    assert (found["live"].status_code, found["new"].status_code) == (200, 503)
    assert found["new"].headers["connection"] == "close"
    assert int(found["new"].headers["retry-after"]) >= 1
    assert [*ends_of(texts)] == [(200, 150, "length", 1)] * N_STREAMS


def test_a_second_signal_ends_what_runs():
    """
    Streams say so and are whole; what had not begun is refused. The process ends with 0.
    """
    texts = []

    async def talk(running, url):
        async with streaming(url, texts, max_tokens=1900) as client:
            running.send_signal(signal.SIGTERM)
            while (await client.get("/readyz")).status_code == 200:
                pass
            running.send_signal(signal.SIGTERM)

    with process() as (running, url):
        anyio.run(talk, running, url)
        code = running.wait(LIMIT_S)
    begun = [each for each in texts if each[0][0] == 200]
    unbegun = [each for each in texts if each[0][0] == 503]

    assert code == 0
    assert len(texts) == N_STREAMS == len(begun) + len(unbegun)
    ends = [*ends_of(begun)]
    assert {end[2:] for end in ends} <= {("closed", 1), ("length", 1)}
    assert ("closed", 1) in {end[2:] for end in ends}
    assert all("retry-after" in headers for (_, headers), _ in unbegun)
