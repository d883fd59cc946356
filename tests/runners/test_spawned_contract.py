"""The contract of runners on servers that are spawned, with real models."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import cache

import pytest

from benchmarks.peers import free_port
from pyllama_raw import SamplingParams
from pyllama_raw.options.fetch import cache_dir
from pyllama_raw.runners import (
    LlamaOptions,
    LlamaServer,
    ModelRunner,
    OwnServer,
    SpawnedRunner,
)
from pyllama_raw.runners.errors import RunnerDied
from pyllama_raw.testing.runner_contract import RunnerContract
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native
GENERATES = ["generate"]


@pytest.fixture
def anyio_backend() -> str:
    """One event loop: a start takes a second, and test_spawned.py has both."""
    return "asyncio"


@cache
def llama_server() -> str:
    """The program LLAMA_SERVER, or the one that benchmarks/peers/setup has built."""
    built = sorted((cache_dir() / "peers").glob("llama.cpp-*/llama-server"))
    program = os.environ.get("LLAMA_SERVER") or (built and str(built[-1]))
    if not program:
        pytest.skip("no llama-server: benchmarks/peers/setup builds one")
    return program


class TestOwn(RunnerContract):
    """Our own server."""

    @asynccontextmanager
    async def made(self) -> AsyncIterator[ModelRunner]:
        program = OwnServer(tiny_model("llama"), ("--slots", "4", "--n-ctx", "2048"))
        async with SpawnedRunner(program, verbs=GENERATES) as runner:
            yield runner


def listens(port: int) -> bool:
    """Whether a process does."""
    with socket.socket() as probe:
        return not probe.connect_ex(("127.0.0.1", port))


@contextmanager
def computing(folder: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """llama.cpp's machine for others, in a process."""
    command = [f"{folder}/ggml-rpc-server", "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as machine:
        try:
            while not listens(port):
                time.sleep(0.01)
            yield machine
        finally:
            machine.kill()


@pytest.mark.nightly
class TestLlamaServer(RunnerContract):
    """llama.cpp's."""

    @asynccontextmanager
    async def made(self) -> AsyncIterator[ModelRunner]:
        options = LlamaOptions(n_ctx=2048, n_slots=4, extra=("--kv-unified", "--jinja"))
        program = LlamaServer(tiny_model("llama"), llama_server(), options)
        async with SpawnedRunner(program, verbs=GENERATES) as runner:
            yield runner


@pytest.mark.anyio
async def test_a_model_of_vectors_is_served():
    """
    By our own server in a process of its own.
    """
    runner = SpawnedRunner(OwnServer(tiny_model("bert")), verbs=["embed"])
    async with runner:
        rows = await runner.embed(["a", "b"])

    assert rows.shape == (2, 64)


@pytest.mark.nightly
@pytest.mark.anyio
async def test_a_lost_machine_ends_the_child_and_not_this_process():
    """
    The request raises RunnerDied; once the machine is back, the next one is served.
    """
    folder = os.environ.get("LLAMA_RPC")
    if not folder:
        pytest.skip("LLAMA_RPC names no folder that benchmarks/peers/setup --rpc built")
    port = free_port()
    options = LlamaOptions(
        n_slots=2,
        n_gpu_layers=99,
        rpc=(f"127.0.0.1:{port}",),
        extra=("--fit", "off"),
    )
    program = LlamaServer(tiny_model("llama"), f"{folder}/llama-server", options)
    runner = SpawnedRunner(program, verbs=GENERATES)
    with computing(folder, port) as machine:
        run = runner.generate("a", SamplingParams(max_tokens=900))
        async with run:
            await anext(run)
            machine.kill()
            with pytest.raises(RunnerDied) as caught:
                await run.collect()
    with computing(folder, port):
        after = await runner.generate("a").collect()
        await runner.aclose()

    assert caught.value.returned == -signal.SIGABRT
    assert after.usage.completion_tokens >= 1
