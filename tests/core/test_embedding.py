"""Which texts become vectors next."""

from pyllama_raw.core.request import FinishReason
from tests.core.embedding_support import (
    LAST,
    compute,
    ends_of,
    make_request,
    make_scheduler,
    run,
    shown,
)


def test_a_watcher_is_told_when_a_request_is_first_computed():
    """
    Once a request, however many steps its texts take.
    """
    scheduler, notes = make_scheduler(make_request(3, [8, 8])), []
    scheduler.watch(lambda *note: notes.append(note))

    for now in (1.0, 2.0):
        plan = scheduler.schedule(now)
        scheduler.apply(plan, compute(plan), now)

    assert notes == [("running", 3, 1.0)]


def test_texts_share_steps_in_their_order():
    """
    A step takes texts until one does not fit, and vectors come in the order of texts.
    """
    scheduler = make_scheduler(make_request(1, [4, 4, 4, 9]))

    steps, events = run(scheduler)

    assert steps == [[(1, 0, 4), (1, 1, 4)], [(1, 2, 4)], [(1, 3, 9)]]
    assert [event.index for event in events[:-1]] == [0, 1, 2, 3]
    assert ends_of(events) == {1: FinishReason.STOP}
    assert not scheduler.alive


def test_a_text_longer_than_a_step_goes_alone():
    """
    What may not be cut is computed at once, with nothing beside it.
    """
    scheduler = make_scheduler(make_request(1, [25, 2]))

    steps, _ = run(scheduler)

    assert steps == [[(1, 0, 25)], [(1, 1, 2)]]


def test_a_text_that_may_be_cut_goes_on_first():
    """
    Its runs follow each other in slot 0, and others fill the rest of its last step.
    """
    scheduler = make_scheduler(
        make_request(1, [25], may_cut=True), make_request(2, [3, 3], may_cut=True)
    )

    plans = []
    while plan := scheduler.schedule(0.0):
        plans.append(plan)
        scheduler.apply(plan, compute(plan), 1.0)

    assert [shown(plan) for plan in plans] == [
        [(1, 0, 10)],
        [(1, 0, 10)],
        [(1, 0, 5), (2, 0, 3)],
        [(2, 1, 3)],
    ]
    first = [(plan.works[0].pos, plan.works[0].is_last) for plan in plans[:3]]
    assert first == [(0, False), (10, False), (20, True)]


def test_requests_take_turns():
    """
    A request with one text is served beside one with many that came first.
    """
    scheduler = make_scheduler(make_request(1, [5] * 9), make_request(2, [5]))

    steps, _ = run(scheduler)

    assert steps[0] == [(1, 0, 5), (2, 0, 5)]
    assert steps[1] == [(1, 1, 5), (1, 2, 5)]


def test_who_was_not_served_is_first():
    """
    Of three requests, two of which fill a step, each is in one of two steps.
    """
    scheduler = make_scheduler(*(make_request(i, [5] * 4) for i in range(3)))

    steps, _ = run(scheduler)

    assert [{who for who, _, _ in step} for step in steps] == [
        {0, 1}, {2, 0}, {1, 2}, {0, 1}, {2, 0}, {1, 2},
    ]  # fmt: skip


def test_a_lower_priority_number_is_first():
    """
    Others fill what it leaves.
    """
    scheduler = make_scheduler(
        make_request(1, [5] * 3), make_request(2, [6, 6], priority=-1)
    )

    steps, _ = run(scheduler)

    assert steps == [[(2, 0, 6)], [(2, 1, 6)], [(1, 0, 5), (1, 1, 5)], [(1, 2, 5)]]


def test_lots_take_turns():
    """
    Texts that are pooled in another way are in steps of their own.
    """
    scheduler = make_scheduler(
        make_request(1, [9, 9]), make_request(2, [9, 9], lot=LAST, may_cut=True)
    )

    steps, _ = run(scheduler)

    assert [step[0][0] for step in steps] == [1, 2, 1, 2]


def test_a_text_that_was_cut_keeps_its_lot():
    """
    No other lot comes between the runs of a text.
    """
    scheduler = make_scheduler(
        make_request(1, [25], lot=LAST, may_cut=True), make_request(2, [9, 9])
    )

    steps, _ = run(scheduler)

    assert [step[0][0] for step in steps] == [1, 1, 1, 2, 2]


def test_slots_limit_the_texts_of_a_step():
    """
    A step has no more texts than there are slots.
    """
    scheduler = make_scheduler(make_request(1, [1] * 5), n_slots=2)

    steps, _ = run(scheduler)

    assert [len(step) for step in steps] == [2, 2, 1]
