"""Drafts of steps: how many there are, and that no output depends on them."""

from array import array
from collections import Counter, defaultdict
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllama_raw.core import costs as costs_rules
from pyllama_raw.core import lookup as rules
from pyllama_raw.core.costs import CostHistory
from pyllama_raw.core.memory.cache import PrefixCache
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.request import (
    Adapted,
    FinishReason,
    Lot,
    NewTokens,
    Private,
    Request,
    Span,
    StopString,
)
from pyllama_raw.core.scheduling.speculation import Speculation
from pyllama_raw.core.sequence import Sequence
from pyllama_raw.core.step import (
    Decode,
    DecodeStatus,
    RowFailed,
    Sampled,
    StepResult,
    Verify,
)
from pyllama_raw.core.text import StopStrings
from pyllama_raw.engine.driver import Driver
from pyllama_raw.errors import SamplingFailed
from pyllama_raw.testing import FakeExecutor
from tests.core.support import (
    STOP_TOKEN,
    finished,
    make_request,
    make_scheduler,
    run_until_idle,
)

# -- texts of other requests ---------------------------------------------------------------


def reuse():
    """A cache that shares what slots hold."""
    return PrefixCache(SnapshotKind.RANGE, max_bytes=0, max_entries=0)


# Of 8 tokens, none of which a model says twice.
STORY = [60 + n for n in range(40)]


def tell(history):
    """A model that tells a story, once its first five words were said."""
    last = history[-1]
    return last + 1 if 60 <= last < 99 else 40 + len(history) % 19


def test_outputs_of_a_namespace_are_drafts_for_later_requests():
    """
    A text that came once is computed in fewer steps the next time, where prefixes are shared.
    """
    cache = reuse()
    machine = Machine(
        speculating(cache=cache, n_ctx_slot=128, n_batch=128), tell, lambda n: 1 + n / 9
    )
    prompts = [array("i", [n, *STORY[:6]]) for n in (20, 21)]

    first, second = (
        machine.run(Request(0, prompts[0], 34)),
        machine.run(Request(1, prompts[1], 34)),
    )
    ends = finished(machine.events)
    assert first == second == [STORY[6:40]]
    assert ends[0].n_accepted == 0
    assert ends[1].n_accepted > 20


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("a", "b"), ("a", None), (None, "a"), (Adapted("x", None), None),
        (Adapted("x", "a"), Adapted("y", "a")), (Private(), Private()),
    ],
)  # fmt: skip
def test_no_text_is_seen_by_another_namespace(first, second):
    """
    Whatever was said there, it is no draft, and takes no time less.
    """
    cache = reuse()
    machine = Machine(speculating(cache=cache, n_ctx_slot=128, n_batch=128), tell)
    prompts = [array("i", [n, *STORY[:6]]) for n in (20, 21)]
    for index, namespace in enumerate((first, second)):
        machine.run(Request(index, prompts[index], 34, namespace=namespace))

    assert finished(machine.events)[1].n_drafted == 0


@pytest.mark.parametrize("salt", ["a", None])
def test_texts_are_forgotten_with_the_cache(salt):
    """
    What is cleared is no draft any more; other salts stay. Nor is it where nothing is reused.
    """
    cache = reuse()
    machine = Machine(speculating(cache=cache, n_ctx_slot=128, n_batch=128), tell)
    without = Machine(speculating(n_ctx_slot=128, n_batch=128), tell)
    for index, namespace in enumerate(("a", "b")):
        prompt = array("i", [index, *STORY[:6]])
        machine.run(Request(index, prompt, 34, namespace=namespace))
    machine.scheduler.clear_cache(salt)
    for index, namespace in enumerate(("a", "b"), 2):
        prompt = array("i", [index, *STORY[:6]])
        machine.run(Request(index, prompt, 34, namespace=namespace))
        without.run(Request(index, prompt, 34))

    ends = finished(machine.events)
    assert ends[2].n_drafted == 0
    assert bool(ends[3].n_drafted) is (salt is not None)
    assert {end.n_drafted for end in finished(without.events).values()} == {0}


