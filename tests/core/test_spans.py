"""Prompts with rows that are no text: indices, positions and cells."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllama_raw.core.memory.prefix_cache import PrefixCache
from pyllama_raw.core.memory.snapshot_kind import SnapshotKind
from pyllama_raw.core.memory.tier import SnapshotCost, Tier
from pyllama_raw.core.request import (
    CacheTier,
    Delta,
    FinishReason,
    LengthLimit,
    Request,
)
from pyllama_raw.core.scheduler import Scheduler
from pyllama_raw.core.spans import (
    Span,
    are_valid,
    border,
    position,
    span_at,
    text_of,
    whole,
)
from pyllama_raw.core.step import (
    Copy,
    DecodeStatus,
    Load,
    PrefillSpan,
    Save,
    Trim,
)
from pyllama_raw.engine.driver import Driver
from pyllama_raw.errors import BadMedia
from pyllama_raw.testing import FakeExecutor, fake_limits
from pyllama_raw.testing.memory import HEAD_BYTES, TOKEN_BYTES
from tests.core.support import Pieces, finished

IMAGE = [-1] * 16  # 4 x 4 rows that take 4 positions
WORDS = list(range(100, 106))
ASKED = [*WORDS, *IMAGE, *range(110, 114)]  # 6 + 16 + 4 rows


@st.composite
def spans_of(draw):
    """Spans of a prompt, and the number of its rows."""
    spans, index = [], 0
    for _ in range(draw(st.integers(0, 3))):
        start = index + draw(st.integers(0, 4))
        index = start + draw(st.integers(1, 9))
        spans.append(Span(start, index, draw(st.integers(1, index - start))))
    return tuple(spans), index + draw(st.integers(1, 4))


@given(spans_of())
def test_positions_are_those_of_counting(prompt):
    """
    Text counts one each; a span counts as a whole, and is kept as a whole.
    """
    spans, n_rows = prompt
    inside = {i: s for s in spans for i in range(s.start, s.stop)}
    starts, pos = [], 0
    for index in range(n_rows):
        span = inside.get(index)
        starts.append(pos)
        if span is None:
            pos += 1
        elif index == span.stop - 1:
            pos += span.n_pos

    assert are_valid(spans, n_rows)
    assert [position(spans, i) for i in range(n_rows + 3)] == [
        *starts,
        *range(pos, pos + 3),
    ]
    for index in range(n_rows):
        span = inside.get(index)
        later = [s.start for s in spans if s.start > index]
        text = max((s.stop for s in spans if s.stop <= index), default=0)
        kept = index
        if span is not None and index > span.start:
            kept = span.start
        elif span is None and index > text and index + 1 in later:
            kept = index - 1  # else a single token would be left
        assert whole(spans, index) == kept
        end = span.stop if span is not None else min(later, default=None)
        assert border(spans, index) == end
        number = spans.index(span) if span is not None else None
        assert span_at(spans, index) == number
    tokens = array("i", [-1 if i in inside else i for i in range(n_rows)])
    assert list(text_of(tokens, spans)) == [i for i in range(n_rows) if i not in inside]


@pytest.mark.parametrize(
    "spans",
    [
        (Span(0, 4, 5),),  # more positions than rows
        (Span(0, 4, 0),),
        (Span(2, 2, 1),),
        (Span(4, 8, 4), Span(0, 2, 2)),
        (Span(0, 4, 4), Span(3, 6, 3)),
        (Span(6, 10, 4),),  # nothing to sample from
    ],
)
def test_spans_that_no_prompt_can_have(spans):
    """
    They rise, are apart, and text follows the last one.
    """
    assert not are_valid(spans, 10)


class Engine:
    """A driver on the fake executor, which checks each position."""

    def __init__(
        self,
        kind=SnapshotKind.RANGE,
        interval=0,
        max_bytes=0,
        has_files=False,
        **limits,
    ):
        abort = dict.fromkeys(limits.pop("aborts", ()), DecodeStatus.ABORTED)
        options = {
            name: limits.pop(name)
            for name in ("context_full", "token_budget", "prefill_quantum")
            if name in limits
        }
        limits = fake_limits(kind=kind, **limits)
        self.executor = FakeExecutor(limits, failures=abort)
        disk = None
        if has_files:
            files = PrefixCache(SnapshotKind.STATE, max_bytes=10**6, max_entries=9)
            disk = Tier(
                CacheTier.DISK, files, SnapshotCost(HEAD_BYTES, TOKEN_BYTES).bound
            )
            disk.min_gain = 8
        self.scheduler = Scheduler(
            limits,
            Pieces(),
            cache=PrefixCache(kind, max_bytes=max_bytes, max_entries=9),
            snapshot_cost=SnapshotCost(HEAD_BYTES, TOKEN_BYTES),
            snapshot_interval_tokens=interval,
            disk=disk,
            **options,
        )
        self.events = []
        self.driver = Driver(self.scheduler, self.executor, lambda: 0.0, self._take)
        self._n_added = 0

    def add(self, tokens, max_tokens=3, n_pos=4, *, is_ready=True, **fields):
        """*tokens* in which IMAGE takes *n_pos* positions."""
        kind = {
            "is_causal": fields.pop("is_causal", True),
            "key": fields.pop("key", b""),
        }
        runs = [i for i in range(len(tokens)) if tokens[i : i + 16] == IMAGE]
        spans = tuple(Span(i, i + 16, n_pos, **kind) for i in runs)
        number = self._n_added
        request = Request(number, array("i", tokens), max_tokens, spans=spans, **fields)
        self.driver.add([request], 0.0)
        self._n_added += 1
        if is_ready:
            assert self.driver.media_ready(number, len(spans))
        return number

    def run(self):
        """Until there is nothing to do; the ends of all requests."""
        for _ in range(1000):
            if not self.driver.step():
                return finished(self.events)
            self.scheduler.check_integrity()
        raise AssertionError("not idle")

    def write_all(self):
        while self.executor.memory.writing:
            self.scheduler.take_report(self.executor.memory.end_write())

    def read_all(self):
        while self.executor.memory.reading:
            self.scheduler.take_report(self.executor.memory.end_fetch())

    def _take(self, events, _):
        self.events += events

    @property
    def works(self) -> list[tuple[int, int]]:
        """Position and number of tokens of each."""
        plans = self.executor.plans
        return [(work.pos, len(work.tokens)) for p in plans for work in p.works]

    def of(self, kind) -> list:
        return [
            move
            for p in self.executor.plans
            for move in p.moves
            if isinstance(move, kind)
        ]


def test_text_goes_on_after_the_positions_of_an_image():
    """
    Its rows are a work of their own; 16 of them take 16 cells and 4 positions.
    """
    engine = Engine()
    engine.add(ASKED, 2)

    [end] = engine.run().values()

    assert engine.works == [(0, 6), (6, 16), (10, 4), (14, 1)]
    assert end.n_output == 2
    assert engine.executor.memory.n_used == len(ASKED) + 1
    assert engine.scheduler.stats().n_cells_used == len(ASKED) + 1


def test_an_image_that_is_asked_about_again_is_not_computed_again():
    """
    Another question goes on behind the image, in the same slot or in a copy.
    """
    engine = Engine()
    engine.add(ASKED, 2)
    engine.run()
    engine.add([*WORDS, *IMAGE, 120, 121, 122], 2)

    ends = engine.run()

    assert ends[1].n_cached == 22
    assert engine.of(Copy) == [Copy(0, 1, 10)]


def test_an_image_is_taken_over_whole_or_not_at_all():
    """
    A question that ends right behind it computes it anew, because two tokens are left.
    """
    engine = Engine()
    engine.add([*WORDS, *IMAGE, 120], 2)
    engine.run()
    engine.add([*WORDS, *IMAGE, 121], 2)

    ends = engine.run()

    assert ends[1].n_cached == 6
    assert engine.of(Trim) == [Trim(0, 6)]


def test_an_abort_inside_an_image_computes_it_anew():
    """
    The slot is cut where the image begins: nothing else would be possible.
    """
    engine = Engine(n_batch=8, n_slots=2, aborts=range(2, 6, 2))
    engine.add(ASKED)

    [end] = engine.run().values()

    assert end.reason is FinishReason.LENGTH
    assert {trim.n_pos for trim in engine.of(Trim)} == {6}


@pytest.mark.parametrize("kind", SnapshotKind)
def test_snapshots_hold_images_whole(kind):
    """
    What was captured of a prompt with images serves the next one, at the same positions.
    """
    engine = Engine(kind, 8, 10**6, n_slots=1, unified=kind is SnapshotKind.RANGE)
    asked = [*ASKED, *IMAGE, *range(130, 140)]
    for tokens in (asked, list(range(200, 230)), [*asked, 141]):
        engine.add(tokens, 2)
        ends = engine.run()

    assert ends[2].n_cached > 42
    n_behind = 0 if kind is SnapshotKind.EXACT else 3  # two tokens, and an output
    assert 26 + n_behind in {save.stop for save in engine.of(Save)}
    assert engine.of(Load)[-1].pieces[-1].stop == engine.of(Load)[-1].last_pos + 1


def test_a_slot_with_an_image_that_is_full_ends_its_request():
    """
    Also where text would drop its older half: half an image is none.
    """
    engine = Engine(context_full="shift", n_ctx_slot=32)
    engine.add(ASKED, 100)
    engine.add(WORDS, 100)

    ends = engine.run()

    assert ends[0].detail is LengthLimit.SLOT
    assert ends[1].detail is LengthLimit.MAX_TOKENS
    assert sum(isinstance(event, Delta) for event in engine.events) == 6 + 100


def test_an_image_is_waited_for_while_text_before_it_is_computed():
    """
    Others go on meanwhile; nothing of the image is computed before its rows are there.
    """
    engine = Engine()
    engine.add(ASKED, 2, is_ready=False)
    engine.add(WORDS, 4)

    ended_before = list(engine.run())
    works = list(engine.works)
    engine.driver.media_ready(0, 1)
    ends = engine.run()

    assert ended_before == [1]
    assert works[:2] == [(0, 6), (0, 6)]
    assert engine.works[len(works) :] == [(6, 16), (10, 4), (14, 1)]
    assert ends[0].n_preempted == 0


def test_who_waits_for_rows_holds_no_slot_that_others_want():
    """
    It comes back when they are there, and goes on in the slot that it had.
    """
    engine = Engine(n_slots=1, n_parked=1)
    engine.add(ASKED, 2, is_ready=False)
    engine.run()
    engine.add([200, 201, 202], 2)
    [other] = engine.run()
    n_works = len(engine.works)
    load = engine.scheduler.occupancy[:2]
    engine.driver.media_ready(0, 1)

    ends = engine.run()

    assert other == 1
    assert load == (0, 1)
    assert ends[0].n_output == 2
    assert ends[0].n_cached == 0
    assert engine.works[n_works:] == [(6, 16), (10, 4), (14, 1)]


def test_a_request_whose_rows_never_come_ends_alone():
    """
    It may be running or have given up its slot; what is told of it later is of nobody.
    """
    engine = Engine(n_slots=1)
    error = BadMedia("it is damaged", 0)
    engine.add(ASKED, is_ready=False)
    engine.run()
    engine.add(ASKED, is_ready=False)
    engine.run()

    told = [engine.driver.fail(number, error) for number in (0, 1, 1)]
    told.append(engine.driver.media_ready(0, 1))

    ends = engine.run()
    assert told == [True, True, False, False]
    assert [end.error for end in ends.values()] == [error, error]
    assert engine.scheduler.stats().failed == 2


def test_a_deadline_ends_who_waits_for_rows():
    """
    Also if it has given up its slot.
    """
    engine = Engine(n_slots=1)
    engine.add(ASKED, is_ready=False, deadline=1.0)
    engine.run()
    engine.add(WORDS, 1)
    engine.run()
    assert engine.scheduler.next_deadline == 1.0

    engine.scheduler.schedule(2.0)

    [end] = finished(engine.scheduler.take_events()).values()
    assert end.reason is FinishReason.DEADLINE


def test_two_that_wait_for_the_same_image_compute_it_once():
    """
    Its rows come for both; one computes them, the other one has a copy.
    """
    engine = Engine()
    for last in (120, 121):
        engine.add([*ASKED, last], 1, is_ready=False)
    engine.run()
    for number in range(2):
        engine.driver.media_ready(number, 1)

    ends = engine.run()

    assert [end.n_output for end in ends.values()] == [1, 1]
    assert sum(n_rows == 16 for _, n_rows in engine.works) == 1


def test_an_image_that_is_cached_needs_no_rows():
    """
    What a slot holds of it is taken over although its rows are not there.
    """
    engine = Engine()
    engine.add(ASKED, 1)
    engine.run()
    engine.add([*ASKED, 120, 121], 1, is_ready=False)

    ends = engine.run()

    assert ends[1].n_cached == len(ASKED)


@pytest.mark.parametrize("is_in_slot", [True, False])
def test_rows_that_the_cache_has_are_spared(is_in_slot):
    """
    They are not computed, also where they count as ready.
    """
    engine = Engine(n_slots=1, max_bytes=10**6)
    engine.add(ASKED, 1)
    engine.run()
    if not is_in_slot:
        engine.add([200, 201, 202], 1)
        engine.run()
    number = engine.add([*ASKED, *IMAGE, *WORDS], 1, is_ready=False)

    told = [engine.scheduler.spare(number), engine.scheduler.spare(9)]
    engine.driver.media_ready(number, 2)
    end = engine.run()[number]

    assert told == [1, 0]
    assert (end.n_cached, end.cache_tier) == (len(ASKED), ("host", "live")[is_in_slot])
    assert engine.scheduler.take_wanted() == []
    assert sum(n_rows == 16 for _, n_rows in engine.works) == 2


@pytest.mark.parametrize(("n_common", "n_left"), [(0, 0), (22, 1)])
def test_rows_that_the_cache_loses_are_wanted(n_common, n_left):
    """
    The slot goes to another prompt before the request has it. What was lost is computed
    when its rows are ready anew.
    """
    engine = Engine(n_slots=1)
    asked = [*ASKED, *IMAGE, *WORDS]
    engine.add(asked, 1)
    engine.run()
    engine.add(asked, 1, is_ready=False)
    spared = engine.scheduler.spare(1)
    engine.driver.media_ready(1, 2)
    engine.add([*asked[:n_common], *range(200, 206)], 1, priority=-1)

    ended_before = list(engine.run())
    wanted = engine.scheduler.take_wanted()
    n_works = len(engine.works)
    engine.driver.media_ready(1, 2)
    ends = engine.run()

    assert (spared, ended_before, wanted) == (2, [0, 2], [(1, n_left)])
    assert ends[1].n_output == 1
    n_rows = [n for _, n in engine.works[n_works:]]
    assert n_rows.count(16) == 2 - n_left


def test_rows_share_no_step_with_tokens():
    """
    Streams and rows of images take turns; rows of several images go together.
    """
    engine = Engine(n_batch=20, n_slots=3)
    engine.add(WORDS, 12)
    engine.driver.step()
    engine.add([101, 102, *IMAGE, 103], 1)
    engine.add([103, 104, *IMAGE, 103], 1)

    engine.run()

    kinds = [{type(work) for work in plan.works} for plan in engine.executor.plans]
    assert all(len(kind) == 1 or PrefillSpan not in kind for kind in kinds)
    at = [i for i, kind in enumerate(kinds) if kind == {PrefillSpan}]
    assert at == list(range(at[0], at[0] + 2 * len(at), 2))
    assert any(len(engine.executor.plans[i].works) == 2 for i in at)


def test_rows_that_see_each_other_are_one_step():
    """
    Whatever the budget of a step is, and one image a step.
    """
    engine = Engine(n_batch=32, token_budget=4)
    for last in (120, 121):
        engine.add([last, last, *IMAGE, 122], 1, n_pos=16, is_causal=False)

    engine.run()

    plans = [plan for plan in engine.executor.plans if plan.lot.is_whole]
    assert [(len(plan.works), plan.n_tokens) for plan in plans] == [(1, 16)] * 2


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_whole_image_gets_its_cells(deterministic):
    """
    If they are not free, somebody is computed again later; who fits alone is not ended.
    """
    engine = Engine(n_cells=26, n_slots=2, n_ctx_slot=26, deterministic=deterministic)
    for last in (120, 121):
        tokens = [last, last, *IMAGE, 122, 123]
        engine.add(tokens, 4, n_pos=16, is_causal=False, namespace=last)

    ends = engine.run()

    assert [end.n_output for end in ends.values()] == [4, 4]


def test_an_image_that_no_step_can_compute_is_refused():
    """
    Its rows see each other, and are more than a micro-batch.
    """
    engine = Engine(n_ubatch=8)

    with pytest.raises(BadMedia, match="n_ubatch lets 8 be") as caught:
        engine.add([1, 2, *IMAGE, 3], is_causal=False)

    assert caught.value.index == 0
    assert not engine.scheduler.has_work


def test_a_file_is_loaded_in_portions_that_hold_images_whole():
    """
    Others go on meanwhile; what is asked of the file ends before or behind an image.
    """
    engine = Engine(n_slots=2, n_parked=0, max_bytes=10**6, has_files=True)
    engine.add([*ASKED, *IMAGE, *range(130, 140)], 1, key=b"k" * 32)
    engine.run()
    for first in (200, 300):
        engine.add(list(range(first, first + 40)), 60)
        engine.driver.step()
    engine.driver.cancel(1)
    engine.write_all()
    engine.scheduler._memory.cache.clear()
    engine.scheduler._memory.restores.load_tokens = 8
    engine.add([*ASKED, *IMAGE, *range(130, 141)], 1, key=b"k" * 32)
    engine.driver.step()
    engine.read_all()

    ends = engine.run()

    assert ends[3].n_cached == 51
    stops = [load.pieces[-1].stop for load in engine.of(Load)]
    assert stops == [6, 10, 14, 18, 26, 27]
