"""The contract on libllama, with tiny models: of text, of vectors and of ranks."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from sniffio import current_async_library

from pyllama_raw import AsyncEngine, ContextConfig, EngineConfig
from pyllama_raw.runners import PYLLAMA, LocalRunner, ModelRunner, RemoteRunner
from pyllama_raw.serve import ServeConfig, make_app
from pyllama_raw.testing.runner_contract import RunnerContract
from tests.serve.support import serving
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

CONFIG = EngineConfig(context=ContextConfig(n_ctx=2048))


class TestText(RunnerContract):
    """A model that generates, opened by the runner."""

    @asynccontextmanager
    async def made(self) -> AsyncIterator[ModelRunner]:
        async with LocalRunner(tiny_model("llama"), CONFIG) as runner:
            yield runner


class TestServedText(RunnerContract):
    """The same behind our server."""

    @asynccontextmanager
    async def made(self) -> AsyncIterator[ModelRunner]:
        async with AsyncEngine.open(tiny_model("llama"), CONFIG) as engine:
            app = make_app({"a": engine}, ServeConfig())
            async with serving(app, current_async_library()) as url:
                async with RemoteRunner(
                    url, "a", dialect=PYLLAMA, verbs=["generate"]
                ) as runner:
                    yield runner


class TestVectors(RunnerContract):
    """A model that makes vectors."""

    @asynccontextmanager
    async def made(self) -> AsyncIterator[ModelRunner]:
        async with LocalRunner(tiny_model("bert")) as runner:
            yield runner


class TestRanks(RunnerContract):
    """A model that ranks."""

    @asynccontextmanager
    async def made(self) -> AsyncIterator[ModelRunner]:
        async with LocalRunner(tiny_model("bert-rank")) as runner:
            yield runner


class TestServedRanks(RunnerContract):
    """The same behind our server."""

    @asynccontextmanager
    async def made(self) -> AsyncIterator[ModelRunner]:
        async with AsyncEngine.open(tiny_model("bert-rank")) as engine:
            app = make_app({"a": engine}, ServeConfig())
            async with serving(app, current_async_library()) as url:
                async with RemoteRunner(
                    url, "a", dialect=PYLLAMA, verbs=["rank"]
                ) as runner:
                    yield runner
