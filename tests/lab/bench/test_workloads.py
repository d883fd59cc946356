"""Workloads are what they say, and the same for the same seed."""

from dataclasses import replace
from math import inf

import pytest

from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.targets import Point
from pyllama_raw.lab.workloads import WORKLOADS, generator
from tests.lab.bench.support import make_writer

SINGLE = [name for name in WORKLOADS if name != "multi-turn"]


def make_calls(name, seed=1, *, as_text=False, **sizes):
    workload = WORKLOADS[name]
    shape = workload.shape.changed(sizes)
    return workload.calls(shape, make_writer(as_text=as_text), generator(seed))


@pytest.mark.parametrize("name", WORKLOADS)
def test_calls_depend_on_the_seed_alone(name):
    """
    The same seed gives the same calls; another one gives other text.
    """
    assert make_calls(name) == make_calls(name)
    assert make_calls(name, 2) != make_calls(name)


@pytest.mark.parametrize("name", SINGLE)
def test_text_has_as_many_tokens_as_ids(name):
    """
    For servers that take only text, prompts are the text of the same ids.
    """
    ids, texts = make_calls(name), make_calls(name, as_text=True)

    assert [len(call.prompt.split()) for call in texts] == [
        len(call.prompt) for call in ids
    ]


def test_offline_has_one_length():
    """
    Sizes can be given.
    """
    calls = make_calls("offline", requests=3, prompt_tokens=5, output_tokens=7)

    assert [(len(c.prompt), c.max_tokens, c.after) for c in calls] == [(5, 7, None)] * 3


def test_a_shared_prefix_is_shared_and_ends_are_not():
    """
    All begin alike for exactly the prefix.
    """
    calls = make_calls("shared-prefix", requests=4, prefix_tokens=9, prompt_tokens=5)

    assert len({tuple(call.prompt[:9]) for call in calls}) == 1
    assert len({tuple(call.prompt[9:]) for call in calls}) == 4


def test_prefix_groups_are_equal_in_size_and_mixed():
    """
    Each prefix is used equally often, not in turn.
    """
    calls = make_calls("prefix-groups", requests=12, groups=3)
    prefixes = [tuple(call.prompt[:512]) for call in calls]

    assert sorted(prefixes.count(prefix) for prefix in set(prefixes)) == [4, 4, 4]
    assert prefixes != prefixes[:3] * 4


def test_chats_have_all_their_turns_in_order():
    """
    A turn follows the one before it in its chat; chats are mixed.
    """
    calls = make_calls("multi-turn", requests=4, turns=3)
    lengths = dict.fromkeys(range(len(calls)), 1)
    for index, call in enumerate(calls):
        if call.after is not None:
            assert call.after < index
            lengths[index] = lengths[call.after] + 1

    assert sorted(lengths.values()) == sorted([1, 2, 3] * 4)
    assert [call.kind for call in calls].count("first turn") == 4
    assert len({call.after for call in calls if call.after is not None}) == 8


def test_sharegpt_lengths_are_around_their_medians_and_cut():
    """
    Log-normal, at most 1024.
    """
    calls = make_calls("sharegpt", requests=400)
    for lengths in ([len(c.prompt) for c in calls], [c.max_tokens for c in calls]):
        lengths.sort()
        assert 150 < lengths[200] < 260
        assert 1 <= lengths[0] < 40
        assert lengths[-1] == 1024


def test_every_sixth_prompt_is_long():
    """
    The others are short, and both are told apart.
    """
    calls = make_calls("interference", requests=12)

    assert [len(call.prompt) for call in calls] == ([42] * 5 + [1170]) * 2
    assert [call.kind for call in calls[4:6]] == ["short", "long"]


def test_some_clients_leave():
    """
    About the share, before half of their output; all of none or of all.
    """
    calls = make_calls("cancel-storm", requests=200, output_tokens=10)
    leaving = [call.leave_after for call in calls if call.leave_after is not None]

    assert 70 < len(leaving) < 130
    assert set(leaving) == {1, 2, 3, 4, 5}
    assert all(c.leave_after is None for c in make_calls("cancel-storm", leave_share=0))


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"turns": 3}, "turns=3"),
        ({"requests": 0}, "requests=0: give at least 1"),
        ({"requests": -1}, "requests=-1: give at least 0"),
        ({"requests": "5"}, "requests='5': give a whole number"),
        ({"nothing": 5}, "nothing=5: this workload has"),
    ],
)
def test_wrong_sizes_are_refused(sizes, message):
    """
    What a workload does not have cannot be given.
    """
    with pytest.raises(ConfigError, match=message):
        make_calls("offline", **sizes)


def test_a_share_is_at_most_one():
    """
    It is no count.
    """
    with pytest.raises(ConfigError, match=r"leave_share=1\.5: give at most 1"):
        make_calls("cancel-storm", leave_share=1.5)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: replace(WORKLOADS["bursts"], rate=inf),
            "BenchWorkload.rate=inf: give a finite",
        ),
        (
            lambda: replace(WORKLOADS["bursts"], burstiness=0),
            "BenchWorkload.burstiness=0: give more",
        ),
        (lambda: Point(clients="2"), "Point.clients='2': give a whole number"),
        (lambda: Point(rate=inf), "Point.rate=inf: give a finite number"),
    ],
)
def test_how_calls_are_sent_is_checked(make, message):
    """
    The error has the field, what was given and what is allowed.
    """
    with pytest.raises(ConfigError) as caught:
        make()

    assert str(caught.value).startswith(message)
