"""The contract of runners on servers that are spawned, with real models."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache

import pytest

from pyllama_raw.options.fetch import cache_dir
from pyllama_raw.runners import (
    LlamaOptions,
    LlamaServer,
    ModelRunner,
    OwnServer,
    SpawnedRunner,
)
from pyllama_raw.testing.runner_contract import RunnerContract
from tests.tiny import tiny_model

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
    found = os.environ.get("LLAMA_SERVER") or (built and str(built[-1]))
    if not found:
        pytest.skip("no llama-server: benchmarks/peers/setup builds one")
    return found


class TestOwn(RunnerContract):
    """Our own server."""

    @asynccontextmanager
    async def made(self) -> AsyncIterator[ModelRunner]:
        program = OwnServer(tiny_model("llama"), ("--slots", "4", "--n-ctx", "2048"))
        async with SpawnedRunner(program, verbs=GENERATES) as runner:
            yield runner


@pytest.mark.nightly
class TestOwnOfVectors(RunnerContract):
    """Our own server, with a model of vectors."""

    @asynccontextmanager
    async def made(self) -> AsyncIterator[ModelRunner]:
        program = OwnServer(tiny_model("bert"))
        async with SpawnedRunner(program, verbs=["embed"]) as runner:
            yield runner


@pytest.mark.nightly
class TestLlamaServer(RunnerContract):
    """llama.cpp's."""

    @asynccontextmanager
    async def made(self) -> AsyncIterator[ModelRunner]:
        options = LlamaOptions(n_ctx=2048, n_slots=4, extra=("--kv-unified", "--jinja"))
        program = LlamaServer(tiny_model("llama"), llama_server(), options)
        async with SpawnedRunner(program, verbs=GENERATES) as runner:
            yield runner
