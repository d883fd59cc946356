"""Steps of which nothing is known: the executor has raised, and has an empty context."""

from array import array

from pyllama_raw.core.request import FinishReason
from pyllama_raw.core.step import CacheTier, Delete, Fetch, Fetched, Save, Written
from pyllama_raw.errors import EngineFault
from tests.core.support import answer, finished, make_request
from tests.core.test_disk_tier import kinds, known_of, make, make_host, make_tier

FAULT = EngineFault("as told")


def run_to_end(scheduler) -> dict:
    """The last events, by request; files are never read."""
    events = scheduler.take_events()
    while plan := scheduler.schedule(2.0):
        events += scheduler.apply(plan, answer(plan), 2.0)
        scheduler.check_integrity()
    return finished(events)


def test_nobody_waits_for_a_file_that_was_perhaps_never_asked_for():
    """
    The prompt is computed; a report that comes late is of no use and no harm.
    """
    scheduler = make(make_tier(known=[known_of(range(100, 400), "file")]))
    scheduler.add(make_request(n_prompt=200, max_tokens=1), 0.0)
    plan = scheduler.schedule(1.0)
    (fetch,) = kinds(plan.moves, Fetch)
    events = scheduler.give_up(plan, FAULT, 1.0)
    ends = run_to_end(scheduler)
    scheduler.take_report(Fetched(fetch.fetch_id, "late", 0.5))
    scheduler.schedule(3.0)

    assert finished(events) == {}
    assert ends[0].reason is FinishReason.LENGTH
    assert ends[0].n_cached == 0
    scheduler.check_integrity()


def test_room_for_a_state_that_was_perhaps_never_written_is_free():
    """
    Its host memory, too; a report that comes late is of no use and no harm.
    """
    host, tier = make_host(), make_tier()
    scheduler = make(tier, host)
    scheduler.add(make_request(0, n_prompt=100, max_tokens=1), 0.0)
    run_to_end(scheduler)
    scheduler.add(make_request(1, n_prompt=390, max_tokens=1, namespace="other"), 0.0)
    plan = scheduler.schedule(1.0)
    (save,) = [s for s in kinds(plan.moves, Save) if s.tier is CacheTier.DISK]
    n_held = host.ledger.n_used_bytes
    scheduler.give_up(plan, FAULT, 1.0)
    n_free = host.ledger.n_used_bytes
    scheduler.take_report(Written(save.save_id, None))
    ends = run_to_end(scheduler)

    assert n_held > n_free == 0
    assert ends[1].reason is FinishReason.LENGTH


def test_moves_that_wait_for_a_step_do_not_wait_for_a_lost_context():
    """
    What concerns slots is dropped, what deletes files is done.
    """
    scheduler = make(make_tier(known=[known_of(range(100, 400), "file")]))
    scheduler.add(make_request(0, n_prompt=20, max_tokens=1), 0.0)
    run_to_end(scheduler)
    scheduler.clear_cache()
    scheduler.lose_slots()
    plan = scheduler.schedule(1.0)

    assert list(plan.moves) == [Delete(("file",))]
    assert scheduler.stats().rebuilds == 1
    scheduler.check_integrity()


def test_what_runs_is_filled_again_after_slots_are_lost():
    """
    Tokens go on from those that are known.
    """
    scheduler = make(make_tier())
    scheduler.add(make_request(0, n_prompt=20, max_tokens=3), 0.0)
    plan = scheduler.schedule(1.0)
    scheduler.apply(plan, answer(plan), 1.0)
    scheduler.lose_slots()
    again = scheduler.schedule(2.0)

    assert [len(work.tokens) for work in again.works] == [21]
    assert array("i", again.works[0].tokens)[:20] == make_request(0, n_prompt=20).tokens
