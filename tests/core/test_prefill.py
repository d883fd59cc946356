from hypothesis import given
from hypothesis import strategies as st

from pyllama_raw.core.prefill import PrefillTurns, chunk_size
from pyllama_raw.core.sequence import Sequence
from tests.core.support import make_request


@given(st.integers(1, 20), st.integers(1, 40), st.integers(3, 40))
def test_no_token_is_computed_alone(share, wanted, budget):
    """
    A chunk is never one token of more, and never leaves one, if the budget has three.
    """
    n_tokens = chunk_size(min(share, budget), wanted, budget)

    assert 0 < n_tokens <= min(wanted, budget)
    assert wanted == 1 or n_tokens > 1
    assert wanted - n_tokens != 1


def test_a_budget_of_one_goes_on():
    """
    One token a step is slow, but no standstill.
    """
    assert [chunk_size(1, wanted, 1) for wanted in (1, 2, 3)] == [1, 1, 1]


def test_one_token_of_budget_is_not_spent_on_another_prompt():
    """
    What is left for the next prompt waits until it is more than one token.
    """
    prompts = []
    for slot in range(2):
        sequence = Sequence(make_request(slot, n_prompt=10), slot, 0.0)
        sequence.slot = slot
        prompts.append(sequence)

    shares = PrefillTurns(quantum=4).share(5, prompts)

    assert shares == {0: 4}
