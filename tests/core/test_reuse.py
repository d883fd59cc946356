"""Which slot a sequence takes its first tokens from, and for whom it waits."""

from array import array
from random import Random

import pytest

from pyllama_raw.core.memory.cache import PrefixCache
from pyllama_raw.core.memory.placement import Source, find_sources
from pyllama_raw.core.memory.slots import ContextLimits, Slots
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.policies import Fcfs
from pyllama_raw.core.policy_runner import PolicyRunner, Prefixes, pass_on_interrupts
from pyllama_raw.core.request import CacheTier, FinishReason, Request
from pyllama_raw.core.sequence import Sequence
from pyllama_raw.core.step import (
    Copy,
    Load,
    Release,
    Save,
    Shift,
    Trim,
)
from tests.core.reuse_support import ANSWER, A, B, Engine
from tests.core.support import finished, make_scheduler, run_until_idle

KINDS = pytest.mark.parametrize("kind", SnapshotKind)
CUTTABLE = pytest.mark.parametrize("kind", [SnapshotKind.RANGE, SnapshotKind.STATE])


# -- live slots ------------------------------------------------------------------


@KINDS
def test_an_idle_slot_is_continued(kind):
    """
    The next turn of a chat goes on in its slot; nothing is copied or restored.
    """
    engine = Engine(kind=kind)
    engine.run(A)

    [end] = engine.run([*A, ANSWER, *B[:10]])

    assert (end.n_cached, end.cache_tier) == (len(A) + 1, CacheTier.LIVE)
    assert engine.of(Copy) + engine.of(Load) + engine.of(Trim) == []


def test_an_idle_slot_with_more_is_copied_from():
    """
    While another place is free, what the slot holds beyond the prefix stays.
    """
    engine = Engine()
    engine.run(A)

    [end] = engine.run([*A[:20], *B])

    assert (end.n_cached, end.cache_tier) == (20, CacheTier.LIVE)
    assert engine.of(Copy) == [Copy(0, 1, 20)]
    assert engine.run([*A, ANSWER, 5])[0].n_cached == len(A)


@CUTTABLE
def test_a_prompt_asked_again_goes_on_in_place(kind):
    """
    The slot that holds it all is cut, not copied; the first answer is captured and is no
    part of the prompt.
    """
    engine = Engine(3, kind=kind)
    engine.run(A, max_tokens=8)

    ends = engine.run(A, max_tokens=8) + engine.run(A, max_tokens=8)

    assert [end.n_cached for end in ends] == [len(A) - 2] * 2
    assert engine.of(Copy) == []
    assert engine.of(Trim) == [Trim(0, len(A) - 2)] * 2


def test_the_last_idle_slot_is_captured_and_cut():
    """
    Without another place the slot itself is used; what it loses is captured first.
    """
    engine = Engine(1)
    engine.run(A)

    [end] = engine.run([*A[:20], *B])

    assert (end.n_cached, end.cache_tier) == (20, CacheTier.LIVE)
    [capture] = engine.of(Save)
    assert (capture.start, capture.stop) == (0, len(A) + 1)
    assert engine.of(Trim) == [Trim(0, 20)]


@CUTTABLE
@pytest.mark.parametrize("unified", [True, False])
def test_a_running_slot_is_forked(kind, unified):
    """
    A prompt that begins like one that decodes right now takes its computed part.
    """
    engine = Engine(kind=kind, unified=unified)
    engine.add(A, 20)
    engine.step()
    engine.step()

    [end] = engine.run([*A, *B[:10]])

    assert (end.n_cached, end.cache_tier) == (len(A), CacheTier.LIVE)
    assert engine.of(Copy) == [Copy(0, 1, len(A))]


def test_memory_that_cannot_be_cut_is_not_forked_in_the_middle():
    """
    A running slot that is past the common prefix is of no use.
    """
    engine = Engine(kind=SnapshotKind.EXACT, max_bytes=0)
    engine.add(A, 20)
    engine.step()
    engine.step()

    [end] = engine.run([*A, *B[:10]])

    assert (end.n_cached, end.cache_tier) == (0, None)


def test_parked_slots_keep_more_chats_than_run():
    """
    Slots beyond n_slots hold what idle chats left, and are taken last.
    """
    engine = Engine(1, n_parked=2, max_bytes=0, n_ctx_slot=64, n_cells=192)
    prompts = [[n, *A] for n in (50, 51, 52)]
    for prompt in prompts:
        engine.run(prompt)

    ends = [engine.run([*prompt, ANSWER, 5, 6])[0] for prompt in prompts]

    assert [end.n_cached for end in ends] == [len(A) + 2] * 3


def test_idle_slots_give_their_cells_to_who_runs():
    """
    The longest unused goes first; what it held is captured.
    """
    engine = Engine(3, n_ctx_slot=64, n_cells=100)
    engine.run(A)
    engine.run(B)

    [end] = engine.run(list(range(300, 350)))

    assert end.reason is FinishReason.LENGTH
    assert engine.of(Release) == [Release(0)]
    assert [save.source for save in engine.of(Save)] == [0]


