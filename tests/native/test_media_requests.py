"""
Prompts with images and sounds on the whole of scheduler and executor.

The measure is mtmd's own helper, on the same context when it is empty: bit for bit, wherever
the prompt comes from. Unified memory is never deterministic: where libllama computes attention
in it, the last digits depend on how many rows are computed at once; there is a tolerance.
"""

from array import array
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from pyllama_raw.core.request import CacheTier
from pyllama_raw.core.sequence import HEADROOM
from tests.native.media_player import MediaPlayer, Prompt, playing_media
from tests.support.last_digits import assert_near
from tests.support.products import in_turn
from tests.support.tiny import PROJECTORS

pytestmark = pytest.mark.native

LAYOUTS = {
    "unified": {"deterministic": False, "kv_unified": True},
    "split": {"deterministic": True},
}
TOLERANCE = 5e-3
SMALL = 20  # tokens of a step: chunks end inside of images and sounds
QUESTION = " and there again"


def assert_same(layout: str, found: NDArray, expected: NDArray) -> None:
    if layout == "split":
        np.testing.assert_array_equal(found, expected)
    else:
        assert_near(found, expected, 0)


def cold(player: MediaPlayer, prompt: Prompt) -> int:
    return player.play(prompt)


def live(player: MediaPlayer, prompt: Prompt) -> int:
    """Behind another question about the same image, or its own beginning."""
    earlier = player.prompt(after=QUESTION)
    limits = player.parts.scheduler.limits
    if not limits.kind.can_cut:
        n_tokens = limits.n_movable(len(prompt.tokens) - 3)
        earlier = replace(prompt, tokens=prompt.tokens[:n_tokens])
    player.play(earlier, 1)
    return player.play(prompt)


def host(player: MediaPlayer, prompt: Prompt) -> int:
    """From a snapshot, because somebody else had the slot."""
    player.play(player.prompt(after=QUESTION))
    player.play_text(30)
    return player.play(prompt)


def preempted(player: MediaPlayer, prompt: Prompt) -> int:
    """After half of the prompt; computed again from the start."""
    number = player.add(prompt)
    while sum(n for _, n in player.works) < len(prompt.tokens) // 2:
        assert player.step()
    scheduler = player.parts.scheduler
    [running] = scheduler._roster.slots.running.values()
    scheduler._roster.preempt(running, 0.0)
    scheduler.clear_cache()
    player.run()
    assert player.ends[number].n_preempted == 1
    return number


ONE_SLOT = {"n_slots": 1, "parked_slots": 0}
WAYS: dict[Callable[[MediaPlayer, Prompt], int], tuple[dict, CacheTier | None]] = {
    cold: ({"token_budget": 512}, None),
    live: ({"token_budget": 512, "n_slots": 2}, CacheTier.LIVE),
    host: ({"token_budget": SMALL, **ONE_SLOT}, CacheTier.HOST),
    preempted: ({"token_budget": SMALL}, None),
}


