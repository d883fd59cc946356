"""Changes and noise."""

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllama_raw.lab.report import changes, differing, doubts, judge, mann_whitney

FEW = st.lists(st.integers(0, 30), min_size=1, max_size=5, unique=True)


def make_results(values, figure="output_throughput", **fields):
    point = {"max_concurrency": 8, "request_rate": "inf", "burstiness": 1.0}
    return [
        {"target": "engine", "round": index, figure: value, **point, **fields}
        for index, value in enumerate(values)
    ]


def by_hand(a, b):
    """The share of all ways to choose a's ranks that are as far apart."""
    values = sorted([*a, *b])

    def won(ranks):
        complement = [x for x in range(len(values)) if x not in ranks]
        return sum(x > y for x in ranks for y in complement)

    ours = won([values.index(x) for x in a])
    least = min(ours, len(a) * len(b) - ours)
    ways = [won(ranks) for ranks in combinations(range(len(values)), len(a))]
    return min(2 * sum(way <= least for way in ways) / len(ways), 1.0)


@given(FEW, FEW)
def test_the_chance_is_exact(a, b):
    """
    It is what counting all orders gives, and the same both ways.
    """
    b = [value + 0.5 for value in b]  # no ties

    assert mann_whitney(a, b) == pytest.approx(by_hand(a, b))
    assert mann_whitney(a, b) == mann_whitney(b, a)


@given(st.lists(st.floats(1, 100), min_size=5, max_size=9))
def test_equal_results_are_noise(values):
    """
    No file differs from itself.
    """
    results = make_results(values)

    alike = len(set(values)) == 1
    (change,) = changes(results, results, 0.03)

    assert change["verdict"] == ("equal" if alike else "noise")
    assert change["change"] == "0"


@pytest.mark.parametrize(
    ("after", "verdict"),
    [
        ([110, 111, 112, 113, 114], "better"),
        ([90, 91, 92, 93, 94], "worse"),
        ([102, 111, 112, 113, 114], "noise"),  # one round is among the others
        ([105, 105, 105, 105, 105], "noise"),  # apart, but by less than 3 %
        ([50, 51, 52, 53], "too few rounds"),
        ([100] * 2, "too few rounds"),
    ],
)
def test_verdicts(after, verdict):
    """
    With five rounds, only a complete separation beyond the threshold counts.
    """
    before = make_results([100, 101, 102, 103, 104])

    (change,) = changes(before, make_results(after), 0.03)

    assert change["verdict"] == verdict


def test_less_is_better_for_latencies():
    """
    The direction belongs to the figure.
    """
    a, b = [10.0] * 5, [5.0] * 5

    assert judge(a, b, 0.008, 0.03, more_is_better=False) == "better"
    assert judge(a, b, 0.008, 0.03, more_is_better=True) == "worse"


def test_more_failures_are_worse_without_a_test():
    """
    One is enough.
    """
    before, after = make_results([0], "failed"), make_results([1], "failed")

    assert [c["verdict"] for c in changes(before, after, 0.03)] == ["worse"]
    assert [c["verdict"] for c in changes(after, before, 0.03)] == ["noise"]
    assert [c["verdict"] for c in changes(after, after, 0.03)] == ["equal"]
    assert [c["change"] for c in changes(before, after, 0.03)] == ["from 0"]


def test_one_value_everywhere_is_equal_whatever_the_number_of_rounds():
    """
    A count that never changes needs no five rounds to be the same, also if it is 0.
    """
    for value in (0.0, 7.0):
        results = make_results([value] * 2, "cached_share")

        assert [c["verdict"] for c in changes(results, results, 0.03)] == ["equal"]


@pytest.mark.parametrize(
    ("before", "after", "expected"),
    [
        ({}, {}, []),
        ({"others_cpus": None}, {"others_cpus": 0.05}, []),
        ({}, {"others_cpus": 0.7}, ["other processes used up to 0.70 CPUs"]),
        ({"others_cpus": 0.7}, {}, ["other processes used up to 0.70 CPUs"]),
        ({"model_id": "a"}, {"model_id": "b"}, ["other models: a and b"]),
        (
            {"workload": "offline", "model_id": "a"},
            {"workload": "bursts", "model_id": "a"},
            ["other workloads: offline and bursts"],
        ),
    ],
)
def test_what_proves_nothing_is_said(before, after, expected):
    """
    A busy round in one of the files, another model, another workload.
    """
    files = [make_results([1] * 5, **fields) for fields in (before, after)]

    assert doubts(*files) == expected


def test_other_points_are_not_compared():
    """
    A point that only one file has is left out.
    """
    before = make_results([1] * 5)
    after = make_results([1] * 5)
    for result in after:
        result["max_concurrency"] = 4

    assert changes(before, after, 0.03) == []


def test_different_conditions_are_named():
    """
    Not the commit or the date: those are what one compares.
    """
    before = {"model_id": "a", "machine": {"cpu": "x", "commit": "1"}}
    after = {"model_id": "b", "machine": {"cpu": "y", "commit": "2"}}

    assert differing(before, after) == ["model_id: a and b", "machine.cpu: x and y"]
