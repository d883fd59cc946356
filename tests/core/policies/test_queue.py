"""The waiting queue of a policy by itself."""

from itertools import count

from pyllama_raw.core.policies.queue import N_FIRST, PolicyQueue
from pyllama_raw.core.sequence import Sequence
from tests.core.support import make_request


def filled(keys, n):
    queue = PolicyQueue(keys, max_overtakes=16)
    sequences = [Sequence(make_request(i, client="a"), i, 0.0) for i in range(n)]
    for sequence in sequences:
        queue.push(sequence)
    return queue, sequences


def test_only_the_first_of_a_client_is_offered():
    """
    Who leaves from the middle of a client's requests does not change that.
    """
    queue, sequences = filled("by_client", 3)
    queue.remove(sequences[1])

    assert list(queue.candidates(lambda _: (0,))) == [sequences[0]]
    queue.check_integrity()


def test_keys_that_always_change_take_no_more_memory():
    """
    Keys that are not valid any more are forgotten in time.
    """
    queue, _ = filled("changing", 200)
    numbers = count(0, -1)

    for _ in range(200):
        next(queue.candidates(lambda _: (next(numbers),)))
        queue.check_integrity()

    assert len(queue._heap) <= 2 * 200 + N_FIRST


def test_who_leaves_unasked_takes_no_more_memory():
    """
    While no slot is free nobody is asked, however many come and go.
    """
    queue, _ = filled("fixed", 2)

    for i in range(2, 1000):
        queue.push(late := Sequence(make_request(i), i, 0.0))
        queue.remove(late)
    queue.check_integrity()

    assert len(queue._unasked) <= 2 * 3 + N_FIRST + 1


def test_who_has_left_takes_no_turn():
    """
    Turns of those that left are forgotten in time; the others keep theirs.
    """
    queue, sequences = filled("changing", 200)
    next(queue.candidates(lambda _: (0,)))
    for sequence in sequences[10:]:
        queue.remove(sequence)
    next(queue.candidates(lambda _: (0,)))
    queue.check_integrity()

    assert set(queue._ring) == set(sequences[:10])
