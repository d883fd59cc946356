"""Which states go to files and come back; no file, no thread, no model."""

from array import array

import pytest

from pyllama_raw.core.costs import Captures, CostHistory
from pyllama_raw.core.memory.cache import PrefixCache
from pyllama_raw.core.memory.slots import Contents
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.memory.tiers import StoredState, Tier, Tiers
from pyllama_raw.core.request import CacheTier, Private, Request, Span
from pyllama_raw.core.sequence import Sequence
from pyllama_raw.core.step import (
    DecodeStatus,
    Delete,
    Fetch,
    Fetched,
    FileKey,
    Load,
    PartlyComputed,
    Piece,
    Save,
    Saved,
    StepResult,
    Trim,
    Written,
)
from tests.core.support import answer, finished, make_request, make_scheduler

N = 100  # tokens of most prompts here
# Host memory for states on their way, and none for snapshots.
ROOM = PrefixCache(SnapshotKind.STATE, max_bytes=10**9, max_entries=0)


def make_tier(kind=SnapshotKind.STATE, known=(), **limits) -> Tier:
    limits = {"max_bytes": 10**6, "max_entries": 100} | limits
    cache = PrefixCache(kind, **limits)
    return Tier(CacheTier.DISK, cache, lambda n: 10 * n, known)


def saved(tier, tokens, host, namespace=None) -> list:
    """What saves slot 0, which holds *tokens*."""
    return tier.save(Contents(0, namespace, array("i", tokens)), host)


def found(tier, sequence) -> int:
    """Tokens of *sequence* that a file has; its last one is computed."""
    return tier.match(sequence, len(sequence.tokens) - 1).n_tokens


def sequence_of(tokens, namespace=None) -> Sequence:
    request = Request(0, array("i", tokens), 1, namespace=namespace)
    return Sequence(request, 0, 0.0)


def written(tier: Tier, tokens, payload="file", namespace=None) -> None:
    """Have the tier keep *tokens*."""
    operations = saved(tier, tokens, ROOM, namespace=namespace)
    write = operations[-1]
    assert isinstance(write, Save)
    tier.end_save(write.save_id, Saved(payload, 10 * len(tokens)))


def known_of(tokens, payload) -> StoredState:
    return StoredState(None, array("i", tokens), payload, 10 * len(tokens))


def test_saves_have_ids_of_their_own_in_all_tiers():
    """
    A report of a save has its id alone, which says in which tier it ends.
    """
    index = PrefixCache(SnapshotKind.STATE, max_bytes=10**9, max_entries=9)
    host, disk = Tier(CacheTier.HOST, index, lambda n: 10 * n), make_tier()
    prefill = CostHistory()
    tiers = Tiers(host, disk, prefill, Captures(None, prefill, 0.0), None)
    contents = Contents(0, None, array("i", range(N)))

    saves = [*tiers.save(contents), *tiers.write(contents, is_whole=True)]
    tiers.take_report(Written(2, Saved("file", 10 * N)))

    assert [(save.save_id, save.tier) for save in saves] == [
        (1, CacheTier.HOST),
        (2, CacheTier.DISK),
    ]
    sequence = sequence_of(range(N + 1))
    assert [found(tier, sequence) for tier in (host, disk)] == [0, N]


def test_rows_of_an_image_are_found_whole_or_not_at_all():
    """
    A file that ends within an image is used up to where the image begins.
    """
    tier = make_tier()
    written(tier, range(80))
    request = Request(0, array("i", range(N)), 1, spans=(Span(70, 90, 20),))

    assert found(tier, Sequence(request, 0, 0.0)) == 70


def test_a_file_is_found_when_it_is_complete():
    """
    Until its writer has reported it, there is no file to start from.
    """
    tier = make_tier()
    sequence = sequence_of(range(N + 5))

    (write,) = saved(tier, range(N), ROOM)
    before = found(tier, sequence)
    tier.end_save(write.save_id, Saved("file", 10 * N))

    key = FileKey(None, array("i", range(N)).tobytes())
    assert write == Save(1, CacheTier.DISK, 0, 0, N, 10 * N, key)
    assert (before, found(tier, sequence)) == (0, N)


