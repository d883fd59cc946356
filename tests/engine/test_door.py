"""Who is let in, what is known of them, and what is left when they have gone."""

import pytest

from pyllama_raw.core.request import Lot
from pyllama_raw.engine.adapters import Adapters
from pyllama_raw.engine.requests import Admission, Door
from pyllama_raw.errors import AdapterNotFound, QueueFull
from tests.core.support import make_request
from tests.engine.support import PlainLoop, PlainStream


@pytest.fixture
def door():
    return Door(Admission(1, max_waiting=2, max_waiting_tokens=20), Adapters())


def enter(door, *request_ids, now=0.0, **options):
    requests = tuple(make_request(i, **options) for i in request_ids)
    return door.enter(requests, PlainStream(PlainLoop()), now)


def test_moments_of_requests_are_known_until_they_have_ended(door):
    """
    A request waits from its submission on, and anew when it loses its slot.
    """
    (first,) = enter(door, 1, now=1.0)
    (second,) = enter(door, 2, now=2.0)
    moments = []

    def note():
        moments.append((door.records.oldest, door.records.oldest_wait))

    note()
    for change, request_id, now in [
        ("running", 1, 3.0),
        ("running", 2, 4.0),
        ("preempted", 1, 5.0),
        ("running", 9, 6.0),
    ]:
        door.changed(change, request_id, now)
        note()
    for opened in (first, first, second):
        door.leave(opened)
        note()

    assert moments == [
        (1.0, 1.0),
        (1.0, 2.0),
        (1.0, None),
        (1.0, 5.0),
        (1.0, 5.0),
        (2.0, None),
        (2.0, None),
        (None, None),
    ]


def test_the_prompt_that_gets_a_slot_makes_room_for_another(door):
    """
    Whichever the policy chooses, and although it was not the first to come.
    """
    enter(door, 1)
    enter(door, 2, n_prompt=4)
    (chosen,) = enter(door, 3, n_prompt=16)
    with pytest.raises(QueueFull):
        enter(door, 4)

    door.leave(door.records[1])
    door.changed("running", 3, 1.0)

    assert enter(door, 4, n_prompt=16)
    assert list(door.records) == [2, 3, 4]
    assert chosen.waits_since is None


def test_a_group_that_is_refused_leaves_nothing(door):
    """
    For want of room, or of an adapter.
    """
    enter(door, 1)
    with pytest.raises(QueueFull):
        enter(door, 2, 3, 4)
    with pytest.raises(AdapterNotFound):
        enter(door, 2, lot=Lot(adapters=((7, 1.0),)))

    assert list(door.records) == [1]
    assert door._admission.n_open == 1


def test_each_stream_is_taken_once(door):
    """
    A group has one; after that nobody is open.
    """
    group = enter(door, 1, 2)
    alone = enter(door, 3)

    assert door.take_streams() == {group[0].stream, alone[0].stream}
    assert door.take_streams() == set()
