"""The table of our kernels, and who is told which of them compute."""

import json
import os
import subprocess
import sys

import pytest

from pyllama_raw.native.kernels import table
from tests.support.player import playing
from tests.support.tiny import tiny_model

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


def test_products_of_floats_are_left_to_wider_vectors_of_libllama():
    """
    A CPU with AVX-512 is told so, and not that it is another one.
    """
    rows = table()
    has_avx512 = rows[0].is_usable
    reasons = {row.why_not for row in rows if row.needs.endswith("at most")}

    assert ("libllama uses AVX-512 for them on this CPU" in reasons) is has_avx512


ONLY = """
import json, sys
from pyllama_raw import _ffi
_, lib = _ffi.load()
lib.plr_cpu_only(*json.loads(sys.argv[1]))
from pyllama_raw.native.kernels import table, woven_levels
needs = sorted({row.needs for row in table() if row.is_usable})
print(json.dumps([needs, woven_levels()]))
"""


@pytest.mark.parametrize(
    ("sets", "without"),
    [
        ((False, False, False, False), ("AVX2", "AVX-512")),
        ((True, False, False, False), ("VNNI", "AVX-512")),
    ],
)
def test_kernels_do_without_what_a_variant_lacks(sets, without):
    """
    Of AVX2, AVX-VNNI, AVX-512 with VNNI and AMX, whatever the CPU has.
    """
    # A lesser variant that the tests run on would say what kernels may use.
    env = {name: os.environ[name] for name in os.environ if name != "PYLLAMA_RAW_CPU"}
    done = subprocess.run(
        [sys.executable, "-c", ONLY, json.dumps(sets)],
        env=env,
        capture_output=True,
        check=True,
        text=True,
    )
    needs, levels = json.loads(done.stdout)

    assert [text for text in needs if any(word in text for word in without)] == []
    assert set(levels) <= {"plain", *(["avx2"] if sets[0] else [])}


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
