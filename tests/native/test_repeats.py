"""
The same request twice gives the same bits with default options, when nothing else runs.

Wherever its prompt is taken from, whatever other slots hold and however it is cut.
"""

from array import array

import numpy as np
import pytest

from pyllama_raw.core.request import CacheTier
from tests.support.last_digits import is_usable
from tests.support.player import Played, playing
from tests.support.tiny import GENERATING, tiny_model

pytestmark = pytest.mark.native

DEFAULT = "default model"
# Of gpt-oss, whose attention has sinks, libllama computes attention by kernels that depend on
# how many tokens are computed at once.
NAMES = [*[r.name for r in GENERATING if r.name != "gpt-oss"], DEFAULT]


@pytest.fixture(autouse=True)
def _usable():
    if not is_usable("attention"):
        pytest.skip("libllama computes attention here, which depends on the batch")


@pytest.fixture
def play(request):
    """Makes a player of a tiny model or of the default one, as engines are by default."""

    def make(name, **options):
        path = tiny_model(name) if name != DEFAULT else None
        path = path or request.getfixturevalue("model_path")
        return playing(path, deterministic=False, **options)

    return make


def make_tokens(seed: int, n_tokens: int) -> array:
    return array("i", np.random.default_rng(seed).integers(3, 200, n_tokens).tolist())


PROMPT, OTHERS = make_tokens(1, 98), [make_tokens(2, 30), make_tokens(3, 60)]


def assert_same(again: Played, cold: Played, *tiers: CacheTier | None) -> None:
    assert again.end.cache_tier in tiers
    assert again.tokens == cold.tokens
    for logits, expected in zip(again.logits, cold.logits, strict=True):
        assert np.array_equal(logits, expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_live_prompt_repeats(play, name):
    """
    At once, and when the cells below its own have become free, which its end then takes.
    """
    with play(name, n_slots=4) as player:
        for other in OTHERS:
            player.play(other, namespace="others")
        cold = player.play(PROMPT)

        assert_same(player.play(PROMPT), cold, CacheTier.LIVE, CacheTier.HOST)
        player.parts.scheduler.clear_cache("others")
        assert_same(player.play(PROMPT), cold, CacheTier.LIVE, CacheTier.HOST)


@pytest.mark.parametrize("name", NAMES)
def test_a_kept_prompt_repeats(play, name, tmp_path):
    """
    From host memory, from a file, and where nothing is kept, in chunks of other sizes.
    """
    kept = {"n_slots": 1, "parked_slots": 0, "directory": tmp_path}
    with play(name, mode="off") as player:
        cold = player.play(PROMPT)
    with play(name, token_budget=33, **kept) as player:
        assert_same(player.play(PROMPT), cold, None)
        player.play(OTHERS[0])
        assert_same(player.play(PROMPT), cold, CacheTier.HOST)
        player.play(OTHERS[1])
        player.parts.scheduler.memory.cache.clear()
        assert_same(player.play(PROMPT), cold, CacheTier.DISK)
