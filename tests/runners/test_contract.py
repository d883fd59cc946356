"""All runners keep one contract."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from pyllama_raw.runners import LocalRunner, MockRunner, ModelRunner
from pyllama_raw.runners.errors import NetworkError
from pyllama_raw.testing import FakeExecutor, fake_limits
from tests.loops import anyio_backend  # noqa: F401
from tests.serve.support import chatting

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
