"""What Python's log is told."""

import logging
from dataclasses import replace
from typing import ClassVar

import pytest

from pyllama_raw import EngineConfig, QueueFull, SamplingParams, SchedulerConfig
from pyllama_raw.api.engine import AsyncEngine
from pyllama_raw.core.stats import Eviction
from pyllama_raw.core.step import DecodeStatus
from pyllama_raw.engine.watcher import Teller
from pyllama_raw.testing import FakeExecutor, fake_engine, fake_limits
from tests.core.support import make_scheduler

pytestmark = pytest.mark.anyio


def lines(caplog, name):
    return [(r.levelname, r.getMessage()) for r in caplog.records if r.name == name]


async def test_preemption_and_refusal_are_told(caplog):
    """
    At level INFO, as they come.
    """
    executor = FakeExecutor(fake_limits(), failures={3: DecodeStatus.NO_SPACE})
    with caplog.at_level(logging.INFO, "pyllama_raw"):
        async with fake_engine(executor, max_waiting=0) as engine:
            await engine.complete_many(["one", "two"], SamplingParams(max_tokens=4))
            async with engine.generate("x", SamplingParams(max_tokens=90)):
                with pytest.raises(QueueFull):
                    await engine.complete_n("many", SamplingParams(n=4))

    assert lines(caplog, "pyllama_raw.engine") == [
        ("INFO", "preempted 1 times (1 in all)")
    ]
    ((level, text),) = lines(caplog, "pyllama_raw.engine.thread")
    assert (level, text[:20]) == ("INFO", "requests were refuse")


class Evicting:
    """A scheduler whose cache has let so many snapshots go."""

    n_evictions: ClassVar = {Eviction.SPACE: 0, Eviction.REPLACED: 0}
    counters = make_scheduler().counters

    def stats(self):
        return make_scheduler().stats()

    def cache_stats(self):
        known = make_scheduler().cache_stats()
        return replace(known, n_evictions=dict(self.n_evictions))


def test_evictions_are_told_to_who_wants_to_know(caplog):
    """
    At level DEBUG, with how many there were of each kind.
    """
    teller, scheduler = Teller(), Evicting()
    with caplog.at_level(logging.DEBUG, "pyllama_raw"):
        for n in (0, 2, 2, 3):
            scheduler.n_evictions[Eviction.SPACE] = n
            teller.tell(scheduler)

    assert lines(caplog, "pyllama_raw.engine") == [
        ("DEBUG", "the cache let 2 snapshots go (in all space: 2)"),
        ("DEBUG", "the cache let 1 snapshots go (in all space: 3)"),
    ]


@pytest.mark.native
async def test_libllama_is_heard(caplog, model_path):
    """
    Its lines come with its levels, and ours when a model is open.
    """
    config = EngineConfig(scheduler=SchedulerConfig(n_slots=2))
    with caplog.at_level(logging.DEBUG, "pyllama_raw"):
        async with AsyncEngine.open(model_path, config):
            pass

    assert any("llama" in text for _, text in lines(caplog, "pyllama_raw.libllama"))
    ((level, text),) = lines(caplog, "pyllama_raw.engine.build")
    assert (level, text) == ("INFO", f"opened {model_path}: 2 slots, 4096 cells")