def test_a_write_that_fails_leaves_nothing():
    """
    Its room is free again, and the same state may be written later.
    """
    tier = make_tier()
    (write,) = saved(tier, range(N), ROOM)

    tier.end_save(write.save_id, None)

    assert tier.cache.stats().n_reserved_bytes == 0
    assert saved(tier, range(N), ROOM)


def test_a_state_on_its_way_takes_host_memory():
    """
    What it displaces goes first; without room for it nothing is written.
    """
    tier = make_tier()
    host = PrefixCache(SnapshotKind.STATE, max_bytes=2500, max_entries=9)
    store_all(host, range(500, 550), "snapshot")

    (write,) = saved(tier, range(N), host)
    (second,) = saved(tier, range(1000, 1000 + N), host)
    third = saved(tier, range(2000, 2000 + N), host)
    held = host.stats()
    tier.end_save(write.save_id, None)
    tier.end_save(second.save_id, Saved("file", 10 * N))

    assert third == []
    assert (held.n_lent_bytes, held.n_bytes) == (2000, 201)
    assert host.stats().n_lent_bytes == 0
    host.check_integrity()


def test_a_state_too_large_for_the_disk_takes_no_host_memory():
    """
    It is not even copied.
    """
    tier = make_tier(max_bytes=100)
    host = PrefixCache(SnapshotKind.STATE, max_bytes=2500, max_entries=9)

    assert saved(tier, range(N), host) == []
    assert host.stats().n_lent_bytes == 0


def test_what_is_stored_or_under_way_is_not_written_again():
    """
    Nor is a prefix of it, where a longer state serves all of them.
    """
    tier = make_tier()
    saved(tier, range(N), ROOM)
    again = saved(tier, range(N - 10), ROOM)
    written(tier, range(1000, 1000 + N))

    assert again == []
    assert saved(tier, range(1000, 1000 + N), ROOM) == []


def test_short_states_and_private_ones_are_not_written():
    """
    A few tokens are computed faster; a namespace of one request ends with it.
    """
    tier = make_tier()

    assert saved(tier, range(tier.min_gain - 1), ROOM) == []
    assert saved(tier, range(N), ROOM, namespace=Private()) == []
    assert saved(tier, range(N), ROOM, namespace="salt")


def test_a_tier_that_is_off_does_nothing():
    """
    No operation, no hit, no entry.
    """
    tier = Tier.without_files()

    assert saved(tier, range(N), ROOM) == []
    assert found(tier, sequence_of(range(N))) == 0
    assert tier.deletions() == []


def test_files_are_deleted_before_what_displaces_them_is_written():
    """
    The deletion comes first in the plan, so the limit holds on the disk, too.
    """
    tier = make_tier(max_bytes=14 * N)
    written(tier, range(N), "old")

    delete, write = saved(tier, range(500, 500 + N), ROOM)

    assert delete == Delete(("old",))
    assert isinstance(write, Save)


def test_a_longer_state_replaces_the_shorter():
    """
    The next turn of a chat has one file again once it is written.
    """
    tier = make_tier()
    written(tier, range(N), "short")

    written(tier, range(N + 20), "long")

    assert tier.deletions() == [Delete(("short",))]
    assert tier.deletions() == []


def test_a_read_that_fails_drops_the_file():
    """
    What could not be restored is not tried again.
    """
    tier = make_tier()
    written(tier, range(N))
    sequence = sequence_of(range(N))
    for failed in (False, True):
        hit = tier.match(sequence, N - 1)
        tier.hold(hit, ROOM)
        tier.let_go(hit, ROOM, failed=failed)

    assert hit.entries[0].payload is None
    assert found(tier, sequence) == 0
    assert tier.deletions() == [Delete(("file",))]
    tier.cache.check_integrity()


def test_known_files_are_taken_over():
    """
    What others cover or has no room is deleted; the latest used stay.
    """
    known = [
        known_of(range(N), "oldest"),
        known_of(range(500, 600), "middle"),
        known_of(range(500, 580), "covered"),
        known_of(range(900, 1000), "latest"),
    ]
    tier = make_tier(known=known, max_bytes=28 * N)

    assert found(tier, sequence_of(range(500, 600))) == 99
    assert tier.deletions() == [Delete(("covered", "oldest"))]


