"""What tests of the engine thread share."""

import pytest

from tests.engine.support import HANG_S, PlainLoop


@pytest.fixture
def loop():
    return PlainLoop()


@pytest.fixture
def started():
    """Engine threads to be ended after the test."""
    threads = []
    yield threads.append
    for thread in threads:
        thread.close()
        assert thread.join(HANG_S)
