"""Requests whose prompts an encoder reads: what shares a step, and what failures touch."""

import os
from array import array
from random import Random

import pytest

from pyllama_raw.core.request import (
    SOURCES,
    Finished,
    FinishReason,
    NewTokens,
    Request,
)
from pyllama_raw.core.scheduling.scheduler import Scheduler
from pyllama_raw.core.step import DecodeStatus, ReadSource
from pyllama_raw.engine.driver import Driver
from pyllama_raw.errors import NativeError, PromptTooLong
from pyllama_raw.testing import FakeExecutor, fake_limits
from tests.core.support import Pieces

N_CASES = int(os.environ.get("PYLLAMA_RAW_TEST_CASES", "10"))
START = 7  # begins each output
N_SOURCE = 24


def make_request(request_id=0, n_source=4, max_tokens=4, **fields) -> Request:
    source = array("i", range(100 + request_id, 100 + request_id + n_source))
    tokens = array("i", [START])
    return Request(request_id, tokens, max_tokens, source=source, **fields)


class Bench:
    """A scheduler and a fake context with an encoder; a step takes a second."""

    def __init__(self, *, n_slots=4, n_cells=512, options=None, **faults) -> None:
        limits = fake_limits(n_slots=n_slots, n_cells=n_cells, n_source=N_SOURCE)
        self.executor = FakeExecutor(limits, **faults)
        self.scheduler = Scheduler(limits, Pieces(), **(options or {}))
        self.tokens: dict[int, list[int]] = {}
        self.ends: dict[int, Finished] = {}
        self.now = 0.0
        self.driver = Driver(self.scheduler, self.executor, self.clock, self.tell)

    def clock(self) -> float:
        self.now += 0.5
        return self.now

    def tell(self, events) -> None:
        for event in events:
            if isinstance(event, NewTokens):
                self.tokens.setdefault(event.request_id, []).extend(event.tokens)
            elif isinstance(event, Finished):
                assert event.request_id not in self.ends
                self.ends[event.request_id] = event
                self.executor.close(event.request_id)

    def add(self, *requests: Request) -> None:
        for request in requests:
            self.driver.add([request], self.now)

    def run(self) -> None:
        for _ in range(3000):
            if not self.driver.step():
                return
            self.scheduler.check_integrity()
        raise AssertionError("not idle")

    @property
    def shapes(self) -> list[tuple[str, list[int]]]:
        """The kind of each step with works, and whose works it had."""
        return [
            (
                "read" if plan.lot == SOURCES else "decode",
                [w.request_id for w in plan.works],
            )
            for plan in self.executor.plans
            if plan.works
        ]


def alone(request: Request) -> list[int]:
    """What *request* says without others."""
    bench = Bench()
    bench.add(request)
    bench.run()
    return bench.tokens[request.request_id]


def test_sources_that_come_together_are_read_together():
    """
    Equal requests take one step more than their outputs have tokens, however many they are.
    """
    bench = Bench(n_slots=4)
    bench.add(*(make_request(i, max_tokens=3) for i in range(4)))

    bench.run()

    everyone = [0, 1, 2, 3]
    assert bench.shapes == [("read", everyone)] + [("decode", everyone)] * 3


def test_a_newcomer_is_read_beside_those_that_run():
    """
    A step of sources has those of all that go on, each behind what its slot holds.
    """
    bench = Bench()
    bench.add(make_request(0, max_tokens=6))
    for _ in range(3):
        bench.driver.step()
    bench.add(make_request(1, max_tokens=2))

    bench.run()

    reads = [p.works for p in bench.executor.plans if p.lot == SOURCES]
    first, second = (make_request(i).source for i in (0, 1))
    assert reads[1] == (ReadSource(0, 0, 3, first), ReadSource(1, 1, 0, second))
    assert bench.tokens == {
        0: alone(make_request(0, max_tokens=6)),
        1: alone(make_request(1, max_tokens=2)),
    }


def test_reading_leaves_streams_half_of_the_time():
    """
    Streams decode for as long as a read took, and at least once, before the next one.
    """
    bench = Bench(n_slots=8)
    bench.add(make_request(0, max_tokens=20))
    bench.driver.step()
    for request_id in range(1, 4):
        bench.add(make_request(request_id, max_tokens=20))
        bench.driver.step()

    for _ in range(6):
        bench.driver.step()

    kinds = [kind for kind, _ in bench.shapes]
    assert "read" in kinds[1:]
    assert all(
        kinds[i + 1] == "decode" for i, kind in enumerate(kinds) if kind == "read"
    )


def test_a_source_that_does_not_fit_beside_others_waits():
    """
    It is overtaken by those that fit, a bounded number of times, and starts alone.
    """
    bench = Bench(n_slots=4, options={"max_overtakes": 1})
    bench.add(make_request(0, n_source=10, max_tokens=3))
    bench.add(make_request(1, n_source=N_SOURCE, max_tokens=1))
    bench.add(*(make_request(i, n_source=2, max_tokens=1) for i in (2, 3)))

    bench.run()

    reads = [ids for kind, ids in bench.shapes if kind == "read"]
    assert reads == [[0, 2], [1], [3]]


def test_a_more_urgent_source_takes_the_place_of_others():
    """
    Those of worse priority lose their slots until it fits, and are read again later.
    """
    bench = Bench(n_slots=4, options={"preempt": "priority"})
    low = make_request(0, n_source=20, max_tokens=4, priority=1)
    bench.add(low)
    for _ in range(3):
        bench.driver.step()
    bench.add(make_request(1, n_source=20, max_tokens=2, priority=0))

    bench.run()

    reads = [ids for kind, ids in bench.shapes if kind == "read"]
    assert reads == [[0], [1], [0]]
    assert bench.tokens[0] == alone(low)


