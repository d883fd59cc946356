"""When a running step may be aborted."""

from array import array
from threading import Thread

from pyllama_raw.core.step import Decode
from pyllama_raw.engine.mailbox import AbortGate
from pyllama_raw.testing import FakeFlag
from tests.engine.support import HANG_S


def works(*request_ids: int) -> list[Decode]:
    return [Decode(i, i, 0, array("i", [7])) for i in request_ids]


def make_gate() -> tuple[AbortGate, FakeFlag]:
    flag = FakeFlag()
    return AbortGate(), flag


def test_the_last_stop_aborts():
    """
    The flag is set when nobody in the step is left, and cleared with the step.
    """
    gate, flag = make_gate()
    gate.enter(works(1, 2), flag)
    gate.stop(1)
    after_one = flag.is_set
    gate.stop(2)
    after_two = flag.is_set
    gate.leave()

    assert (after_one, after_two, flag.is_set) == (False, True, False)


def test_a_stop_between_steps_is_about_its_request():
    """
    The next step of others runs; one that has only this request does not.
    """
    found = []
    for number in (1, 2):
        gate, flag = make_gate()
        gate.stop(1)
        gate.enter(works(number), flag)
        found.append(flag.is_set)

    assert found == [True, False]


def test_a_stop_is_over_with_the_step():
    """
    By then the scheduler knows, and plans the request again only if it is wanted.
    """
    gate, flag = make_gate()
    gate.enter(works(1, 2), flag)
    gate.stop(1)
    gate.leave()

    gate.enter(works(1), flag)

    assert not flag.is_set


def test_a_stop_of_all_aborts_this_step_and_the_next():
    """
    A closing engine computes nothing more, whoever wants it.
    """
    gate, flag = make_gate()
    gate.enter(works(1), flag)
    gate.stop()
    now = flag.is_set
    gate.leave()

    gate.enter(works(1), flag)

    assert (now, flag.is_set) == (True, True)


def test_memory_is_moved_whoever_wants_it():
    """
    A step without works has nothing to abort.
    """
    gate, flag = make_gate()
    gate.stop()

    gate.enter((), flag)

    assert not flag.is_set


def test_a_stop_aborts_the_context_that_computes():
    """
    Steps of several contexts have a gate: the flag of the running one is set.
    """
    gate, flag = make_gate()
    gate.enter(works(1), flag)
    gate.leave()
    other = FakeFlag()
    gate.enter(works(2), other)

    gate.stop(2)
    during = (flag.is_set, other.is_set)
    gate.leave()

    assert (during, other.is_set) == ((False, True), False)


def test_a_finaliser_can_stop_all_while_the_lock_is_held():
    """
    The garbage collector may end an engine in its own thread, anywhere.
    """
    gate = AbortGate()

    class Interrupted(FakeFlag):
        def set(self) -> None:
            if not self.is_set:
                super().set()
                gate.stop()

    flag = Interrupted()
    gate.enter(works(1), flag)
    thread = Thread(target=gate.stop, args=(1,), daemon=True)
    thread.start()
    thread.join(HANG_S)

    assert (thread.is_alive(), flag.is_set) == (False, True)
