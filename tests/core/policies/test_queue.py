"""The waiting queue of a policy by itself."""

from pyllama_raw.core.policy_runner import PolicyQueue
from pyllama_raw.core.sequence import Sequence
from tests.core.support import make_request


def filled(keys, n, ask=lambda _: (0,)):
    queue = PolicyQueue(keys, 16, ask)
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

    assert list(queue.candidates()) == [sequences[0]]
    queue.check_integrity()


def test_nothing_is_kept_of_who_left():
    """
    Neither a key nor a turn, whether it was asked for or not.
    """
    queue, sequences = filled("changing", 200)
    next(queue.candidates())
    for sequence in sequences[10:]:
        queue.remove(sequence)
    queue.check_integrity()

    assert [*queue._keys] == sequences[:10]


def test_a_request_that_is_not_the_first_of_its_client_any_more_has_no_key():
    """
    It is asked for again when it is the first one again.
    """
    asked = []
    queue, sequences = filled("by_client", 1, lambda s: asked.append(s) or (0,))
    next(queue.candidates())
    queue.push(urgent := Sequence(make_request(1, client="a", priority=-1), 1, 0.0))
    next(queue.candidates())
    queue.remove(urgent)
    next(queue.candidates())

    assert asked == [sequences[0], urgent, sequences[0]]
