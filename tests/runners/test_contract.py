"""All runners keep one contract."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from httpx2 import ReadError
from sniffio import current_async_library

from pyllama_raw.runners import (
    PYLLAMA,
    LocalRunner,
    MockRunner,
    ModelRunner,
    Pool,
    RemoteRunner,
)
from pyllama_raw.runners.errors import NetworkError
from pyllama_raw.serve import ServeConfig, make_app
from pyllama_raw.testing import FakeExecutor, fake_limits
from tests.runners.stub import Stub, chunk, honest, stream
from tests.serve.support import chatting, serving
from tests.support.loops import anyio_backend  # noqa: F401

pytest.register_assert_rewrite("pyllama_raw.testing.runner_contract")

from pyllama_raw.testing.runner_contract import RunnerContract  # noqa: E402


def failing_executor() -> FakeExecutor:
    """The third step of the first request fails."""
    return FakeExecutor(fake_limits(), failing_rows=frozenset({(3, 1)}))


class TestMock(RunnerContract):
    """Of pieces that a test gives."""

    @asynccontextmanager
    async def made(self) -> AsyncIterator[ModelRunner]:
        async with MockRunner() as runner:
            yield runner

    @asynccontextmanager
    async def failing(self) -> AsyncIterator[ModelRunner]:
        async with MockRunner(error=NetworkError("as told"), n_before=1) as runner:
            yield runner


class TestLocal(RunnerContract):
    """An engine on fakes."""

    follows_schemas = False

    @asynccontextmanager
    async def made(self) -> AsyncIterator[ModelRunner]:
        async with LocalRunner(chatting()) as runner:
            yield runner

    @asynccontextmanager
    async def failing(self) -> AsyncIterator[ModelRunner]:
        async with LocalRunner(chatting(failing_executor())) as runner:
            yield runner


@asynccontextmanager
async def served(executor: FakeExecutor | None = None) -> AsyncIterator[ModelRunner]:
    """Our own server over an engine on fakes."""
    async with chatting(executor) as engine:
        app = make_app({"a": engine}, ServeConfig())
        async with serving(app, current_async_library()) as url:
            async with RemoteRunner(
                url, "a", dialect=PYLLAMA, verbs=["generate"]
            ) as runner:
                yield runner


class TestServed(RunnerContract):
    """A RemoteRunner at our server."""

    follows_schemas = False

    made = staticmethod(served)

    @asynccontextmanager
    async def failing(self) -> AsyncIterator[ModelRunner]:
        async with served(failing_executor()) as runner:
            yield runner


class TestPool(RunnerContract):
    """Two mocks."""

    @asynccontextmanager
    async def made(self) -> AsyncIterator[ModelRunner]:
        async with Pool({"a": MockRunner(), "b": MockRunner()}) as runner:
            yield runner

    @asynccontextmanager
    async def failing(self) -> AsyncIterator[ModelRunner]:
        broken = MockRunner(error=NetworkError("as told"), n_before=1)
        async with Pool({"a": broken}) as runner:
            yield runner


class TestRemote(RunnerContract):
    """A RemoteRunner at a stub with two words."""

    @asynccontextmanager
    async def made(self) -> AsyncIterator[ModelRunner]:
        async with RemoteRunner("http://a", "m", transport=Stub(honest)) as runner:
            yield runner

    @asynccontextmanager
    async def failing(self) -> AsyncIterator[ModelRunner]:
        broken = stream(chunk("hello"), ReadError("as told"))
        async with RemoteRunner("http://a", "m", transport=Stub(broken)) as runner:
            yield runner
