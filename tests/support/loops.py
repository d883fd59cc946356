"""Both event loops: for tests of what waits, wakes, is cancelled or ends in them."""

import pytest


@pytest.fixture(params=["asyncio", "trio"])
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return request.param