def test_rows_of_images_are_no_text():
    """
    A request with spans is not shown to others.
    """
    speculation = Speculation(make_scheduler(cache=reuse()).memory, CostHistory())
    plain = Sequence(make_request(0, n_prompt=9), 0, 0.0)
    spans = (Span(0, 4, 4, True, b"k" * 32),)
    media = Sequence(Request(1, array("i", [-1] * 4 + [5]), 3, spans=spans), 1, 0.0)
    for sequence in (plain, media):
        speculation.remember(sequence)

    ((text, _),) = speculation._texts.of(None).parts
    assert text[3:-1] == plain.tokens


# -- how many a step has -----------------------------------------------------------------


def history(*steps):
    """What was learned of steps: rows, rows with logits, seconds."""
    costs = CostHistory()
    for step in steps:
        costs.observe(*step)
    return costs


def test_seconds_of_a_size_that_was_seen_are_those_that_it_took():
    """
    The lower quartile of its latest steps, so a busy time counts little.
    """
    assert CostHistory().decode_seconds(4) == []

    ones = [(1, 1, seconds) for seconds in (9.0, 1.2, 1.3, 1.0, 8.0)]
    costs = history(*ones, (4, 4, 2.0), (2, 2, 1.5))
    seconds = costs.decode_seconds(4)
    assert [seconds[1], seconds[2], seconds[4]] == [1.2, 1.5, 2.0]
    # Between two sizes it rises evenly.
    assert seconds[3] == pytest.approx(1.75)
    assert 0 <= seconds[0] < 1.2


def test_a_rare_size_is_not_forgotten_beside_a_frequent_one():
    """
    Else it would be tried again and again, as if nobody knew what it takes.
    """
    costs = history((5, 5, 2.0), (8, 8, 2.2), *[(4, 4, 1.0)] * 40)

    assert costs.decode_seconds(8)[4:] == pytest.approx(
        [1.0, 2.0, 6.2 / 3, 6.4 / 3, 2.2]
    )


def test_seconds_of_larger_steps_are_a_guess_that_is_tried():
    """
    By the formula, which prompts teach, and at most half of what rows took by now.
    """
    cheap = history((4, 4, 1.04), (64, 1, 1.64), (256, 1, 3.56))
    dear = history((4, 4, 1.04), (64, 1, 100.0), (256, 1, 400.0))

    assert cheap.decode_seconds(32)[6] == pytest.approx(1.06, abs=0.01)
    assert dear.decode_seconds(32)[6] == pytest.approx(1.04 * 1.25)
    # Nobody can say of many more rows.
    assert len(cheap.decode_seconds(32)) == 7


def test_seconds_of_smaller_steps_are_their_share_at_least():
    """
    Also where rows of prompts are dearer than those that were seen: no step takes less than nothing.
    """
    dear = history((4, 4, 1.0), (64, 1, 100.0), (256, 1, 400.0))
    cheap = history((4, 4, 1.0), (64, 1, 1.6), (256, 1, 3.52))

    assert dear.decode_seconds(4) == pytest.approx([0.0, 0.25, 0.5, 0.75, 1.0])
    assert cheap.decode_seconds(4) == pytest.approx(
        [0.96, 0.97, 0.98, 0.99, 1.0], abs=0.005
    )


def test_old_seconds_are_forgotten(monkeypatch):
    """
    What a machine took once it may not take now.
    """
    monkeypatch.setattr(costs_rules, "MAX_AGE", 3)
    costs = history((2, 2, 8.0), (1, 1, 1.0))
    before = costs.decode_seconds(4)[2]
    for _ in range(2):
        costs.observe(1, 1, 1.0)

    assert before == 8.0
    assert costs.decode_seconds(4)[2] == pytest.approx(1.5)


