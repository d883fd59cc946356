"""What the routers said, and that a fault is not taken for a near tie of experts."""

import numpy as np
import pytest

from pyllama_raw.engine.operations import SlotOperations
from tests.support.conversations import converse
from tests.support.experts import Parting, parting
from tests.support.player import playing
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

MODELS = ["llama-moe", "qwen3moe", "gpt-oss"]
FIRST, TIE, OTHER = [3, 2, 1, 0], [3, 1.9, 2, 0], [0, 1, 2, 3]
UNIFIED = {"deterministic": False, "n_ctx": 400}


def scores(*tokens) -> np.ndarray:
    return np.array(tokens, np.float32)


def test_equal_choices_do_not_part():
    run = scores([FIRST, OTHER], [OTHER, FIRST])
    assert parting(run, run + 0.3) is None


def test_parting_is_where_the_first_choice_differs():
    mine = scores([FIRST, FIRST], [FIRST, TIE])
    others = scores([FIRST, FIRST], [FIRST, FIRST])
    assert parting(mine, others) == Parting(1, 1.0)
    assert parting(others, mine) == Parting(1, pytest.approx(0.1))


@pytest.mark.parametrize("token", [0, 1])
def test_what_an_earlier_choice_caused_has_no_margin(token):
    mine = scores([TIE, FIRST], [FIRST, FIRST])
    others = scores([FIRST, FIRST], [FIRST, FIRST])
    others[token, 1] = OTHER
    assert parting(others, mine) == Parting(0, pytest.approx(0.1))


@pytest.mark.parametrize("place", [(1, 0), (0, 0)])
def test_a_choice_without_a_cause_has_one(place):
    mine = scores([FIRST, TIE], [FIRST, FIRST])
    others = scores([FIRST, FIRST], [FIRST, FIRST])
    others[place] = OTHER
    assert parting(others, mine) == Parting(0, 3.0)


def test_tokens_without_scores_do_not_count():
    mine, others = scores([FIRST]), scores([OTHER])
    mine[0, 0] = np.nan
    assert parting(mine, others) is None


@pytest.mark.parametrize("name", MODELS)
def test_routers_are_heard(name):
    """
    Every layer, every token, whole prompt or in chunks; the last layer of the last token
    of a chunk only.
    """
    prompt = list(range(3, 63))
    with playing(tiny_model(name), hears_routers=True, mode="off", **UNIFIED) as whole:
        at_once = whole.scores(whole.play(prompt))
    options = {"token_budget": 23, "mode": "off"} | UNIFIED
    with playing(tiny_model(name), hears_routers=True, **options) as player:
        played = player.play(prompt)
        in_chunks = player.scores(played)

    assert at_once.shape == in_chunks.shape == (60 + len(played.tokens) - 1, 2, 4)
    assert np.isfinite(in_chunks[:, 0]).all()
    assert np.isfinite(in_chunks[59:]).all()
    assert np.ptp(in_chunks[:, 0]) > 1
    assert np.nanmax(np.abs(at_once - in_chunks)) < 0.05


@pytest.mark.parametrize("name", MODELS)
def test_a_fault_of_the_cache_is_found(name, monkeypatch):
    """
    The end of each snapshot is lost: values of the last layer.
    """
    saved = SlotOperations._saved_state

    def lossy(self, slot, max_bytes):
        payload = saved(self, slot, max_bytes)
        if payload is not None:
            n_lost = len(payload) // 16
            payload[-n_lost:] = bytes(n_lost)
        return payload

    monkeypatch.setattr(SlotOperations, "_saved_state", lossy)
    report = converse(tiny_model(name), 8, 1, 0.1, hears_routers=True, **UNIFIED)
    assert report.n_wrong > 5
