"""What the engine thread takes at once."""

from dataclasses import dataclass
from threading import Thread
from time import monotonic

from pyllama_raw.engine import mailbox as module
from pyllama_raw.engine.mailbox import BURST_S, LINGER_S, Mailbox
from tests.engine.support import HANG_S

N_WAITS = 20_000


@dataclass(frozen=True)
class Numbered:
    """A command that is told from others by a number."""

    number: int

    def __call__(self) -> None:
        """There is nothing to do."""


def test_burst_lasts_while_a_command_is_coming(monkeypatch):
    """
    A command that is announced is taken together with the one before, however late.
    """
    monkeypatch.setattr(module, "BURST_S", 60)
    mailbox, taken = Mailbox(8, monotonic), []
    taker = Thread(target=lambda: taken.extend(mailbox.take(None)))
    with mailbox.coming():
        mailbox.post(Numbered(1))
        taker.start()
        taker.join(4 * LINGER_S)
        assert taker.is_alive()
        mailbox.post(Numbered(2))
    taker.join()

    assert taken == [Numbered(1), Numbered(2)]


def test_announced_command_that_fails_ends_the_wait():
    """
    What was announced and did not come is not waited for.
    """
    mailbox = Mailbox(8, monotonic)
    with mailbox.coming():
        mailbox.post(Numbered(1))

    assert list(mailbox.take(None)) == [Numbered(1)]


def test_burst_that_is_large_enough_is_not_waited_for(monkeypatch):
    """
    Where all slots can be filled nobody waits for more, however near that is.
    """
    monkeypatch.setattr(module, "LINGER_S", 60)
    mailbox = Mailbox(2, monotonic)
    with mailbox.coming():
        mailbox.post(Numbered(1))
        mailbox.post(Numbered(2))

        assert list(mailbox.take(None)) == [Numbered(1), Numbered(2)]


def test_a_burst_that_does_not_end_is_waited_for_until_its_time_is_over():
    """
    However long a command that is announced takes to come.
    """
    clock = iter([0.0, BURST_S / 2, 2 * BURST_S]).__next__
    mailbox = Mailbox(8, clock)
    with mailbox.coming():
        mailbox.post(Numbered(1))

        assert list(mailbox.take(None)) == [Numbered(1)]


def test_a_command_is_taken_though_no_other_one_comes(monkeypatch):
    """
    The wait for the rest of a burst ends, also if its time is over before it begins.
    """
    monkeypatch.setattr(module, "LINGER_S", 1e-6)
    mailbox, taken = Mailbox(8, monotonic), []

    def take_all() -> None:
        for number in range(N_WAITS):
            mailbox.post(Numbered(number))
            commands = mailbox.take(None)
            taken.extend(command.number for command in commands)
            commands.clear()

    reader = Thread(target=take_all, daemon=True)
    reader.start()
    reader.join(HANG_S)

    assert taken == list(range(N_WAITS))


def test_what_was_told_before_is_not_taken_for_news():
    """
    A mailbox that was emptied without a wait is waited at for the next command.
    """
    mailbox = Mailbox(1, monotonic)
    mailbox.post(Numbered(1))
    mailbox.take().clear()
    poster = Thread(target=mailbox.post, args=[Numbered(2)])
    poster.start()
    taken = list(mailbox.take(None))
    poster.join()

    assert taken == [Numbered(2)]


def test_nothing_posted_is_lost_between_threads():
    """
    Each of many writers has all its commands taken, in its order.
    """
    n_each, writers = 2000, range(3)
    mailbox, taken = Mailbox(1, monotonic), []

    def read() -> None:
        while len(taken) < n_each * len(writers):
            commands = mailbox.take(None)
            taken.extend(command.number for command in commands)
            commands.clear()

    def write(writer: int) -> None:
        for number in range(n_each):
            mailbox.post(Numbered(writer * n_each + number))

    reader = Thread(target=read, daemon=True)
    threads = [reader, *(Thread(target=write, args=[w]) for w in writers)]
    for thread in threads:
        thread.start()
    reader.join(HANG_S)

    assert sorted(taken) == list(range(n_each * len(writers)))
    for writer in writers:
        own = [number for number in taken if number // n_each == writer]
        assert own == sorted(own)