class Machine:
    """A driver of a scheduler, whose steps take what *seconds* says of their rows."""

    def __init__(self, scheduler, next_token, seconds=lambda n_rows: 1.0, **fails):
        self.now, self.events, self.plans = 0.0, [], []
        self.scheduler = scheduler
        self.executor = FakeExecutor(
            scheduler.limits,
            next_token=next_token,
            on_step=lambda _, plan: self.pass_time(plan, seconds),
            **fails,
        )
        self.driver = Driver(
            scheduler,
            self.executor,
            lambda: self.now,
            self.events.extend,
        )

    def pass_time(self, plan, seconds):
        self.plans.append(plan)
        self.now += seconds(plan.n_tokens)

    def run(self, *requests):
        """The output of each request."""
        for request in requests:
            self.driver.add((request,), self.now)
        while self.driver.step():
            self.scheduler.check_integrity()
        outputs = defaultdict(list)
        for event in self.events:
            if isinstance(event, NewTokens):
                outputs[event.request_id] += event.tokens
        return [outputs[request.request_id] for request in requests]

    @property
    def depths(self):
        """Drafts of each step without a prompt."""
        return [
            sum(len(work.tokens) - 1 for work in plan.works)
            for plan in self.plans
            if {type(work) for work in plan.works} <= {Decode, Verify}
        ]


def cycle(*tokens):
    """A model that goes round, wherever it begins."""

    def next_token(history):
        return tokens[len(history) % len(tokens)]

    return next_token


def speculating(n_slots=1, n_outputs=32, **options):
    return make_scheduler(n_slots, speculates=True, n_outputs=n_outputs, **options)


REPEATS = cycle(50, 51, 52, 53)


def test_a_text_that_repeats_takes_fewer_steps():
    """
    The output is the same; the steps have drafts, and results count them.
    """
    plain = Machine(make_scheduler(1), REPEATS)
    machine = Machine(speculating(), REPEATS)
    request = make_request(n_prompt=4, max_tokens=50)

    assert machine.run(request) == plain.run(request)
    assert len(machine.plans) < len(plain.plans) / 2
    end = finished(machine.events)[0]
    stats = machine.scheduler.stats()
    assert end.n_accepted == end.n_drafted >= 30
    assert (stats.drafted_tokens, stats.accepted_tokens) == (
        end.n_drafted,
        end.n_accepted,
    )
    assert stats.output_tokens == 50


def test_a_request_that_refuses_gets_none():
    """
    As one whose engine does not speculate.
    """
    machine = Machine(speculating(), REPEATS)
    machine.run(make_request(max_tokens=30, speculates=False))

    assert set(machine.depths) == {0}


@pytest.mark.parametrize(
    "options", [{"deterministic": True}, {"kind": SnapshotKind.CHAIN}]
)
def test_memory_and_promises_that_forbid_drafts(options):
    """
    Where wrong drafts cannot be cut, or rows depend on what is beside them, there are none.
    """
    machine = Machine(speculating(**options), REPEATS)
    machine.run(make_request(max_tokens=30))

    assert set(machine.depths) == {0}


@pytest.mark.parametrize("is_exact", [False, True])
def test_rows_with_adapters_have_no_drafts_that_may_change_no_bit(is_exact):
    """
    Their products are libllama's, and depend on how many rows there are.
    """
    lot = Lot("tokens with a=1", adapters=((1, 1.0),))
    machine = Machine(speculating(exact_drafts=is_exact), REPEATS)
    machine.run(make_request(max_tokens=30, lot=lot))

    assert any(machine.depths) is not is_exact


def test_rows_that_cost_too_much_are_not_drafted():
    """
    A step of twice the rows that takes twice the time gains nothing, however right drafts are.
    """
    machine = Machine(speculating(), REPEATS, seconds=float)
    machine.run(make_request(max_tokens=50))

    # A few steps are tried, because nothing was known of their sizes.
    assert sum(map(bool, machine.depths)) <= 6


def flat(n_rows, *, limit, dearer):
    """Steps of up to *limit* rows take a second, larger ones *dearer* times as long."""
    return 1.0 if n_rows <= limit else dearer


