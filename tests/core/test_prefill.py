import pytest
from hypothesis import given
from hypothesis import strategies as st

from pyllama_raw.core.request import Scoring
from pyllama_raw.core.scheduling.packer import (
    PrefillTurns,
    chunk_size,
    share_rows,
    without_rest,
)
from pyllama_raw.core.sequence import Running, Sequence
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
    prompts = [make_running(slot, 10) for slot in range(2)]

    shares = PrefillTurns("turns", quantum=4).share(5, prompts)

    assert shares == {0: 4}


@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=3),
    st.sampled_from(["shortest", "turns"]),
    st.integers(1, 20),
    st.integers(3, 40),
)
def test_no_prompt_is_divided_into_single_tokens(n_prompts, order, quantum, budget):
    """
    Where a step takes one prompt, whatever the order, the quantum and the budget.
    """
    sequences = [make_running(slot, n) for slot, n in enumerate(n_prompts)]
    turns = PrefillTurns(order, quantum)
    while behind := [s for s in sequences if s.n_behind]:
        shares = turns.share(budget, behind, single=True)

        [(slot, n_tokens)] = shares.items()
        assert 2 <= n_tokens <= budget
        sequences[slot].n_computed += n_tokens


@given(
    st.lists(st.integers(2, 40), min_size=1, max_size=3),
    st.integers(0, 3),
    st.integers(3, 16),
)
def test_no_micro_batch_is_a_single_token_of_a_prompt(sizes, n_decodes, n_ubatch):
    """
    What micro-batches leave of a step is none or several tokens, unless all are few.
    """
    shares = without_rest(dict(enumerate(sizes)), n_decodes, n_ubatch)

    n_tokens = n_decodes + sum(shares.values())
    assert all(shares[slot] >= 2 for slot in shares)
    assert sum(sizes) - sum(shares.values()) in (0, 2)
    assert n_tokens <= n_ubatch or n_tokens % n_ubatch != 1 or max(sizes) <= 3


def test_after_the_last_slot_the_first_has_its_turn():
    """
    Turns go by slot, and none follows the last one.
    """
    turns = PrefillTurns("turns", quantum=4)
    prompts = [make_running(slot, 10) for slot in range(2)]

    heads = [turns.pick(prompts).slot for _ in range(3)]

    assert heads == [0, 1, 0]


def test_the_shortest_prompt_goes_first():
    """
    A step has all of it before another prompt has a token; of equal ones the first that came.
    """
    prompts = [make_running(slot, n) for slot, n in enumerate((30, 10, 10))]

    shares = PrefillTurns("shortest", quantum=4).share(25, prompts)

    assert shares == {1: 10, 2: 10, 0: 5}


def test_the_prompt_that_came_first_has_one_step_in_five():
    """
    Shorter ones pass it four times, however many there are.
    """
    turns = PrefillTurns("shortest", quantum=4)
    long = make_running(0, 1000)
    shorter = [make_running(slot, 10) for slot in range(1, 11)]

    heads = [list(turns.share(10, [long, prompt])) for prompt in shorter]

    assert heads == [[1], [2], [3], [4], [0], [6], [7], [8], [9], [0]]


def test_a_step_that_is_repeated_has_the_same_prompt():
    """
    What was not computed was no turn of the prompt that came first.
    """
    turns = PrefillTurns("shortest", quantum=4)
    prompts = [make_running(0, 1000), make_running(1, 40)]
    for _ in range(4):
        turns.share(10, prompts)
    lost = turns.share(10, prompts)
    turns.repeat()

    again = turns.share(10, prompts)

    assert (lost, again) == ({0: 10}, {0: 10})


@pytest.mark.parametrize(("single", "expected"), [(False, 4), (True, 8)])
def test_who_is_alone_in_a_step_has_all_rows(single, expected):
    """
    Scored prompts share output rows only where they share a step.
    """
    prompts = [make_running(slot, 10, scoring=Scoring()) for slot in range(2)]

    share_rows(8, prompts, single=single)

    assert [sequence.max_rows for sequence in prompts] == [expected] * 2


def make_running(slot: int, n_prompt: int, **fields) -> Running:
    sequence = Sequence(make_request(slot, n_prompt, **fields), slot, 0.0)
    return Running(sequence, slot)
