"""Prompts with rows that are no text: works, cells and snapshots."""

import pytest

from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.request import (
    FinishReason,
    LengthLimit,
    NewTokens,
)
from pyllama_raw.core.step import (
    Copy,
    Load,
    PrefillSpan,
    Save,
    Trim,
)
from pyllama_raw.errors import BadMedia
from tests.core.span_support import ASKED, IMAGE, WORDS, Engine


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


def test_two_that_show_the_same_image_compute_it_once():
    """
    One computes it, the other one has a copy.
    """
    engine = Engine()
    for last in (120, 121):
        engine.add([*ASKED, last], 1)

    ends = engine.run()

    assert [end.n_output for end in ends.values()] == [1, 1]
    assert sum(n_rows == 16 for _, n_rows in engine.works) == 1


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
    engine = Engine(kind, 8, 10**6, n_slots=1, unified=kind.is_part)
    asked = [*ASKED, *IMAGE, *range(130, 140)]
    for tokens in (asked, list(range(200, 230)), [*asked, 141]):
        engine.add(tokens, 2)
        ends = engine.run()

    assert ends[2].n_cached > 42
    n_behind = 3 if kind.can_cut else 0  # two tokens, and an output
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
    assert sum(isinstance(event, NewTokens) for event in engine.events) == 6 + 100


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
    assert not engine.scheduler.alive


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
    engine.scheduler.memory.cache.clear()
    engine.scheduler.memory.load_tokens = 8
    engine.add([*ASKED, *IMAGE, *range(130, 141)], 1, key=b"k" * 32)
    engine.driver.step()
    engine.read_all()

    ends = engine.run()

    assert ends[3].n_cached == 51
    stops = [load.pieces[-1].stop for load in engine.of(Load)]
    assert stops == [6, 10, 14, 18, 26, 27]