@pytest.mark.parametrize(("dearer", "drafts"), [(1.3, False), (1.1, True)])
def test_a_stream_does_not_pay_for_another_one(dearer, drafts):
    """
    One of four has drafts that are right, which slow all. It pays where it gains more, in
    proportion, than the three others lose.
    """

    def next_token(history):
        return REPEATS(history) if history[0] == 50 else 60 + len(history) * 7 % 97

    machine = Machine(
        speculating(4, n_ctx_slot=512, n_batch=512),
        next_token,
        lambda n: flat(n, limit=4, dearer=dearer),
    )
    prompts = [array("i", [first] * 4) for first in (50, 51, 52, 53)]
    machine.run(*[Request(i, prompt, 90) for i, prompt in enumerate(prompts)])

    later = [
        sum(len(work.tokens) - 1 for work in plan.works)
        for plan in machine.plans[10:]
        if len(plan.works) == 4
    ]
    # What nobody knows is tried.
    assert (sum(map(bool, later)) > 4) is drafts


@pytest.mark.parametrize(("dearer", "drafts"), [(1.87, False), (1.77, True)])
def test_drafts_begin_where_they_gain_more_than_a_step_ahead(dearer, drafts):
    """
    Twice the tokens in 1.87 times the time are too little; in 1.77 times they are enough.
    """
    machine = Machine(
        speculating(n_outputs=2), REPEATS, lambda n: flat(n, limit=1, dearer=dearer)
    )
    machine.run(make_request(n_prompt=4, max_tokens=55))

    assert (sum(machine.depths[-20:]) > 5) is drafts


def test_depth_follows_the_measured_seconds():
    """
    Up to four rows cost nothing here, and more cost much: then a step has three drafts.
    """
    machine = Machine(
        speculating(), REPEATS, seconds=lambda n: 1.0 if n <= 4 else float(n)
    )
    machine.run(make_request(n_prompt=2, max_tokens=60))

    assert machine.depths[-9:-3] == [3] * 6


def test_wrong_drafts_end_drafting():
    """
    A text in which nothing comes as before costs a few tries.
    """
    rng = Random(1)  # noqa: S311
    words = [rng.randrange(40, 44) for _ in range(400)]
    machine = Machine(
        speculating(n_ctx_slot=512, n_batch=512),
        lambda history: words[len(history)],
        seconds=lambda n: 1.0 + n / 2,
    )
    (output,) = machine.run(make_request(n_prompt=4, max_tokens=300))

    assert output == words[4:304]
    assert sum(machine.depths) < 40


def test_the_step_after_a_steady_plan_is_begun_already():
    """
    It has no drafts, and after it the plan is not steady until there are none.
    """
    machine = Machine(speculating(), REPEATS)
    machine.run(make_request(n_prompt=4, max_tokens=40))

    steady = [plan.steady for plan in machine.plans]
    drafts = [any(type(w) is Verify for w in plan.works) for plan in machine.plans]
    assert not any(s and d for s, d in zip(steady, drafts[1:], strict=False))
    assert any(drafts)
    assert any(steady)


@pytest.mark.parametrize(("n_streams", "every"), [(1, 1), (3, 3), (8, 5)])
def test_streams_that_repeat_nothing_are_looked_at_less_often(
    n_streams, every, monkeypatch
):
    """
    Each look costs time of all, and many streams gain little by a draft.
    """
    looks, offer = Counter(), Speculation._offer

    def counted(speculation, running):
        looks[len(running.tokens)] += 1
        return offer(speculation, running)

    monkeypatch.setattr(Speculation, "_offer", counted)
    machine = Machine(speculating(n_streams), lambda history: 100 + len(history) % 90)
    machine.run(*(make_request(n, max_tokens=59) for n in range(n_streams)))

    lengths = sorted(looks)
    gaps = {later - length for length, later in pairwise(lengths)}
    assert set(looks.values()) == {n_streams}
    assert gaps == {every}


def test_streams_share_the_rows_that_there_are():
    """
    Steps have at most n_outputs rows, and the likeliest drafts come first.
    """
    machine = Machine(
        make_scheduler(2, speculates=True, n_outputs=6), lambda h: 60 + len(h) % 3
    )
    requests = [make_request(i, n_prompt=3, max_tokens=50) for i in range(2)]

    outputs = machine.run(*requests)
    assert [len(output) for output in outputs] == [50, 50]
    assert max(plan.n_tokens for plan in machine.plans) == 6


