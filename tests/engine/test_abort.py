"""When a running step may be aborted."""

from array import array

from pyllama_raw.core.step import Decode
from pyllama_raw.engine.abort import AbortGate
from pyllama_raw.testing import FakeFlag


def works(*request_ids: int) -> list[Decode]:
    return [Decode(i, i, 0, array("i", [7])) for i in request_ids]


def make_gate() -> tuple[AbortGate, FakeFlag]:
    flag = FakeFlag()
    return AbortGate(flag), flag


def test_the_last_cancellation_aborts():
    """
    The flag is set when nobody in the step is left.
    """
    gate, flag = make_gate()
    gate.enter(works(1, 2))

    gate.cancel(1)
    after_one = flag.is_set
    gate.cancel(2)

    assert (after_one, flag.is_set) == (False, True)


def test_a_cancellation_between_steps_sets_nothing():
    """
    Outside a step there is nothing to abort; the next step of others runs.
    """
    gate, flag = make_gate()
    gate.enter(works(1))
    gate.leave()

    gate.cancel(1)
    gate.enter(works(2))

    assert not flag.is_set


def test_a_step_of_requests_already_cancelled_is_aborted():
    """
    The scheduler may plan a request whose cancellation is still in the mailbox.
    """
    gate, flag = make_gate()
    gate.cancel(1)

    gate.enter(works(1))
    at_first = flag.is_set
    gate.leave()
    gate.settle(1)
    gate.enter(works(1))

    assert (at_first, flag.is_set) == (True, False)


def test_leaving_clears_the_flag():
    """
    An abort meant for one step does not reach the next.
    """
    gate, flag = make_gate()
    gate.enter(works(1))
    gate.cancel(1)

    gate.leave()

    assert not flag.is_set


def test_closing_aborts_this_step_and_the_next():
    """
    A closing engine computes nothing more, whoever wants it.
    """
    gate, flag = make_gate()
    gate.enter(works(1))
    gate.close()
    now = flag.is_set
    gate.leave()

    gate.enter(works(1))

    assert (now, flag.is_set) == (True, True)
