"""Figures of records whose times are known."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllama_raw.api.results import percentile
from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.calls import latencies, limits_of, result_of
from tests.lab.bench.support import make_record, make_run


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100))
def test_percentile_is_the_smallest_value_not_exceeded(values, percent):
    """
    It occurred; so many per cent are at most it, and of no smaller value.
    """
    value_at = percentile(values, percent)

    share = sum(value <= value_at for value in values) / len(values)
    below = sum(value < value_at for value in values) / len(values)
    assert value_at in values
    assert share * 100 >= percent - 1e-9
    assert below * 100 <= percent + 1e-9


def test_summary_has_vllms_keys():
    """
    Seconds become milliseconds; nothing gives None everywhere.
    """
    summary = latencies([make_record([0.0, 0.001, 0.003, 0.009])])

    assert {name: summary[name] for name in summary if "_itl_" in name} == {
        "mean_itl_ms": pytest.approx(3),
        "median_itl_ms": pytest.approx(2),
        "std_itl_ms": pytest.approx(math.sqrt(14 / 3)),
        "p90_itl_ms": pytest.approx(6),
        "p99_itl_ms": pytest.approx(6),
        "max_itl_ms": pytest.approx(6),
    }
    assert set(latencies([]).values()) == {None}


def test_latencies_follow_the_definitions():
    """
    TTFT from the send, ITL pooled over calls, TPOT without the first token, E2EL to the
    last one, queue time as the target says.
    """
    run = make_run(
        make_record([1.0, 2.0, 4.0], queue_s=0.5), make_record([3.0], sent=1.0)
    )

    result = result_of(run, {})

    assert (result["mean_ttft_ms"], result["max_ttft_ms"]) == (1500, 2000)
    assert (result["median_itl_ms"], result["max_itl_ms"]) == (1500, 2000)
    assert result["mean_tpot_ms"] == 1500
    assert (result["mean_e2el_ms"], result["max_e2el_ms"]) == (3000, 4000)
    assert result["mean_queue_ms"] == 500


def test_failures_are_counted_and_have_no_latency():
    """
    Completed and failed add up; what a failed call computed is in the throughput.
    """
    run = make_run(make_record(), make_record([9.0], error="gone"))

    result = result_of(run, {})

    assert (result["completed"], result["failed"], result["left"]) == (1, 1, 0)
    assert result["errors"] == ["", "gone"]
    assert result["max_ttft_ms"] == 1000
    assert result["total_output_tokens"] == 4
    assert result["request_throughput"] == 0.1
    assert result["total_token_throughput"] == pytest.approx(0.7)


def test_cached_share_is_of_tokens():
    """
    Not of requests; unknown as soon as one target call does not tell.
    """
    run = make_run(make_record(n_cached=3), make_record(n_cached=0))

    assert result_of(run, {})["cached_share"] == 0.5
    assert result_of(make_run(make_record()), {})["cached_share"] is None


def test_kinds_have_latencies_of_their_own():
    """
    Only of their calls.
    """
    run = make_run(make_record(kind="short"), make_record([5.0, 9.0], kind="long"))

    by_kind = result_of(run, {})["by_kind"]

    assert by_kind["short"]["max_ttft_ms"] == 1000
    assert by_kind["long"]["max_itl_ms"] == 4000


@pytest.mark.parametrize(
    ("words", "good"),
    [
        (["ttft:1000"], 2),
        (["ttft:999"], 0),
        (["tpot:1500"], 2),
        (["ttft:1000", "tpot:1499"], 1),
        (["e2el:1000"], 1),
    ],
)
def test_goodput_counts_what_keeps_every_limit(words, good):
    """
    One token has no TPOT and keeps its limit; a failed call is never good.
    """
    records = [make_record(), make_record([1.0]), make_record(error="gone")]

    result = result_of(make_run(*records), limits_of(words))

    assert result["request_goodput"] == good / 10.0


@pytest.mark.parametrize("word", ["ttft", "itl:5", "ttft:-1", "ttft:x", "ttft:nan"])
def test_wrong_limits_are_refused(word):
    """
    The error quotes the word.
    """
    with pytest.raises(ConfigError, match=word):
        limits_of([word])