# -- waiting for a leader ----------------------------------------------------------


@KINDS
@pytest.mark.parametrize("budget", [7, 64])
def test_equal_prompts_at_once_are_computed_once(kind, budget):
    """
    The others wait, take over all but the last two tokens, and count as cached.
    """
    engine = Engine(3, kind=kind, token_budget=budget, n_cells=192)

    ends = engine.run(A, A, A, max_tokens=1)

    assert engine.n_computed == len(A) + 2 * 2
    assert sorted(end.n_cached for end in ends) == [0, len(A) - 2, len(A) - 2]
    assert engine.cache.n_hit_tokens_live == 2 * (len(A) - 2)


def test_leader_and_followers_go_on_together():
    """
    The leader's chunk ends where they part, so all get their first token in one step.
    """
    engine = Engine(3)

    engine.run(A + B[:10], A + B[10:20], A + B[20:30])

    first, second = ([len(c.tokens) for c in plan.works] for plan in engine.plans[:2])
    assert (first, second) == ([40], [10, 10, 10])
    assert all(work.samples for work in engine.plans[1].works)


def test_who_would_save_little_does_not_wait():
    """
    A short common prefix is computed again at once.
    """
    engine = Engine(max_bytes=0)
    engine.add(A)
    engine.add([*A[:10], *B])

    plan = engine.step()

    assert [len(work.tokens) for work in plan.works] == [len(A), 10 + len(B) - 26]


@KINDS
def test_who_waits_goes_on_alone_when_the_leader_leaves(kind):
    """
    What the leader had computed is used where possible, the rest is computed.
    """
    engine = Engine(kind=kind, token_budget=10, max_bytes=0)
    leader = engine.add(A)
    follower = engine.add(A)
    engine.step()
    engine.step()

    engine.scheduler.cancel(leader, 0.0)
    engine.run()

    assert engine.ends[leader].reason is FinishReason.CANCELLED
    assert engine.ends[follower].reason is FinishReason.LENGTH
    assert engine.ends[follower].n_cached == 20
    assert engine.n_computed == len(A) + 1


def test_one_that_waits_for_a_leader_may_leave():
    """
    The leader goes on, and nothing is copied for who has left.
    """
    engine = Engine(token_budget=10, max_bytes=0)
    leader, follower = engine.add(A), engine.add(A)
    engine.step()

    engine.scheduler.cancel(follower, 0.0)
    engine.run()

    assert engine.ends[follower].reason is FinishReason.CANCELLED
    assert engine.ends[leader].reason is FinishReason.LENGTH
    assert engine.n_computed == len(A) + 1


def test_a_leader_that_leaves_during_a_step_leaves_nothing():
    """
    What a running step still changes is not taken over.
    """
    engine = Engine(token_budget=10, max_bytes=0)
    leader, follower = engine.add(A), engine.add(A)
    engine.step(lambda: engine.scheduler.cancel(leader, 0.0))

    engine.run()

    assert engine.ends[follower].n_cached == 0
    assert engine.ends[follower].reason is FinishReason.LENGTH


def test_who_waits_goes_on_when_the_leader_is_preempted():
    """
    It gets a slot again, goes on from what that still held, and still leads.
    """
    engine = Engine(2, token_budget=10, max_bytes=0)
    leader, follower = engine.add(A, 8), engine.add(A, 8)
    engine.step()
    roster = engine.scheduler._roster
    roster.preempt(roster.slots.running[leader], 0.0)

    engine.run()

    assert {end.reason for end in engine.ends.values()} == {FinishReason.LENGTH}
    assert engine.ends[follower].n_cached == len(A) - 2
    assert engine.n_computed == len(A) + 2 + 2 * 7


def test_nobody_waits_in_a_circle():
    """
    A sequence that waits for another one is no leader for it.
    """
    slots = Slots(ContextLimits(2, 64, 64, 128))
    first, second = make_sequence(A), make_sequence(A)
    leader, follower = slots.seat(first, 0), slots.seat(second, 1)

    assert find_sources(slots, second) == [Source(0, 0, len(A) - 2)]
    follower.leader = leader
    assert find_sources(slots, first) == []


def test_a_leader_that_shifted_is_of_no_use():
    """
    Its tokens are no prefix of anything any more.
    """
    slots = Slots(ContextLimits(2, 64, 64, 128))
    first, second = make_sequence(A), make_sequence(A)
    leader, _ = slots.seat(first, 0), slots.seat(second, 1)
    slots.advance(leader, 20)
    slots.shift(leader, 4, 8)

    assert find_sources(slots, second) == []


def make_sequence(tokens) -> Sequence:
    return Sequence(Request(0, array("i", tokens), 4), 0, 0.0)


