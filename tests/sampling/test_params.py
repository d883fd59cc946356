"""Parameters in place of others: what is set wins, what is not is kept."""

import pytest

from pyllama_raw import SamplingParams
from pyllama_raw.errors import InvalidSampling

BASE = SamplingParams(temperature=0.7, top_k=20, seed=5, stop=("a",))


def test_what_is_set_wins_over_a_base():
    """
    A zero and the value of the default are values; None keeps what the base has.
    """
    given = SamplingParams(temperature=0, top_k=40, seed=None)

    found = given.apply_to(BASE)

    assert found == SamplingParams(temperature=0, top_k=40, seed=5, stop=("a",))
    assert found.model_fields_set == BASE.model_fields_set


@pytest.mark.parametrize("given", [SamplingParams(), SamplingParams(seed=None)])
def test_nothing_that_is_set_changes_nothing(given: SamplingParams):
    """
    Such parameters are empty.
    """
    assert given.is_empty
    assert not BASE.is_empty
    assert given.apply_to(BASE) == BASE


def test_what_does_not_fit_a_base_is_refused():
    """
    Both are right, and wrong together.
    """
    base = SamplingParams(grammar='root ::= "a"')

    with pytest.raises(InvalidSampling, match="at most one of grammar, regex"):
        SamplingParams(regex="a").apply_to(base)


def test_a_number_of_too_many_bits_is_told_how_many_there_may_be():
    """
    As any other mistake: the value, the limit and what to do.
    """
    with pytest.raises(InvalidSampling, match="give a number of at most 64 bits"):
        SamplingParams(top_k=10**30)
