"""CPU time of decodes, as the compute thread counts it."""

import pytest

from pyllama_raw import SamplingParams
from pyllama_raw.api.blocking import Engine
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native


def test_decodes_count_their_cpu_time():
    """
    There is some, and one thread has no more of it than the time that went by.
    """
    with Engine.open(tiny_model("llama")) as engine:
        engine.complete("Count on:", SamplingParams(max_tokens=16, ignore_eos=True))
        stats = engine.stats()

    assert 0 < stats.decode_cpu_s <= stats.decode_s
