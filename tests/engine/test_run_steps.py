"""Steps of a driver up to bounds."""

from array import array

import pytest

from pyllama_raw.core.spans import Span
from pyllama_raw.engine.driver import Driver
from pyllama_raw.engine.run_steps import StepsRun, run_steps
from pyllama_raw.errors import EngineStalled
from pyllama_raw.testing import FakeExecutor, fake_limits, fake_parts
from tests.core.support import make_request


def make_driver(n_requests=0, max_tokens=4, **limits):
    """A step takes a second; the requests are there."""
    executor = FakeExecutor(fake_limits(**limits))
    scheduler = fake_parts(executor).scheduler
    driver = Driver(
        scheduler, executor, lambda: float(executor.n_steps), lambda *_: None
    )
    driver.add([make_request(i, max_tokens=max_tokens) for i in range(n_requests)], 0.0)
    return driver


def counts(error):
    """Those that its message has."""
    return (
        *(error.n_running, error.n_waiting, error.n_slots),
        *(error.n_cells_used, error.n_cells),
    )


@pytest.mark.parametrize(
    ("bounds", "expected"),
    [
        ({"max_steps": 2}, StepsRun(2, 0, 4, 2.0, "max_steps")),
        ({"max_steps": 0}, StepsRun(0, 0, 0, 0.0, "max_steps")),
        ({"max_completed": 1}, StepsRun(4, 2, 8, 4.0, "max_completed")),
        ({"max_tokens": 3}, StepsRun(2, 0, 4, 2.0, "max_tokens")),
        ({"max_duration_s": 2.5}, StepsRun(3, 0, 6, 3.0, "max_duration_s")),
        ({"max_steps": 9, "max_tokens": 5}, StepsRun(3, 0, 6, 3.0, "max_tokens")),
        ({"max_steps": 2, "max_tokens": 4}, StepsRun(2, 0, 4, 2.0, "max_steps")),
    ],
)
def test_the_first_bound_ends_it(bounds, expected):
    """
    The record says what was done, and the bound; of several that are reached the first.
    """
    driver = make_driver(2)

    assert run_steps(driver, **bounds) == expected


def test_work_is_done_in_portions():
    """
    Each call counts from its beginning; without a bound all is done.
    """
    driver = make_driver(3, n_slots=2)
    runs = [run_steps(driver, max_tokens=5), run_steps(driver), run_steps(driver)]

    assert [(r.completed, r.tokens, r.why) for r in runs] == [
        (0, 6, "max_tokens"),
        (3, 6, "idle"),
        (0, 0, "idle"),
    ]


def test_requests_that_are_cancelled_are_completed():
    """
    Their end is told, and counted, before another step.
    """
    driver = make_driver(2)
    driver.cancel(0)
    driver.cancel(1)

    assert run_steps(driver, max_completed=2) == StepsRun(0, 2, 0, 0.0, "max_completed")


def test_work_that_cannot_be_planned_is_an_error():
    """
    It has the counts of when the requests were ended.
    """
    driver = make_driver(3, n_slots=1)
    object.__setattr__(driver.scheduler.limits, "n_batch", 0)  # no context is like that
    with pytest.raises(EngineStalled) as raised:
        run_steps(driver)

    assert counts(raised.value) == (1, 2, 1, 0, 512)
    assert run_steps(driver).why == "idle"


def test_work_that_waits_for_the_caller_is_an_error():
    """
    Nobody else brings the rows of an image; then it goes on.
    """
    driver = make_driver()
    request = make_request(0, spans=(Span(1, 3, 1),))
    request.tokens[1:3] = array("i", [-1, -1])
    driver.add([request], 0.0)
    with pytest.raises(EngineStalled) as raised:
        run_steps(driver, max_completed=1)
    driver.media_ready(0, 1)

    assert counts(raised.value) == (1, 0, 4, 1, 512)
    assert run_steps(driver, max_completed=1).why == "max_completed"
