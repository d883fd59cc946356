"""Arrivals: as many as wanted, in order, at the rate."""

import math
from itertools import pairwise
from statistics import pstdev

from hypothesis import given
from hypothesis import strategies as st

from pyllama_raw.lab.arrivals import arrival_times
from pyllama_raw.lab.workloads import generator


@given(
    seed=st.integers(),
    n=st.integers(1, 200),
    rate=st.floats(0.01, 1000),
    burstiness=st.floats(0.05, 50),
)
def test_the_last_call_comes_when_the_rate_says(seed, n, rate, burstiness):
    """
    Times are in order, and the last one is n / rate for every seed and burstiness.
    """
    times = arrival_times(generator(seed), n, rate, burstiness)

    assert len(times) == n
    assert times == sorted(times)
    assert times[0] >= 0
    assert math.isclose(times[-1], n / rate)


def test_less_burstiness_makes_gaps_more_unequal():
    """
    The spread of gaps falls as burstiness rises; 1 is about that of Poisson arrivals.
    """

    def spread(burstiness):
        times = arrival_times(generator(1), 2000, 1.0, burstiness)
        return pstdev(b - a for a, b in pairwise(times))

    assert spread(0.25) > 1.7 > spread(1.0) > 0.9
    assert spread(10.0) < 0.4
