"""What others use of the machine, from counters that the test sets."""

import pytest

from pyllama_raw.options import host
from pyllama_raw.options.host import Others, busy_s


class Counters:
    """Seconds so far: of the machine, of this process, and on the wall."""

    def __init__(self, *steps: tuple[float, float, float]) -> None:
        self.steps, self.now = list(steps), [0.0, 0.0, 0.0]

    def others(self) -> Others:
        return Others(*(lambda i=i: self.now[i] for i in range(3)))

    def step(self) -> None:
        self.now = [a + b for a, b in zip(self.now, self.steps.pop(0), strict=True)]


@pytest.mark.parametrize(
    ("steps", "cpus"),
    [
        ([(2.0, 2.0, 1.0)], 0.0),  # all of it is our own
        ([(2.0, 1.0, 1.0), (1.0, 1.0, 1.0)], 0.5),  # the mean over both
        ([(0.9, 1.0, 1.0)], 0.0),  # counters have ticks: never below 0
        ([], None),
    ],
)
def test_others_are_what_is_busy_and_not_our_own(steps, cpus):
    """
    Seconds of others by seconds of the wall, over all that was watched.
    """
    counters = Counters(*steps)
    load = counters.others()

    while counters.steps:
        with load.watched():
            counters.step()

    assert load.cpus == cpus


def test_a_machine_that_does_not_tell_is_not_called_quiet(monkeypatch, tmp_path):
    """
    Without its counters there is no figure.
    """
    monkeypatch.setattr(host, "STAT", tmp_path / "none")
    load = Others()

    with load.watched():
        pass

    assert (busy_s(), load.cpus) == (None, None)


def test_idle_waiting_and_guests_are_not_busy(monkeypatch, tmp_path):
    """
    Linux counts guests in user, too; interrupts and what is stolen are work of others.
    """
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 200 300 4000 5000 10 20 30 40 50\ncpu0 1 2 3\n")
    monkeypatch.setattr(host, "STAT", stat)
    monkeypatch.setattr(host.os, "sysconf", lambda name: 10)

    assert busy_s() == 66.0
