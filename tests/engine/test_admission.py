"""How many requests an engine takes on."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyllama_raw.engine.requests import Admission
from pyllama_raw.errors import InvalidRequest, QueueFull
from tests.core.support import make_request, make_scheduler


@pytest.mark.parametrize("max_waiting", [0, 2])
def test_what_free_slots_take_does_not_wait(max_waiting):
    """
    An idle engine takes a request for each slot, whatever may wait, and then so many.
    """
    admission = Admission(8, max_waiting)
    for request_id in range(8 + max_waiting):
        admission.enter([make_request(request_id)])

    with pytest.raises(QueueFull) as caught:
        admission.enter([make_request(99)])

    refusal = caught.value
    told = (refusal.knob, refusal.value, refusal.limit)
    assert told == ("max_waiting", max_waiting + 1, max_waiting)
    assert admission.max_requests == 8 + max_waiting


def test_only_prompts_that_wait_count_in_tokens():
    """
    Prompts that found a slot free are nothing to the limit of waiting tokens.
    """
    admission = Admission(2, max_waiting_tokens=10)
    for request_id in (0, 1):
        admission.enter([make_request(request_id, n_prompt=50)])
    admission.enter([make_request(2, n_prompt=6)])

    with pytest.raises(QueueFull) as caught:
        admission.enter([make_request(3, n_prompt=5)])

    refusal = caught.value
    told = (refusal.knob, refusal.value, refusal.limit)
    assert told == ("max_waiting_tokens", 11, 10)


def test_a_prompt_waits_until_its_own_request_has_a_slot():
    """
    Whichever request the policy admits next: its tokens are those that count no more.
    """
    admission = Admission(1, max_waiting=2, max_waiting_tokens=10)
    (first,) = admission.enter([make_request(0)])
    (urgent,) = admission.enter([make_request(1, n_prompt=3, priority=-1)])
    (other,) = admission.enter([make_request(2, n_prompt=7)])

    admission.leave(first)
    left = admission.n_tokens
    admission.seat(other)

    assert (left, admission.n_tokens, urgent.n_tokens) == (10, 3, 3)
    admission.enter([make_request(3, n_prompt=7)])


def test_outputs_of_one_prompt_enter_together_or_not_at_all():
    """
    A group that finds no room now is refused as a whole; alone it would fit.
    """
    admission = Admission(2, max_waiting=2)
    admission.enter([make_request(0)])

    with pytest.raises(QueueFull):
        admission.enter([make_request(i) for i in (1, 2, 3, 4)])
    admission.enter([make_request(i) for i in (1, 2, 3)])

    with pytest.raises(QueueFull):
        admission.enter([make_request(5)])
    assert admission.n_open == 4


@pytest.mark.parametrize(
    ("limits", "n_most"),
    [
        ({"max_waiting": 3}, 5),
        ({"max_waiting": 0}, 2),
        ({"max_waiting": 9, "max_waiting_tokens": 11}, 4),
    ],
)
def test_outputs_that_never_fit_are_no_matter_of_time(limits, n_most):
    """
    More than slots and queue hold is wrong of the request, and the error has the number.
    """
    admission = Admission(2, **limits)

    with pytest.raises(InvalidRequest, match=f"at most {n_most} outputs"):
        admission.enter([make_request(i) for i in range(n_most + 1)])

    admission.enter([make_request(i) for i in range(n_most)])


class Simple:
    """What Admission promises, by a list of those that are open."""

    def __init__(self, n_slots, max_waiting, max_waiting_tokens):
        self.n_slots = n_slots
        self.max_waiting, self.max_waiting_tokens = max_waiting, max_waiting_tokens
        self.opened = []  # ticket, and the tokens that count

    @property
    def n_tokens(self):
        return sum(n for _, n in self.opened)

    def counted(self, group):
        n_free = max(self.n_slots - len(self.opened), 0)
        return [r.n_prompt * (i >= n_free) for i, r in enumerate(group)]

    def takes(self, group):
        n_open = len(self.opened) + len(group)
        if n_open <= self.n_slots:
            return True
        n_tokens = self.n_tokens + sum(self.counted(group))
        return (
            n_open - self.n_slots <= self.max_waiting
            and n_tokens <= self.max_waiting_tokens
        )


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    n_slots=st.integers(1, 3),
    max_waiting=st.integers(0, 3),
    max_tokens=st.integers(0, 12),
    history=st.lists(
        st.tuples(st.just("enter"), st.integers(1, 3), st.integers(1, 6))
        | st.tuples(st.sampled_from(["seat", "leave"]), st.integers(0, 20)),
        max_size=30,
    ),
)
def test_admission_is_what_a_list_says(n_slots, max_waiting, max_tokens, history):
    """
    Requests enter in groups, get slots and leave, in any order, and more than once.
    """
    admission = Admission(n_slots, max_waiting, max_tokens)
    simple, tickets = Simple(n_slots, max_waiting, max_tokens), []
    for what, n, *n_prompt in history:
        if what == "enter":
            group = [make_request(i, *n_prompt) for i in range(n)]
            takes, counted = simple.takes(group), simple.counted(group)
            try:
                new = admission.enter(group)
            except (QueueFull, InvalidRequest):
                new = []
            assert bool(new) == takes
            tickets += new
            simple.opened += zip(new, counted, strict=False)
        elif n < len(tickets):
            ticket = tickets[n]
            getattr(admission, what)(ticket)
            kept = [(t, k) for t, k in simple.opened if t is not ticket]
            was_open = len(kept) < len(simple.opened)
            simple.opened = kept
            if what == "seat" and was_open:
                simple.opened.append((ticket, 0))
        assert admission.n_open == len(simple.opened)
        assert admission.n_tokens == simple.n_tokens


@pytest.mark.parametrize(
    "broken",
    [
        {"priority": float("nan")},
        {"priority": 1j},
        {"priority": "high"},
        {"deadline": float("nan")},
        {"deadline": "soon"},
        {"namespace": ["a"]},
        {"namespace": {"a": 1}},
        {"request_id": 0},
        {"request_id": 1},
    ],
)
def test_a_request_the_scheduler_cannot_bear_leaves_no_trace(broken):
    """
    A group with such a request raises, and the scheduler is as it was.
    """
    scheduler = make_scheduler()
    scheduler.add(make_request(0, deadline=9.0), 0.0)
    before = scheduler.stats()
    fields = {"request_id": 2} | broken

    with pytest.raises((AssertionError, TypeError)):
        scheduler.add_all([make_request(1), make_request(**fields)], 0.0)

    assert scheduler.stats() == before
    scheduler.check_integrity()
    assert not scheduler.cancel(1, 0.0)
