"""Decodes that have no CPU for much of their time are told."""

from __future__ import annotations

import logging

from pyllama_raw._ffi.openmp import ShortSpins
from pyllama_raw.api.facts import health
from pyllama_raw.api.results import EngineState
from pyllama_raw.core.stats import StepTimes
from pyllama_raw.engine.watcher import CpuShare
from pyllama_raw.testing import FakeExecutor, fake_limits
from tests.core.support import make_request
from tests.engine.support import HANG_S, PlainStream, make_thread


class Spins(ShortSpins):
    """Notes what is asked for."""

    def __init__(self):
        super().__init__()
        self.asked = []

    def begin(self):
        self.asked.append("short")

    def end(self):
        self.asked.append("long")


def shares(*times: tuple[float, float]) -> list[float | None]:
    """The share after each of *times*: total seconds of decodes, and of CPU."""
    share, found = CpuShare(Spins()), []
    for decode_s, cpu_s in times:
        share.note(StepTimes(decode_s=decode_s, decode_cpu_s=cpu_s))
        found.append(share.latest)
    return found


def test_the_share_is_of_the_latest_decodes():
    """
    Less than half a second says nothing new.
    """
    found = shares((0.4, 0.5), (2.0, 2.0), (2.4, 2.0), (4.0, 2.5), (5.0, 3.5))

    assert found == [None, 1.0, 1.0, 0.25, 1.0]


def test_without_cpu_times_there_is_no_share():
    """
    Where a GPU computes, a thread that waits for it is as it should be.
    """
    assert shares((2.0, 0.0), (9.0, 0.0)) == [None, None]


def test_the_log_tells_once_until_it_is_over(caplog):
    """
    A line when decodes begin to lack CPUs, and the next one after it was over.
    """
    with caplog.at_level(logging.INFO, "pyllama_raw"):
        shares((1, 1.0), (2, 1.25), (3, 1.5), (4, 2.5), (5, 2.7))

    assert [record.getMessage() for record in caplog.records] == [
        f"decodes take {times} times their CPU time: other programs compute on the same "
        "CPUs, fewer CPUs are granted than n_threads, or libgomp may not spin"
        for times in ("4.0", "5.0")
    ]


def test_threads_wait_shortly_while_decodes_lack_cpus():
    """
    Long waits are tried again after 2 s of decodes, then after 4, then after 8.
    """
    share, now, cpu = CpuShare(spins := Spins()), 0.0, 0.0
    asked = []
    for is_alone in [True, *[False] * 10, *[True] * 2, *[False] * 4]:
        now, cpu = now + 1, cpu + (0.9 if is_alone else 0.5)
        share.note(StepTimes(decode_s=now, decode_cpu_s=cpu))
        asked.append(len(spins.asked))
    share.close()
    share.close()

    assert asked == [0, 1, 1, 2, 3, 3, 3, 3, 4, 5, 5, 5, 5, 5, 5, 5, 5]
    assert spins.asked == ["short", "long"] * 3


class Crowded(FakeExecutor):
    """Has a CPU in a fifth of the time of its decodes."""

    @property
    def times(self) -> StepTimes:
        return StepTimes(decode_s=5.0, decode_cpu_s=1.0)


def test_health_has_the_share(loop, started):
    """
    It is known when the request has ended at the latest.
    """
    started(thread := make_thread(Crowded(fake_limits(n_slots=1))))
    stream = PlainStream(loop)
    before = health(thread, EngineState.RUNNING, 5.0).cpu_share
    thread.submit_all((make_request(0, max_tokens=1),), stream)

    stream.read_to_end()
    thread.call(lambda: None).result(HANG_S)

    assert (before, health(thread, EngineState.RUNNING, 5.0).cpu_share) == (None, 0.2)
