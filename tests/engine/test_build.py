"""How the sequences of a context are divided; no model is loaded."""

from types import SimpleNamespace

import pytest

from pyllama_raw import CacheConfig, ConfigError, EngineConfig, SchedulerConfig
from pyllama_raw.engine.layout import layout_of

ATTENTION = SimpleNamespace(is_recurrent=False, is_hybrid=False, n_swa=0)


def sequences(n_slots: int, **cache: object) -> tuple[int, int, int]:
    config = EngineConfig(
        scheduler=SchedulerConfig(n_slots=n_slots), cache=CacheConfig(**cache)
    )
    layout = layout_of(ATTENTION, config)
    return layout.n_slots, layout.n_parked, layout.n_scratch


def test_idle_slots_are_parked_as_far_as_there_are_sequences():
    """
    libllama has 256; slots go first, and no number is ever negative.
    """
    assert sequences(8, mode="live") == (8, 16, 0)
    assert sequences(200, mode="live") == (200, 56, 0)
    assert sequences(256, mode="live") == (256, 0, 0)
    assert sequences(255) == (255, 0, 1)


def test_snapshots_need_a_sequence_of_their_own():
    """
    256 slots leave none: the error names both ways out.
    """
    with pytest.raises(ConfigError, match=r"n_slots=256 .* at most 255, or .*live"):
        sequences(256)
