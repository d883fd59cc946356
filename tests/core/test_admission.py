"""How many requests an engine takes on."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyllama_raw.core.scheduling.admission import Admission
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
    assert (refusal.knob, refusal.value, refusal.limit) == (
        "max_waiting",
        max_waiting + 1,
        max_waiting,
    )
    assert admission.max_requests == 8 + max_waiting


def test_only_prompts_that_wait_count_in_tokens():
    """
    The prompts of requests with a slot are nothing to the limit of waiting tokens.
    """
    admission = Admission(2, max_waiting_tokens=10)
    for request_id in (0, 1):
        admission.enter([make_request(request_id, n_prompt=50)])
    admission.enter([make_request(2, n_prompt=6)])

    with pytest.raises(QueueFull) as caught:
        admission.enter([make_request(3, n_prompt=5)])

    refusal = caught.value
    assert (refusal.knob, refusal.value, refusal.limit) == (
        "max_waiting_tokens",
        11,
        10,
    )


def test_a_request_that_ends_makes_room():
    """
    The best of those that wait gets the slot, and its tokens wait no more.
    """
    admission = Admission(1, max_waiting=2, max_waiting_tokens=10)
    admission.enter([make_request(0)])
    admission.enter([make_request(1, n_prompt=3)])
    admission.enter([make_request(2, n_prompt=7, priority=-1)])

    admission.leave(0)

    assert admission.n_tokens == 3
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
    admission.check_integrity()

    with pytest.raises(QueueFull):
        admission.enter([make_request(5)])


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
    """What Admission promises, by lists that are sorted anew each time."""

    def __init__(self, n_slots, max_waiting, max_waiting_tokens):
        self.n_slots = n_slots
        self.max_waiting, self.max_waiting_tokens = max_waiting, max_waiting_tokens
        self.seated, self.waiting = [], []

    def takes(self, group):
        late = group[max(self.n_slots - len(self.seated), 0) :]
        waiting = self.waiting + late
        return not late or (
            len(waiting) <= self.max_waiting
            and sum(r.n_prompt for r in waiting) <= self.max_waiting_tokens
        )

    def enter(self, group):
        n_seats = self.n_slots - len(self.seated)
        self.seated += group[:n_seats]
        self.waiting += group[n_seats:]

    def leave(self, request_id):
        self.seated = [r for r in self.seated if r.request_id != request_id]
        self.waiting = [r for r in self.waiting if r.request_id != request_id]
        if self.waiting and len(self.seated) < self.n_slots:
            best = min(self.waiting, key=lambda r: r.priority)  # the first of equals
            self.waiting.remove(best)
            self.seated.append(best)


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    n_slots=st.integers(1, 3),
    max_waiting=st.integers(0, 3),
    max_tokens=st.integers(0, 12),
    history=st.lists(
        st.tuples(st.integers(1, 3), st.integers(1, 6), st.integers(-1, 1))
        | st.integers(0, 20),
        max_size=30,
    ),
)
def test_admission_is_what_sorted_lists_say(n_slots, max_waiting, max_tokens, history):
    """
    Groups that enter and requests that leave, in any order, known or not.
    """
    admission = Admission(n_slots, max_waiting, max_tokens)
    simple = Simple(n_slots, max_waiting, max_tokens)
    n_entered = 0
    for item in history:
        if isinstance(item, int):
            admission.leave(item)
            simple.leave(item)
        else:
            n, n_prompt, priority = item
            ids = range(n_entered, n_entered + n)
            group = [make_request(i, n_prompt, priority=priority) for i in ids]
            taken = True
            try:
                admission.enter(group)
            except (QueueFull, InvalidRequest):
                taken = False
            assert taken == simple.takes(group)
            if taken:
                simple.enter(group)
                n_entered += n
        admission.check_integrity()
        assert admission.n_tokens == sum(r.n_prompt for r in simple.waiting)


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


def test_a_request_may_leave_while_it_waits():
    """
    A waiting request that ends frees its place in the queue; an unknown one changes nothing.
    """
    admission = Admission(1, max_waiting=1)
    admission.enter([make_request(0)])
    admission.enter([make_request(1, n_prompt=3)])

    admission.leave(1)
    admission.leave(99)

    assert admission.n_tokens == 0
    admission.enter([make_request(2)])
    admission.check_integrity()