def test_nobody_loses_a_slot_for_a_source_that_would_not_fit_all_the_same():
    """
    If giving way were not enough, those of worse priority go on.
    """
    bench = Bench(n_slots=4, options={"preempt": "priority"})
    bench.add(make_request(0, n_source=10, max_tokens=4, priority=0))
    bench.add(make_request(1, n_source=10, max_tokens=4, priority=1))
    for _ in range(3):
        bench.driver.step()
    bench.add(make_request(2, n_source=20, max_tokens=2, priority=0))

    bench.run()

    assert [bench.ends[i].n_preempted for i in range(3)] == [0, 0, 0]


def test_a_source_that_is_too_long_is_refused():
    """
    What cannot be read at once is refused with the limit, and nothing is queued.
    """
    bench = Bench()

    with pytest.raises(PromptTooLong, match="25 tokens, at most 24 are allowed"):
        bench.scheduler.add(make_request(n_source=N_SOURCE + 1), 0.0)

    assert not bench.scheduler.alive


def test_the_source_is_what_a_request_has_used():
    """
    The end tells the tokens that the caller gave, not the one that begins the output.
    """
    bench = Bench()
    bench.add(make_request(n_source=5, max_tokens=2))

    bench.run()

    assert (bench.ends[0].n_prompt, bench.ends[0].n_output) == (5, 2)


@pytest.mark.parametrize(
    "status", [DecodeStatus.INVALID, DecodeStatus.FAILED, DecodeStatus.NO_SPACE]
)
def test_a_source_that_fails_ends_alone(status):
    """
    Others keep their outputs, whether the context had to be made anew or not.
    """
    others = [make_request(i, max_tokens=12) for i in (0, 1, 3)]
    bench = Bench(poison={2: status})
    bench.add(*others[:2])
    for _ in range(3):
        bench.driver.step()
    bench.add(make_request(2), others[2])

    bench.run()

    assert isinstance(bench.ends[2].error, NativeError)
    assert bench.tokens == {r.request_id: alone(r) for r in others}


@pytest.mark.parametrize(
    "status", [DecodeStatus.INVALID, DecodeStatus.FAILED, DecodeStatus.ABORTED]
)
@pytest.mark.parametrize("n_step", range(8))
def test_a_failure_of_the_moment_ends_nobody(status, n_step):
    """
    Whichever step fails, all outputs are those of undisturbed requests.
    """
    requests = [make_request(i, max_tokens=5) for i in range(3)]
    bench = Bench(failures={n_step: status})
    bench.add(*requests[:2])
    for _ in range(3):
        bench.driver.step()
    bench.add(requests[2])

    bench.run()

    assert bench.tokens == {r.request_id: alone(r) for r in requests}


def test_what_no_context_holds_any_more_is_read_again():
    """
    The encoder has forgotten a source in the midst of its output, which goes on all the same.
    """
    bench = Bench()
    bench.add(make_request(0))
    bench.driver.step()
    bench.driver.step()
    bench.scheduler.lose_reading()
    bench.run()

    assert bench.shapes[:3] == [("read", [0]), ("decode", [0]), ("read", [0])]
    assert len(bench.tokens[0]) == 4


def test_cancelled_while_it_is_read():
    """
    A request may end in any step; its slot's next user does not see its source.
    """
    bench = Bench(n_slots=1)

    def leave(n_step, plan):
        if n_step == 0:
            bench.driver.cancel(0)

    bench.executor = FakeExecutor(bench.scheduler.limits, on_step=leave)
    bench.driver.executor = bench.executor
    bench.add(make_request(0), make_request(1))

    bench.run()

    assert bench.ends[0].reason is FinishReason.CANCELLED
    assert bench.tokens == {1: alone(make_request(1))}


@pytest.mark.unwatched
@pytest.mark.chance
@pytest.mark.parametrize("seed", range(N_CASES))
def test_random_histories_equal_requests_alone(seed):
    """
    Whoever joins, leaves, fails or is preempted: what comes of the others is as alone.
    """
    random = Random(seed)  # noqa: S311
    statuses = [DecodeStatus.INVALID, DecodeStatus.FAILED, DecodeStatus.ABORTED]
    failures = {
        step: random.choice(statuses) for step in range(200) if random.random() < 0.04
    }
    bench = Bench(n_slots=random.choice([1, 3, 6]), n_cells=60, failures=failures)
    poisoned = {request_id for request_id in range(16) if random.random() < 0.1}
    bench.executor._poison.update(dict.fromkeys(poisoned, random.choice(statuses[:2])))
    requests, waiting = [], 16
    while waiting or bench.scheduler.alive:
        if waiting and random.random() < 0.4:
            sizes = random.randint(1, N_SOURCE), random.randint(1, 20)
            request = make_request(len(requests), *sizes, priority=random.randint(0, 1))
            requests.append(request)
            bench.add(request)
            waiting -= 1
        if requests and random.random() < 0.05:
            bench.driver.cancel(random.choice(requests).request_id)
        bench.driver.step()
        bench.scheduler.check_integrity()

    assert bench.ends.keys() == set(range(16))
    for request in requests:
        end, got = (
            bench.ends[request.request_id],
            bench.tokens.get(request.request_id, []),
        )
        assert got == alone(request)[: len(got)]
        if end.reason is FinishReason.LENGTH:
            assert len(got) == request.max_tokens