@pytest.mark.parametrize(
    ("name", "layout", "way"),
    in_turn(
        tuple(PROJECTORS),
        tuple(LAYOUTS),
        tuple(WAYS),
        always=lambda name, *_: name in ("gemma3", "qwen2vl"),
    ),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_logits_are_those_of_the_helper(name, layout, way):
    """
    The logits after the prompt are those of mtmd_helper_eval_chunks.
    """
    options, tier = WAYS[way]
    with playing_media(name, **LAYOUTS[layout], **options) as player:
        prompt = player.prompt()
        number = way(player, prompt)
        end, found = player.ends[number], player.logits[number][0]

        expected = player.expected(prompt)

    assert end.cache_tier is tier
    assert end.n_output == 4
    if tier is not None:
        assert end.n_cached >= prompt.spans[-1].stop
    assert_same(layout, found, expected)


@pytest.mark.parametrize(("name", "layout"), in_turn(tuple(PROJECTORS), tuple(LAYOUTS)))
def test_a_later_engine_finds_the_prompt_in_a_file(tmp_path, name, layout):
    """
    With the image in it, whose rows need not be there; the logits are those of the helper.
    """
    options = {"directory": tmp_path, "token_budget": SMALL, **ONE_SLOT}
    options |= {"max_entries": 100, **LAYOUTS[layout]}
    with playing_media(name, **options) as player:
        player.set_min_gain(2)
        player.play(player.prompt(after=QUESTION))
        player.play_text(30)
    with playing_media(name, **options) as player:
        player.set_min_gain(2)
        player.keys.number(b"another image than in the first engine")
        prompt = player.prompt()
        number = player.play(prompt)
        end, found = player.ends[number], player.logits[number][0]
        n_rows = player.n_computed_rows()

        expected = player.expected(prompt)

    assert end.cache_tier is CacheTier.DISK
    assert n_rows == 0
    assert_same(layout, found, expected)


@pytest.mark.parametrize("name", PROJECTORS)
def test_steps_ahead_go_on_at_the_positions_behind_an_image(name):
    """
    Tokens of streams whose next steps are begun ahead are those of single steps.
    """
    with playing_media(name, **LAYOUTS["split"]) as player:
        single = player.play(player.prompt(), 12)
    with playing_media(name, **LAYOUTS["split"]) as player:
        player.goes_ahead = True

        ahead = player.play(player.prompt(), 12)

        assert player.tokens[ahead] == player.tokens[single]
        assert len(player.tokens[ahead]) == 12


@pytest.mark.parametrize("name", PROJECTORS)
def test_an_abort_within_an_image_loses_it_alone(name):
    """
    Its rows are computed again; what stands before it is kept where memory can be cut.
    """
    with playing_media(name, token_budget=SMALL, **LAYOUTS["split"]) as player:
        prompt = player.prompt()
        player.aborts_in_span = True

        number = player.play(prompt)

        counters, found = player.parts.scheduler.stats(), player.logits[number][0]
        expected = player.expected(prompt)
    assert counters.aborted_steps == 1
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", PROJECTORS)
def test_the_same_image_in_two_requests_is_computed_once(name):
    """
    Whether they come together or one after the other; another image is computed.
    """
    with playing_media(name, n_slots=2, **LAYOUTS["unified"]) as player:
        n_rows = sum(span.stop - span.start for span in player.prompt().spans)
        player.parts.scheduler.memory.min_wait = 2
        for _ in range(2):
            player.add(player.prompt())
        player.run()
        player.play(player.prompt(after=QUESTION))
        n_same = player.n_computed_rows()
        player.play(player.prompt(seed=1))

        assert (n_same, player.n_computed_rows()) == (n_rows, n_rows)


@pytest.mark.parametrize(
    ("name", "layout", "max_bytes"),
    in_turn(
        tuple(PROJECTORS),
        tuple(LAYOUTS),
        (2**26, 0),  # swapped, or computed again
    ),
)
def test_requests_that_lose_their_slots_go_on_as_if_alone(name, layout, max_bytes):
    """
    More urgent ones come while they run; split, their tokens are those of a calm run.
    """
    options = {"preempt": "priority", "max_bytes": max_bytes, **LAYOUTS[layout]}
    with playing_media(name, n_slots=2, **options) as player:
        prompts = [player.prompt(seed) for seed in range(4)]
        alone = [player.play(prompt, 12) for prompt in prompts]
        player.parts.scheduler.clear_cache()
        pressed = []
        for number, prompt in enumerate(prompts):
            pressed.append(player.add(prompt, 12, priority=-number))
            for _ in range(5):
                assert player.step()
        player.run()
        stats = player.parts.scheduler.stats()

    assert stats.preempted > 0
    assert max_bytes > 0 or stats.swapped == 0  # else whichever is sooner
    for one, other in zip(alone, pressed, strict=True):
        if layout == "split":
            assert player.tokens[other] == player.tokens[one]
        assert_alike(player, other, one)


@pytest.mark.parametrize("max_bytes", [2**26, 0], ids=["swapped", "computed again"])
@pytest.mark.parametrize("name", PROJECTORS)
def test_requests_for_which_cells_run_out_go_on_as_if_alone(name, max_bytes):
    """
    Two prompts leave the cells of one pool that admission asks for, and the outputs are longer.
    """
    n_ctx = {"ultravox": 1024, "qwen2a": 1792}.get(name, 512)
    n_output = HEADROOM + 40
    options = {"n_ctx": n_ctx, "max_bytes": max_bytes, **LAYOUTS["unified"]}
    with playing_media(name, **options) as player:
        prompts = [
            filled(player.prompt(seed), n_ctx // 2 - HEADROOM) for seed in range(2)
        ]
        alone = [player.play(prompt, n_output) for prompt in prompts]
        player.parts.scheduler.clear_cache()
        calm = player.parts.scheduler.stats()
        pressed = [player.add(prompt, n_output) for prompt in prompts]
        player.run()
        stats = player.parts.scheduler.stats()

    assert (calm.preempted, stats.preempted) == (0, 1)
    assert max_bytes > 0 or stats.swapped == 0
    for one, other in zip(alone, pressed, strict=True):
        assert_alike(player, other, one)


def filled(prompt: Prompt, n_tokens: int) -> Prompt:
    """With so many tokens, text behind what it has."""
    more = [3 + i * 7 % 150 for i in range(n_tokens - len(prompt.tokens))]
    return replace(prompt, tokens=prompt.tokens + array("i", more))


def assert_alike(player: MediaPlayer, number: int, other: int) -> None:
    """Streams side by side have other last digits, so a near tie may part their tokens."""
    tokens, expected = player.tokens[number], player.tokens[other]
    for index, logits in enumerate(player.logits[number]):
        assert_near(logits, player.logits[other][index], TOLERANCE)
        if tokens[index] != expected[index]:
            break
    assert len(tokens) == len(player.logits[number]) == len(expected)
