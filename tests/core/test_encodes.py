"""Encodes take turns, are done once for all, and their rows are kept within a limit."""

from array import array

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
)

from pyllama_raw.core.encodes import Encodes, RowKey, RowNeed
from pyllama_raw.errors import InvalidRequest, QueueFull

N_BYTES = 40  # of the rows of an encode


def wanted(*names: str, salt: str | None = None) -> tuple[RowNeed, ...]:
    return tuple(RowNeed(RowKey(name.encode(), salt), N_BYTES) for name in names)


def rows(value: float = 0.0) -> array:
    return array("f", [value] * (N_BYTES // 4))


def make(max_bytes: int = 10**6, max_kept_bytes: int = 10**6) -> Encodes:
    return Encodes(max_bytes, max_kept_bytes)


def add(encodes: Encodes, request_id: int, *items: RowNeed) -> bool:
    """Whether all of them are there."""
    encodes.add(request_id, items)
    return encodes.is_done(request_id)


def test_requests_take_turns():
    """
    A request with one image waits for one image of another request, not for all of them.
    """
    encodes = make()
    add(encodes, 1, *wanted("a", "b", "c"))
    add(encodes, 2, *wanted("d"))

    begun = []
    while (turn := encodes.begin()) is not None:
        begun.append(turn)
        encodes.done(rows())

    assert begun == [(1, 0), (2, 0), (1, 1), (1, 2)]


def test_equal_keys_are_encoded_once():
    """
    Within a prompt, for requests at the same time, and for one that comes later.
    """
    encodes = make()
    told = [add(encodes, 1, *wanted("a", "a")), add(encodes, 2, *wanted("a", "b"))]

    encodes.begin()
    told.append(encodes.done(rows()))
    told.append(add(encodes, 3, *wanted("a")))

    assert told == [False, False, [1], True]
    assert (encodes.n_encoded, encodes.n_shared) == (1, 2)
    assert encodes.begin() == (2, 1)


def test_a_request_is_told_of_when_all_its_rows_are_there():
    """
    Whichever of them comes last.
    """
    encodes = make()
    add(encodes, 1, *wanted("b"))
    encodes.begin()
    add(encodes, 2, *wanted("a", "b"))

    told = [encodes.done(rows())]
    encodes.begin()
    told.append(encodes.done(rows()))

    assert told == [[1], [2]]


def test_rows_go_until_the_others_are_within_the_limit():
    """
    Also several at once, when a request with several ends.
    """
    encodes = make(max_kept_bytes=N_BYTES)
    add(encodes, 1, *wanted("a", "b", "c"))
    for _ in range(3):
        encodes.begin()
        encodes.done(rows())

    encodes.leave(1)

    assert encodes.n_kept_bytes == N_BYTES


def test_rows_of_open_requests_stay_and_others_go_by_last_use():
    """
    The limit of what is kept is for rows that nobody has any more.
    """
    encodes = make(max_kept_bytes=2 * N_BYTES)
    for request_id, name in enumerate("abc"):
        add(encodes, request_id, *wanted(name))
        encodes.begin()
        encodes.done(rows(request_id))
    n_pinned = encodes.n_kept_bytes

    for request_id in (1, 0, 2):
        encodes.leave(request_id)
    kept = [add(encodes, 9 + i, *wanted(name)) for i, name in enumerate("abc")]

    assert n_pinned == 3 * N_BYTES
    assert encodes.n_kept_bytes == 2 * N_BYTES
    assert kept == [True, False, True]
    assert encodes.rows(RowKey(b"c")) == rows(2)


def test_bytes_of_open_requests_are_limited():
    """
    What requests have in common counts once; a request that no engine takes is told so.
    """
    encodes = make(max_bytes=2 * N_BYTES)
    add(encodes, 1, *wanted("a", "b"))
    add(encodes, 2, *wanted("b", "a"))

    with pytest.raises(QueueFull, match="max_open_bytes"):
        add(encodes, 3, *wanted("c"))
    with pytest.raises(InvalidRequest, match="120 bytes"):
        add(encodes, 4, *wanted("a", "b", "c"))

    encodes.leave(1)
    encodes.leave(2)
    assert not add(encodes, 3, *wanted("c"))
    assert encodes.n_bytes == N_BYTES


def test_a_failed_encode_fails_all_who_want_it():
    """
    They hold nothing any more; others go on, and a later request tries again.
    """
    encodes = make()
    add(encodes, 1, *wanted("a"))
    add(encodes, 2, *wanted("b", "a"))
    add(encodes, 3, *wanted("b"))
    encodes.begin()

    failed = encodes.fail()

    assert failed == [2, 1]
    assert encodes.n_bytes == N_BYTES
    assert encodes.begin() == (3, 0)
    encodes.done(rows())
    add(encodes, 4, *wanted("a"))
    assert encodes.begin() == (4, 0)


def test_an_encode_ends_with_the_last_who_wants_it():
    """
    The first of two who leave does not end the encode of both.
    """
    encodes = make()
    add(encodes, 1, *wanted("a"))
    add(encodes, 2, *wanted("a"))
    encodes.begin()

    told = [encodes.leave(1), encodes.leave(2), encodes.leave(2)]
    encodes.drop()

    assert told == [False, True, True]
    assert encodes.begin() is None
    assert (encodes.n_bytes, encodes.n_kept_bytes) == (0, 0)


def test_rows_that_come_after_the_last_request_has_left_are_not_kept():
    """
    The encode was cancelled too late.
    """
    encodes = make()
    add(encodes, 1, *wanted("a"))
    encodes.begin()
    encodes.leave(1)

    told = encodes.done(rows())

    assert (told, encodes.n_kept_bytes) == ([], 0)


def test_rows_are_of_their_namespace():
    """
    Equal images of two salts are encoded for each, and go with the salt alone; those of an
    open request when it ends.
    """
    encodes = make()
    for request_id, salt in enumerate(["x", "y", "x"]):
        add(encodes, request_id, *wanted("a" if request_id < 2 else "b", salt=salt))
        encodes.begin()
        encodes.done(rows())
    encodes.leave(0)
    encodes.leave(1)

    freed = [encodes.clear("x"), encodes.clear("z")]
    left = [encodes.n_kept_bytes]
    encodes.leave(2)
    left.append(encodes.n_kept_bytes)

    assert (freed, left) == ([N_BYTES, 0], [2 * N_BYTES, N_BYTES])
    assert encodes.n_encoded == 3


NAMES = st.sampled_from("abcdefgh")
SALTS = st.sampled_from(["x", "y", None])


class AnyHistory(RuleBasedStateMachine):
    """
    Whatever comes, leaves, fails and is cancelled: bytes add up, rows are never another's.
    """

    def __init__(self) -> None:
        super().__init__()
        self.encodes = make(12 * N_BYTES, 5 * N_BYTES)
        self.open: set[int] = set()
        self.n_requests = 0

    @rule(names=st.lists(NAMES, min_size=1, max_size=4), salt=SALTS)
    def add(self, names: list[str], salt: str | None) -> None:
        self.n_requests += 1
        try:
            self.encodes.add(self.n_requests, wanted(*names, salt=salt))
        except QueueFull:
            return
        self.open.add(self.n_requests)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        request_id = data.draw(st.sampled_from(sorted(self.open)))
        self.open.remove(request_id)
        if self.encodes.leave(request_id):
            self.encodes.drop()

    @precondition(lambda self: self.encodes.running is None)
    @rule()
    def begin(self) -> None:
        turn = self.encodes.begin()
        assert turn is None or turn[0] in self.open

    @precondition(lambda self: self.encodes.running is not None)
    @rule()
    def done(self) -> None:
        ready = self.encodes.done(rows(self.encodes.running.digest[0]))
        assert set(ready) <= self.open

    @precondition(lambda self: self.encodes.running is not None)
    @rule()
    def fail(self) -> None:
        failed = set(self.encodes.fail())
        assert failed <= self.open
        self.open -= failed

    @rule(salt=SALTS)
    def clear(self, salt: str | None) -> None:
        n_before = self.encodes.n_kept_bytes
        n_freed = self.encodes.clear(salt)
        assert n_freed == n_before - self.encodes.n_kept_bytes

    @invariant()
    def books_are_kept(self) -> None:
        self.encodes.check_integrity()
        for key, found in self.encodes._rows.items():
            assert found == rows(key.digest[0])

    def teardown(self) -> None:
        for request_id in self.open:
            self.encodes.leave(request_id)
        assert self.encodes.n_bytes == 0
        assert self.encodes.n_kept_bytes <= 5 * N_BYTES


TestAnyHistory = AnyHistory.TestCase
