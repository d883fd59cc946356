"""What the engine thread takes at once."""

from threading import Thread
from time import monotonic

from pyllama_raw.engine import mailbox as module
from pyllama_raw.engine.mailbox import BURST_S, LINGER_S, Cancel, Mailbox


def test_burst_lasts_while_a_command_is_coming(monkeypatch):
    """
    A command that is announced is taken together with the one before, however late.
    """
    monkeypatch.setattr(module, "BURST_S", 60)
    mailbox, taken = Mailbox(8, monotonic), []
    taker = Thread(target=lambda: taken.extend(mailbox.take(None)))
    with mailbox.coming():
        mailbox.post(Cancel(1))
        taker.start()
        taker.join(4 * LINGER_S)
        assert taker.is_alive()
        mailbox.post(Cancel(2))
    taker.join()

    assert taken == [Cancel(1), Cancel(2)]


def test_announced_command_that_fails_ends_the_wait():
    """
    What was announced and did not come is not waited for.
    """
    mailbox = Mailbox(8, monotonic)
    with mailbox.coming():
        mailbox.post(Cancel(1))

    assert list(mailbox.take(None)) == [Cancel(1)]


def test_burst_that_is_large_enough_is_not_waited_for(monkeypatch):
    """
    Where all slots can be filled nobody waits for more, however near that is.
    """
    monkeypatch.setattr(module, "LINGER_S", 60)
    mailbox = Mailbox(2, monotonic)
    with mailbox.coming():
        mailbox.post(Cancel(1))
        mailbox.post(Cancel(2))

        assert list(mailbox.take(None)) == [Cancel(1), Cancel(2)]


def test_a_burst_that_does_not_end_is_waited_for_until_its_time_is_over():
    """
    However long a command that is announced takes to come.
    """
    clock = iter([0.0, BURST_S / 2, 2 * BURST_S]).__next__
    mailbox = Mailbox(8, clock)
    with mailbox.coming():
        mailbox.post(Cancel(1))

        assert list(mailbox.take(None)) == [Cancel(1)]
