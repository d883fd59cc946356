"""The table of our kernels, and who is told which of them compute."""

import pytest

from pyllama_raw.native.kernels import table
from tests.player import playing
from tests.tiny import tiny_model

pytestmark = pytest.mark.native


def test_each_kind_has_a_row_and_names_its_cpu():
    """
    Attention and each type of weights that we multiply; what needs more comes first.
    """
    rows = table()

    kinds = [row.computes for row in rows]
    assert kinds == [
        "attention",
        "attention",
        "columns",
        "f32",
        "f16",
        "gelu",
        "norm",
        "halves",
        *("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k"),
        *("q2_k", "q3_k", "iq4_nl", "iq4_xs", "mxfp4"),
    ]
    assert all(row.needs for row in rows)
    ours = [row.is_usable for row in rows if row.computes != "columns"]
    assert rows[1].is_usable or not any(ours)


@pytest.mark.parametrize("fast_kernels", [True, False])
def test_an_engine_tells_which_kernels_compute_it(fast_kernels):
    """
    Those that took something of its first decode; none if they are switched off.
    """
    options = {"deterministic": False, "fast_kernels": fast_kernels}
    usable = [row for row in table() if row.is_usable and row.computes == "attention"]
    expected = {row.computes: row.needs for row in usable[:1]} if fast_kernels else {}

    with playing(tiny_model("llama"), **options) as player:
        assert player.parts.describe().kernels == expected