def test_a_known_file_larger_than_its_tokens_is_deleted():
    """
    No writer made it, and a read would take memory for all of it.
    """
    tokens = array("i", range(N))
    tier = make_tier(known=[StoredState(None, tokens, "forged", 10 * N + 1)])

    assert found(tier, sequence_of(range(N))) == 0
    assert tier.deletions() == [Delete(("forged",))]


def test_exact_states_are_of_use_at_their_end_only():
    """
    Memory that cannot be cut goes on where a file ends, or not at all.
    """
    tier = make_tier(SnapshotKind.EXACT)
    written(tier, range(N))

    assert found(tier, sequence_of(range(N))) == 0
    assert found(tier, sequence_of(range(N + 1))) == N


def test_snapshots_on_the_path_of_exact_memory_are_written_too():
    """
    Another question after the same beginning finds a point that it can use.
    """
    host = PrefixCache(SnapshotKind.EXACT, max_bytes=10**6, max_entries=10)
    for n_tokens in (10, 70, 90):
        store_all(host, range(n_tokens), f"state of {n_tokens}")
    tier = make_tier(SnapshotKind.EXACT)

    contents = Contents(0, None, array("i", range(N)))
    operations = tier.save_snapshots(contents, host)
    for write in operations:
        tier.end_save(write.save_id, Saved(write.source.payload, 100))

    assert [(o.stop, o.source.payload) for o in operations] == [
        (90, "state of 90"),
        (70, "state of 70"),
    ]
    assert tier.save_snapshots(contents, host) == []
    assert found(tier, sequence_of([*range(80), 7, 7])) == 70
    assert make_tier().save_snapshots(contents, host) == []


def store_all(cache, tokens, payload) -> None:
    """Keep a snapshot of all *tokens*."""
    plan = cache.plan_store(None, array("i", tokens), len(tokens))
    cache.commit(cache.reserve(plan, 1), payload, 1)


# -- in the scheduler ------------------------------------------------------------


def make_host():
    return PrefixCache(SnapshotKind.RANGE, max_bytes=10**6, max_entries=0)


def make(tier, host=None, **options):
    return make_scheduler(
        1, 400, 400, cache=host or make_host(), disk=tier, unified=True, **options
    )


def run(scheduler, request):
    """Until the scheduler is idle; all operations and the last event."""
    scheduler.add(request, 0.0)
    operations = []
    while plan := scheduler.schedule(1.0):
        operations += plan.moves
        events = scheduler.apply(plan, answer(plan), 2.0)
        for move in kinds(plan.moves, Fetch):
            scheduler.take_report(Fetched(move.fetch_id, f"read {move.payload}", 0.5))
        scheduler.check_integrity()
    return operations, finished(events)[request.request_id]


def kinds(operations, *wanted):
    return [operation for operation in operations if isinstance(operation, wanted)]


def test_a_prompt_starts_from_a_file():
    """
    One file is read instead of a prefill; usage names the tier.
    """
    tier = make_tier(known=[known_of(range(100, 400), "file")])
    scheduler = make(tier)

    operations, end = run(scheduler, make_request(n_prompt=200, max_tokens=1))

    load = Load(0, (Piece("read file", 0, 198),), 197)
    assert kinds(operations, Fetch, Load) == [Fetch(1, "file"), load]
    assert (end.n_cached, end.cache_tier) == (198, CacheTier.DISK)
    assert scheduler.cache_stats().disk.n_hit_tokens_host == 198


def test_a_file_is_read_only_if_it_saves_much():
    """
    A slot that has nearly as much goes on; its own memory is worth more.
    """
    tier = make_tier(known=[known_of(range(100, 300), "file")])
    scheduler = make(tier)
    run(scheduler, make_request(0, n_prompt=150, max_tokens=1))

    _, near = run(scheduler, make_request(1, n_prompt=190, max_tokens=1))

    assert (near.n_cached, near.cache_tier) == (150, CacheTier.LIVE)


