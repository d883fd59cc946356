"""
Both event loops, trio by night.

The library and child processes wait as fakes do, which both loops have each time.
"""

import pytest


@pytest.fixture(
    params=["asyncio", pytest.param("trio", marks=pytest.mark.nightly)],
)
def anyio_backend(request: pytest.FixtureRequest) -> str:
    return request.param
