"""Threads that deliver do not interrupt those that compute."""

import os
import sys

import pytest

from tests.engine.support import HANG_S, make_thread

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="other systems have no SCHED_BATCH; nothing is done"
)


def test_engine_thread_waits_for_its_turn():
    """
    Its policy is SCHED_BATCH; nobody else's changes.
    """
    thread = make_thread()

    policy = thread.call(lambda: os.sched_getscheduler(0))

    assert policy.result(HANG_S) == os.SCHED_BATCH
    assert os.sched_getscheduler(0) == os.SCHED_OTHER
    thread.close()
    assert thread.join(HANG_S)
