"""The rule that chooses among engines."""

from collections import Counter
from typing import NamedTuple

import pytest

from pyllama_raw.routing import (
    ROUTERS,
    LeastLoad,
    PrefixAffinity,
    RoundRobin,
    RoutedRequest,
    prefixes,
)


class Engine(NamedTuple):
    """One of 1,000 cells."""

    name: str
    n_open_tokens: int = 0
    n_cells: int = 1000


IDLE = [Engine(name) for name in "abcd"]


def asked(text: str, session: str | None = None) -> RoutedRequest:
    return RoutedRequest(100, prefixes(text.encode(), 4), session)


def sent(*pairs: tuple[RoutedRequest, str]) -> PrefixAffinity:
    router = PrefixAffinity()
    for request, name in pairs:
        router.sent(request, name)
    return router


@pytest.mark.parametrize("router", ROUTERS.values())
def test_all_engines_are_ranked_once(router):
    """
    One that refuses is followed by another.
    """
    assert sorted(router().rank(asked("a text"), IDLE)) == [0, 1, 2, 3]


def test_turns_are_taken_by_what_was_sent():
    """
    To rank is not to send: a request that waits takes no turn.
    """
    router = RoundRobin()

    ranked = [router.rank(asked("a"), IDLE) for _ in range(2)]
    router.sent(asked("a"), "a")

    assert [*ranked, router.rank(asked("a"), IDLE)] == [
        [0, 1, 2, 3],
        [0, 1, 2, 3],
        [1, 2, 3, 0],
    ]


def test_least_load_counts_tokens():
    """
    The engine with the fewest open ones is first.
    """
    engines = [Engine("a", 30), Engine("b", 10), Engine("c", 20)]

    assert LeastLoad().rank(asked("a"), engines) == [1, 2, 0]


def test_the_longest_prefix_wins():
    """
    Engines that know less of a prompt come after, wherever the hash would have sent it.
    """
    router = sent((asked("aaaabbbb"), "c"), (asked("aaaabbbbcccc"), "b"))

    assert router.rank(asked("aaaabbbbccccdddd"), IDLE)[:2] == [1, 2]


def test_prefixes_of_different_spaces_are_different():
    """
    Neither salts nor adapters share what is cached.
    """
    assert not {*prefixes(b"aaaabbbb", 4, b"x")} & {*prefixes(b"aaaabbbb", 4, b"y")}


def test_a_session_stays_where_it_is():
    """
    Even if another engine has more of its prompt.
    """
    router = sent((asked("aaaa", "me"), "d"), (asked("aaaabbbb"), "a"))

    assert router.rank(asked("aaaabbbb", "me"), IDLE)[0] == 3


@pytest.mark.parametrize("n_open", [700, 1000])
def test_a_full_engine_gives_way(n_open):
    """
    In a tier of more pressure neither a prefix nor a session helps.
    """
    engines = [Engine("a", n_open), Engine("b", n_open - 1)]
    router = sent((asked("aaaabbbb", "me"), "a"))

    assert router.rank(asked("aaaabbbb", "me"), engines) == [1, 0]


def test_an_engine_that_is_busy_gives_way_to_one_that_idles():
    """
    What is to compute anew costs less than what is to wait for.
    """
    engines = [Engine("a", 3000, 8000), Engine("b", 0, 8000)]
    router = sent((asked("aaaabbbb"), "a"))

    ranked = router.rank(asked("aaaabbbb"), engines)

    assert ranked == [1, 0]


def test_unrelated_prompts_spread_over_engines_that_idle():
    """
    At equal load each gets about a quarter.
    """
    router = PrefixAffinity()

    n_sent = Counter(router.rank(asked(f"{n:08}"), IDLE)[0] for n in range(400))

    assert min(n_sent.values()) > 60


def test_routers_that_know_nothing_of_each_other_agree():
    """
    The order in which engines are listed changes nothing.
    """
    first, second = PrefixAffinity(), PrefixAffinity()

    one = [IDLE[first.rank(asked(f"{n:08}"), IDLE)[0]] for n in range(50)]
    other = [
        IDLE[::-1][second.rank(asked(f"{n:08}"), IDLE[::-1])[0]] for n in range(50)
    ]

    assert one == other


def test_only_prompts_of_an_engine_that_leaves_move():
    """
    The others stay, though no router remembers them.
    """
    router, texts = PrefixAffinity(), [asked(f"{n:08}") for n in range(50)]
    before = [IDLE[router.rank(text, IDLE)[0]].name for text in texts]

    after = [IDLE[1:][router.rank(text, IDLE[1:])[0]].name for text in texts]

    assert [name for name in before if name != "a"] == [
        now for was, now in zip(before, after, strict=True) if was != "a"
    ]


def test_prefixes_longest_unused_are_forgotten(monkeypatch):
    """
    Memory is bounded.
    """
    monkeypatch.setattr("pyllama_raw.routing.MAX_KEYS", 2)

    router = sent((asked("aaaa"), "c"), (asked("bbbb"), "c"), (asked("cccc"), "c"))

    counts = [
        len(router._shared_blocks(asked(text).blocks)) for text in ("aaaa", "cccc")
    ]
    assert counts == [0, 1]
