"""Prompts with rows that are no text: indices, positions and cells."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllama_raw.core.memory.prefix_cache import PrefixCache
from pyllama_raw.core.memory.snapshot_kind import SnapshotKind
from pyllama_raw.core.memory.tier import SnapshotCost
from pyllama_raw.core.request import Delta, FinishReason, LengthLimit, Request
from pyllama_raw.core.scheduler import Scheduler
from pyllama_raw.core.spans import Span, are_valid, border, position, whole
from pyllama_raw.core.step import Copy, DecodeStatus, Load, Save, Trim
from pyllama_raw.engine.driver import Driver
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
        is_within = span is not None and index > span.start
        assert whole(spans, index) == (span.start if is_within else index)
        later = [s.start for s in spans if s.start > index]
        end = span.stop if span is not None else min(later, default=None)
        assert border(spans, index) == end


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

    def __init__(self, kind=SnapshotKind.RANGE, interval=0, max_bytes=0, **limits):
        abort = dict.fromkeys(limits.pop("aborts", ()), DecodeStatus.ABORTED)
        n_keep = {"context_full": limits.pop("context_full", "stop")}
        limits = fake_limits(kind=kind, **limits)
        self.executor = FakeExecutor(limits, failures=abort)
        self.scheduler = Scheduler(
            limits,
            Pieces(),
            cache=PrefixCache(kind, max_bytes=max_bytes, max_entries=9),
            snapshot_cost=SnapshotCost(HEAD_BYTES, TOKEN_BYTES),
            snapshot_interval_tokens=interval,
            **n_keep,
        )
        self.events = []
        self._driver = Driver(self.scheduler, self.executor, lambda: 0.0, self._take)
        self._n_added = 0

    def add(self, tokens, max_tokens=3, n_pos=4):
        """*tokens* in which IMAGE takes *n_pos* positions."""
        runs = [i for i in range(len(tokens)) if tokens[i : i + 16] == IMAGE]
        spans = tuple(Span(i, i + 16, n_pos) for i in runs)
        request = Request(self._n_added, array("i", tokens), max_tokens, spans=spans)
        self._driver.add([request], 0.0)
        self._n_added += 1

    def run(self):
        """To the end; the ends of all requests."""
        for _ in range(1000):
            if not self._driver.step():
                return finished(self.events)
            self.scheduler.check_integrity()
        raise AssertionError("not idle")

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