def test_there_are_no_drafts_beside_prompts():
    """
    A prompt that comes has the rows of the step.
    """
    machine = Machine(speculating(2, token_budget=8), REPEATS)
    machine.driver.add((make_request(0, max_tokens=55),), 0.0)
    for _ in range(20):
        machine.driver.step()
    machine.driver.add((make_request(1, n_prompt=40, max_tokens=4),), machine.now)
    machine.run()

    kinds = [{type(work).__name__ for work in plan.works} for plan in machine.plans]
    assert {"Verify"} in kinds
    assert not any({"Verify", "Prefill"} <= names for names in kinds)


def test_nothing_follows_an_end():
    """
    A draft ends before a stop token, and the request with it.
    """
    tokens = (50, 51, 52, 53, STOP_TOKEN)
    prompt = array("i", tokens * 5)
    machine = Machine(speculating(), cycle(*tokens))

    ends = frozenset({STOP_TOKEN})
    (output,) = machine.run(Request(0, prompt, 30, stop_token_ids=ends))
    assert output == list(tokens)
    # What a step takes is known after the first one, and the second is begun already.
    assert machine.depths == [0, 0, 1, 0]
    assert finished(machine.events)[0].reason is FinishReason.STOP


def test_a_stop_string_ends_in_the_midst_of_accepted_drafts():
    """
    Tokens behind it are not told, and not counted as accepted.
    """
    letters = [ord(letter) for letter in "abcdefgh"]
    machine = Machine(speculating(n_ctx_slot=128, n_batch=128), cycle(*letters))

    prompt = array("i", letters * 3)
    (output,) = machine.run(Request(0, prompt, 40, stop=StopStrings((b"ha",))))
    assert bytes(output) == b"abcdefgha"
    assert machine.depths == [0, 0, 1, 2, 3, 0]
    end = finished(machine.events)[0]
    assert (end.detail, end.n_accepted) == (StopString("ha"), 4)
    assert machine.scheduler.stats().accepted_tokens == 4


def test_max_tokens_and_a_full_slot_bound_drafts():
    """
    No draft goes beyond the last token or the last position.
    """
    for max_tokens, n_ctx_slot in ((9, 64), (100, 32)):
        scheduler = speculating(n_ctx_slot=n_ctx_slot, n_batch=64)
        machine = Machine(scheduler, REPEATS)
        (output,) = machine.run(make_request(n_prompt=4, max_tokens=max_tokens))

        assert len(output) == min(max_tokens, n_ctx_slot - 4)
        assert finished(machine.events)[0].reason is FinishReason.LENGTH


def test_no_more_is_computed_than_there_are_cells():
    """
    Where cells are short a step has no drafts, and outputs are the same.
    """
    requests = [make_request(i, n_prompt=4, max_tokens=110) for i in range(2)]
    sizes = {"n_slots": 2, "n_ctx_slot": 128, "n_batch": 128}
    machine = Machine(speculating(**sizes, n_cells=140), REPEATS)

    plain = Machine(make_scheduler(**sizes), REPEATS)
    assert machine.run(*requests) == plain.run(*requests)
    assert {end.error for end in finished(machine.events).values()} == {None}
    assert machine.scheduler.stats().preempted > 0
    assert sum(machine.depths) > 0


def test_a_prompt_that_is_not_indexed_yet_has_no_drafts(monkeypatch):
    """
    The index takes in a part a step, then drafts begin.
    """
    monkeypatch.setattr(rules, "MAX_INDEXED", 8)
    machine = Machine(speculating(), REPEATS)
    machine.run(Request(0, array("i", (50, 51, 52, 53) * 8), 20))

    assert machine.depths[:4] == [0] * 4
    assert sum(machine.depths) > 0


@pytest.mark.parametrize(
    "status", [DecodeStatus.ABORTED, DecodeStatus.NO_SPACE, DecodeStatus.FAILED]
)
def test_a_step_with_drafts_that_did_not_work_loses_nothing(status):
    """
    All go on from what is known, and their outputs are the same.
    """
    failures = dict.fromkeys(range(9, 60, 7), status)
    machine = Machine(speculating(2), REPEATS, failures=failures)
    requests = [make_request(i, max_tokens=40) for i in range(2)]

    assert machine.run(*requests) == Machine(make_scheduler(2), REPEATS).run(*requests)