def test_a_file_that_saves_much_wins_over_the_last_slot():
    """
    The slot's own few tokens are given up, after they were written.
    """
    tier = make_tier(known=[known_of(range(100, 400), "file")])
    scheduler = make(tier)
    tokens = array("i", [*range(100, 110), *range(1000, 1100)])
    run(scheduler, Request(0, tokens, 1))

    operations, end = run(scheduler, make_request(1, n_prompt=250, max_tokens=1))

    assert [type(o) for o in kinds(operations, Save, Fetch)] == [Save, Fetch]
    assert (end.n_cached, end.cache_tier) == (248, CacheTier.DISK)


def test_slots_are_written_at_the_end():
    """
    One plan for each idle slot that no file has; nothing else is in it.
    """
    tier = make_tier()
    scheduler = make(tier)
    run(scheduler, make_request(n_prompt=100, max_tokens=3))

    (plan,) = scheduler.last_plans()

    (write,) = plan.moves
    assert write.stop == 102
    scheduler.take_report(Written(write.save_id, Saved("file", 1020)))
    assert list(scheduler.last_plans()) == []


@pytest.mark.parametrize(
    ("exact", "n_steps", "n_kept"), [(True, 3, 100), (False, 3, 102), (False, 1, 100)]
)
def test_memory_is_cut_before_slots_are_written_at_the_end(exact, n_steps, n_kept):
    """
    What a request leaves that ends as the engine closes: memory is cut to what the slot
    says, and only then is all of it written.
    """
    scheduler = make(make_tier(), deterministic=exact)
    scheduler.add(make_request(n_prompt=100, max_tokens=30), 0.0)
    for _ in range(n_steps):
        plan = scheduler.schedule(1.0)
        scheduler.apply(plan, answer(plan), 2.0)
    scheduler.cancel(0, 3.0)

    operations = []
    for plan in scheduler.last_plans():
        operations += plan.moves
        scheduler.apply(plan, answer(plan), 4.0)

    cut = [Trim(0, n_kept)] if exact else []
    assert operations[:-1] == cut
    assert operations[-1].stop == n_kept
    scheduler.check_integrity()


def test_a_slot_that_cannot_be_cut_at_the_end_is_not_written():
    """
    It is empty then, and no file says otherwise.
    """
    scheduler = make(make_tier(), deterministic=True)
    scheduler.add(make_request(n_prompt=100, max_tokens=30), 0.0)
    for _ in range(3):
        plan = scheduler.schedule(1.0)
        scheduler.apply(plan, answer(plan), 2.0)
    scheduler.cancel(0, 3.0)

    plans = scheduler.last_plans()
    plan = next(plans)
    lost = StepResult(not_restored=frozenset({0}), refuses_cuts=True)
    scheduler.apply(plan, lost, 4.0)

    assert list(plans) == []
    scheduler.check_integrity()


def test_an_aborted_step_is_cut_before_slots_are_written_at_the_end():
    """
    A close aborts the running step, which may have left more than is known of it.
    """
    scheduler = make(make_tier())
    scheduler.add(make_request(n_prompt=200, max_tokens=30), 0.0)
    plan = scheduler.schedule(1.0)
    aborted = StepResult(DecodeStatus.ABORTED, (PartlyComputed(200),))
    scheduler.apply(plan, aborted, 2.0)
    scheduler.cancel(0, 3.0)

    cut, write = scheduler.last_plans()

    assert cut.moves == (Trim(0, 198),)
    assert write.moves[0].stop == 198


def test_clearing_the_cache_deletes_files():
    """
    The next plan has nothing but the deletion; a file under way goes when it is there.
    """
    tier = make_tier(known=[known_of(range(100, 300), "file")])
    scheduler = make(tier)
    saved(tier, range(500, 600), ROOM)

    scheduler.clear_cache()
    first = scheduler.schedule(1.0)
    scheduler.take_report(Written(1, Saved("late", 1000)))
    second = scheduler.schedule(1.0)

    assert first.moves == (Delete(("file",)),)
    assert second.moves == (Delete(("late",)),)
