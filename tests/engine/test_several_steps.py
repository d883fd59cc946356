"""Plans that are done for several steps at once, by the engine thread."""

from array import array

import pytest

from pyllama_raw.core.request import Delta
from pyllama_raw.testing import FakeExecutor, fake_limits
from tests.core.support import make_request
from tests.engine.support import PlainStream, make_thread


@pytest.mark.parametrize("eager", [True, False])
def test_of_several_steps_each_is_told_if_somebody_waits_for_tokens(
    loop, started, eager
):
    """
    A reader that is woken for every token gets it when its step is over.
    """
    executor = FakeExecutor(fake_limits())
    started(thread := make_thread(executor))
    stream = PlainStream(loop)
    stream.eager = eager

    thread.submit(make_request(0, max_tokens=20), stream)
    stream.read_to_end()

    several = [plan for plan in executor.plans if plan.goes_on > 1]
    assert several
    assert {plan.each for plan in several} == {eager}


class Tells(FakeExecutor):
    """Does three steps of a plan, tells of each, and finds that there is no fourth."""

    def execute(self, plan):
        return self.tell(plan, 3 if plan.each else 1)

    def tell(self, plan, n_steps):
        result = super().execute(plan)
        if not plan.each:
            return result
        pairs = zip(plan.chunks, result.tokens, strict=True)
        following = plan._replace(
            operations=(),
            chunks=tuple(
                chunk._replace(pos=chunk.pos + 1, tokens=array("i", [token]))
                for chunk, token in pairs
            ),
        )
        if n_steps == 1:
            return result._replace(rest=lambda: None)
        return result._replace(rest=lambda: self.tell(following, n_steps - 1))


def test_steps_of_one_plan_are_delivered_one_by_one(loop, started):
    """
    A wake-up for each token, and the tokens are those of single steps.
    """
    found = []
    for executor in (FakeExecutor(fake_limits()), Tells(fake_limits())):
        started(thread := make_thread(executor))
        stream = PlainStream(loop)
        thread.submit(make_request(0, max_tokens=20), stream)
        found.append([e for e in stream.read_to_end() if isinstance(e, Delta)])

    one_by_one, told = found
    assert [len(delta.tokens) for delta in told] == [1] * 20
    assert told == one_by_one
    assert any(plan.each for plan in executor.plans)


class Logs(FakeExecutor):
    """Notes when it is told to hurry and not to."""

    def __init__(self) -> None:
        super().__init__(fake_limits())
        self.log = []

    def interrupt(self) -> None:
        self.log.append("interrupt")

    def resume(self) -> None:
        self.log.append("resume")


def test_commands_interrupt_several_steps(loop, started):
    """
    A command ends a run of steps, and the next one begins when it was obeyed.
    """
    executor = Logs()
    started(thread := make_thread(executor))
    stream = PlainStream(loop)

    thread.submit(make_request(0, max_tokens=9), stream)
    stream.read_to_end()

    assert "interrupt" in executor.log
    assert executor.log[-1] == "resume"