def test_a_row_that_fails_ends_its_request_alone():
    """
    It held drafts, and its neighbour goes on.
    """
    scheduler = speculating(2)
    failed = set()

    def execute(plan):
        outputs = []
        for work in plan.works:
            if type(work) is Verify and not failed:
                failed.add(work.request_id)
                outputs.append(RowFailed(SamplingFailed("fake", None, "as told")))
            else:
                outputs.append(Sampled((97,)))
        return outputs

    scheduler.add_all(
        [make_request(i, max_tokens=30, n_prompt=4) for i in range(2)], 0.0
    )
    _, events = run_until_idle(
        scheduler, lambda plan: StepResult(outputs=tuple(execute(plan)))
    )

    ends = finished(events)
    assert {i for i, end in ends.items() if end.error} == failed
    assert sum(end.n_output for end in ends.values() if not end.error) == 30


def test_a_request_that_ends_while_drafts_are_verified_is_counted():
    """
    Its drafts were computed, whoever wanted them.
    """
    scheduler = speculating()
    machine = Machine(scheduler, REPEATS)
    machine.driver.add((make_request(max_tokens=60),), 0.0)
    while True:
        plan, _ = machine.driver.plan()
        if type(plan.works[-1]) is Verify:
            break
        machine.driver.run(plan)
    machine.driver.cancel(0)
    before = scheduler.stats().drafted_tokens
    machine.driver.run(plan)

    assert scheduler.stats().drafted_tokens - before == plan.n_tokens - 1
    scheduler.check_integrity()


def test_what_a_constraint_forces_is_drafted_first():
    """
    Also where nothing like it was said before.
    """
    scheduler = speculating()
    scheduler.add(make_request(max_tokens=20, n_prompt=4), 0.0)
    plans = []
    text = list(range(30, 60))

    def execute(plan):
        plans.append(plan)
        (work,) = plan.works
        n_before = work.pos + 1 - 4 if type(work) is not Decode else work.pos - 3
        start = max(n_before, 0)
        n_tokens = len(work.tokens) if type(work) is Verify else 1
        stop = start + n_tokens
        return StepResult(
            outputs=(
                Sampled(tuple(text[start:stop]), (), tuple(text[stop : stop + 3])),
            )
        )

    _, events = run_until_idle(scheduler, execute)

    tokens = [t for e in events if isinstance(e, NewTokens) for t in e.tokens]
    assert tokens == text[:20]
    assert max(len(plan.works[-1].tokens) for plan in plans) == 4


@settings(max_examples=60)
@given(st.data())
def test_outputs_are_those_without_drafts(data):
    """
    Of any model that looks at the last tokens, for several requests with stops and limits.
    """
    order = data.draw(st.integers(1, 3))
    table = data.draw(st.lists(st.integers(40, 43), min_size=8, max_size=8))
    n_slots = data.draw(st.integers(1, 3))
    requests = [
        make_request(
            i,
            n_prompt=data.draw(st.integers(2, 20)),
            max_tokens=data.draw(st.integers(1, 40)),
            stop=StopStrings((b"*+*", b"))(("))
            if data.draw(st.booleans())
            else StopStrings(()),
        )
        for i in range(data.draw(st.integers(1, 4)))
    ]
    slope = data.draw(st.sampled_from([0.0, 0.05, 0.3, 1.0]))

    def next_token(history):
        return table[sum(history[-order:]) % len(table)]

    plain = Machine(make_scheduler(n_slots), next_token)
    machine = Machine(speculating(n_slots), next_token, lambda n: 1 + slope * n)

    assert machine.run(*requests) == plain.run(*requests)
    ends, plain_ends = finished(machine.events), finished(plain.events)
    assert {i: (e.reason, e.detail) for i, e in ends.items()} == {
        i: (e.reason, e.detail) for i, e in plain_ends.items()
    }
