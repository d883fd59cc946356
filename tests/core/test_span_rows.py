"""Rows of spans that come later than their request, or not at all."""

import pytest

from pyllama_raw.core.request import (
    FinishReason,
)
from pyllama_raw.errors import BadMedia
from tests.core.span_support import ASKED, IMAGE, WORDS, Engine
from tests.core.support import finished


def test_an_image_is_waited_for_while_text_before_it_is_computed():
    """
    Others go on meanwhile; nothing of the image is computed before its rows are there.
    """
    engine = Engine()
    engine.add(ASKED, 2, is_ready=False)
    engine.add(WORDS, 4)

    ended_before = list(engine.run())
    works = list(engine.works)
    engine.driver.media_ready(0, 1)
    ends = engine.run()

    assert ended_before == [1]
    assert works[:2] == [(0, 6), (0, 6)]
    assert engine.works[len(works) :] == [(6, 16), (10, 4), (14, 1)]
    assert ends[0].n_preempted == 0


def test_who_waits_for_rows_holds_no_slot_that_others_want():
    """
    It comes back when they are there, and goes on in the slot that it had.
    """
    engine = Engine(n_slots=1, n_parked=1)
    engine.add(ASKED, 2, is_ready=False)
    engine.run()
    engine.add([200, 201, 202], 2)
    [other] = engine.run()
    n_works = len(engine.works)
    load = engine.scheduler.occupancy[:2]
    engine.driver.media_ready(0, 1)

    ends = engine.run()

    assert other == 1
    assert load == (0, 1)
    assert ends[0].n_output == 2
    assert ends[0].n_cached == 0
    assert engine.works[n_works:] == [(6, 16), (10, 4), (14, 1)]


def test_a_request_whose_rows_never_come_ends_alone():
    """
    It may be running or have given up its slot; what is told of it later is of nobody.
    """
    engine = Engine(n_slots=1)
    error = BadMedia("it is damaged", 0)
    engine.add(ASKED, is_ready=False)
    engine.run()
    engine.add(ASKED, is_ready=False)
    engine.run()

    told = [engine.driver.fail(number, error) for number in (0, 1, 1)]
    told.append(engine.driver.media_ready(0, 1))

    ends = engine.run()
    assert told == [True, True, False, False]
    assert [end.error for end in ends.values()] == [error, error]
    assert engine.scheduler.stats().failed == 2


def test_a_deadline_ends_who_waits_for_rows():
    """
    Also if it has given up its slot.
    """
    engine = Engine(n_slots=1)
    engine.add(ASKED, is_ready=False, deadline=1.0)
    engine.run()
    engine.add(WORDS, 1)
    engine.run()
    assert engine.scheduler.next_deadline == 1.0

    engine.scheduler.schedule(2.0)

    [end] = finished(engine.scheduler.take_events()).values()
    assert end.reason is FinishReason.DEADLINE


def test_two_that_wait_for_the_same_image_compute_it_once():
    """
    Its rows come for both; one computes them, the other one has a copy.
    """
    engine = Engine()
    for last in (120, 121):
        engine.add([*ASKED, last], 1, is_ready=False)
    engine.run()
    for number in range(2):
        engine.driver.media_ready(number, 1)

    ends = engine.run()

    assert [end.n_output for end in ends.values()] == [1, 1]
    assert sum(n_rows == 16 for _, n_rows in engine.works) == 1


def test_an_image_that_is_cached_needs_no_rows():
    """
    What a slot holds of it is taken over although its rows are not there.
    """
    engine = Engine()
    engine.add(ASKED, 1)
    engine.run()
    engine.add([*ASKED, 120, 121], 1, is_ready=False)

    ends = engine.run()

    assert ends[1].n_cached == len(ASKED)


@pytest.mark.parametrize("is_in_slot", [True, False])
def test_rows_that_the_cache_has_are_spared(is_in_slot):
    """
    They are not computed, also where they count as ready.
    """
    engine = Engine(n_slots=1, max_bytes=10**6)
    engine.add(ASKED, 1)
    engine.run()
    if not is_in_slot:
        engine.add([200, 201, 202], 1)
        engine.run()
    number = engine.add([*ASKED, *IMAGE, *WORDS], 1, is_ready=False)

    told = [engine.scheduler.spare(number), engine.scheduler.spare(9)]
    engine.driver.media_ready(number, 2)
    end = engine.run()[number]

    assert told == [1, 0]
    assert (end.n_cached, end.cache_tier) == (len(ASKED), ("host", "live")[is_in_slot])
    assert engine.scheduler.take_wanted() == []
    assert sum(n_rows == 16 for _, n_rows in engine.works) == 2


@pytest.mark.parametrize(("n_common", "n_left"), [(0, 0), (22, 1)])
def test_rows_that_the_cache_loses_are_wanted(n_common, n_left):
    """
    The slot goes to another prompt before the request has it. What was lost is computed
    when its rows are ready anew.
    """
    engine = Engine(n_slots=1)
    asked = [*ASKED, *IMAGE, *WORDS]
    engine.add(asked, 1)
    engine.run()
    engine.add(asked, 1, is_ready=False)
    spared = engine.scheduler.spare(1)
    engine.driver.media_ready(1, 2)
    engine.add([*asked[:n_common], *range(200, 206)], 1, priority=-1)

    ended_before = list(engine.run())
    wanted = engine.scheduler.take_wanted()
    n_works = len(engine.works)
    engine.driver.media_ready(1, 2)
    ends = engine.run()

    assert (spared, ended_before, wanted) == (2, [0, 2], [(1, n_left)])
    assert ends[1].n_output == 1
    n_rows = [n for _, n in engine.works[n_works:]]
    assert n_rows.count(16) == 2 - n_left