def test_who_missed_the_point_of_its_leader_starts_anew():
    """
    Memory that cannot be cut is taken over at one position only.
    """
    engine = Engine(kind=SnapshotKind.EXACT, token_budget=8, max_bytes=0)
    leader = engine.add(A)
    follower = engine.add(A)
    engine.step()
    running = engine.scheduler.memory.slots.running
    assert running[follower].leader is running[leader]
    running[follower].fork_at = 4

    engine.run()

    assert {end.reason for end in engine.ends.values()} == {FinishReason.LENGTH}
    assert engine.ends[follower].n_cached == len(A) - 2


# -- shifts, failures ------------------------------------------------------------------


def test_shared_cells_are_computed_again_instead_of_shifted():
    """
    A cell has one position for all who share it.
    """
    engine = Engine(2, n_ctx_slot=48, n_cells=200, context_full="shift")
    engine.add(A, 40)
    engine.step()
    engine.step()
    engine.add([*A, 5], 40)

    engine.run()

    assert {end.n_output for end in engine.ends.values()} == {40}
    assert engine.of(Shift)
    trims = [trim for trim in engine.of(Trim) if trim.n_pos == 0]
    assert len(trims) == 1


def test_a_slot_that_was_shifted_is_not_kept():
    """
    Its tokens moved: nothing can begin with them.
    """
    engine = Engine(1, n_ctx_slot=48, n_cells=48, context_full="shift")
    engine.run(A, max_tokens=20)

    [end] = engine.run(A)

    assert engine.of(Shift)
    assert engine.of(Save) == []
    assert end.n_cached == 0


def test_a_new_context_holds_nothing():
    """
    After a failed decode neither idle nor running slots are believed.
    """
    engine = Engine(2)
    engine.run(A)
    running = engine.add(B)
    engine.step(breaks=True)

    [end] = engine.run([*A, ANSWER, 5])

    assert engine.ends[running].error is None
    assert end.n_cached == 0


def test_cached_tokens_are_those_not_computed():
    """
    Prompts less cached tokens, and all but the last output token of each request.
    """
    engine = Engine(2, n_parked=2, n_cells=256)
    prompts = [A, A, [*A[:20], *B], [*B, 7], [*A, ANSWER, 8], [*B, 7, ANSWER, 9]]

    ends = engine.run(*prompts, max_tokens=4)

    n_prompt = sum(map(len, prompts))
    n_cached = sum(end.n_cached for end in ends)
    n_output = sum(end.n_output for end in ends)
    assert n_cached > 0
    assert engine.n_computed == n_prompt - n_cached + n_output - len(prompts)


def test_where_batches_do_not_mix_only_prompts_are_kept():
    """
    Then an output does not depend on what ran before: the answer of the last turn is
    computed again, and two tokens at least.
    """
    scheduler = make_scheduler(
        n_slots=1,
        unified=False,
        deterministic=True,
        kind=SnapshotKind.STATE,
        cache=PrefixCache(SnapshotKind.STATE, max_bytes=0, max_entries=0),
    )
    prompt = array("i", range(100, 110))
    scheduler.add(Request(0, prompt, 4), 0.0)
    run_until_idle(scheduler)

    scheduler.add(Request(1, prompt + array("i", [97] * 5), 1), 0.0)
    scheduler.add(Request(2, prompt, 1), 0.0)
    scheduler.add(Request(3, array("i", [5]), 1), 0.0)
    scheduler.add(Request(4, array("i", [5, 6, 7]), 1), 0.0)
    _, events = run_until_idle(scheduler)

    assert [end.n_cached for end in finished(events).values()] == [10, 8, 0, 0]


@KINDS
def test_what_is_cached_can_be_asked_for_many_at_once(kind):
    """
    A look at all slots finds as much of a prompt as a look at each one.
    """
    rng = Random(0)  # noqa: S311
    engine = Engine(4, kind=kind, n_ctx_slot=64, n_cells=160, max_bytes=0)
    memory = engine.scheduler.memory
    runner = PolicyRunner(Fcfs(), memory, 16, pass_on_interrupts)

    def prompt():
        return [rng.choice((1, 3)) for _ in range(3)] + [4] * rng.randrange(1, 30)

    found = []
    for _ in range(300):
        if rng.random() < 0.4:
            engine.add(prompt(), max_tokens=rng.randrange(1, 6))
        engine.step()
        sequence = make_sequence(prompt())
        later = [s.n_later for s in find_sources(memory.slots, sequence)]
        runner.begin(0.0)
        runner._probed = sequence
        n_cached = runner._n_cached(sequence.request.request_id)
        found.append((n_cached, max(later, default=0)))

    assert [fast for fast, _ in found] == [slow for _, slow in found]
    assert len(set(found)) > 5


def test_what_shifted_is_no_prefix_of_a_waiting_sequence():
    """
    Before the shift all that may be reused is there, after it nothing.
    """
    slots = Slots(ContextLimits(2, 64, 64, 128))
    leader = slots.seat(make_sequence(A), 0)
    slots.advance(leader, 20)
    before = Prefixes(slots).n_longest(make_sequence(A), 30)
    slots.shift(leader, 4, 8)

    assert (before, Prefixes(slots).n_longest(make_sequence(A), 30)) == (30, 0)
