"""Where a sequence starts from, as a table: slots and tiers in, one decision out."""

import pytest

from pyllama_raw.core.memory.placement import (
    Cold,
    CopyOf,
    Follow,
    Offer,
    Question,
    Restore,
    Source,
    TakeOver,
    fill,
    place,
)
from pyllama_raw.core.memory.snapshots import Hit
from pyllama_raw.core.request import CacheTier

N_MOST = 100  # tokens that may be taken over
CUT = Question(N_MOST, can_cut=True, min_wait=16, min_gain=64)
WHOLE = CUT._replace(can_cut=False)


def hit_of(n_tokens) -> Hit:
    return Hit(n_tokens, (), n_tokens, N_MOST + 2)


def host(n_tokens, min_gain=1) -> Offer:
    return Offer(CacheTier.HOST, hit_of(n_tokens), min_gain)


def disk(n_tokens) -> Offer:
    return Offer(CacheTier.DISK, hit_of(n_tokens), 64)


def load(offer, n_live=0) -> Restore:
    return Restore(offer.tier, offer.hit, n_live)


def idle(slot, n_now, n_held) -> Source:
    return Source(slot, n_now, n_now, n_held)


def running(slot, n_now, n_later) -> Source:
    return Source(slot, n_now, max(n_now, n_later))


@pytest.mark.parametrize(
    ("sources", "offers", "expected"),
    [
        ([], [], Cold()),
        ([idle(0, 20, 20)], [], CopyOf(0, 20)),
        ([idle(0, 20, 20), idle(1, 30, 90)], [], CopyOf(1, 30)),
        ([running(0, 20, 20)], [host(20)], CopyOf(0, 20)),
        ([running(0, 20, 20)], [host(21)], load(host(21), 20)),
        ([running(0, 20, 20)], [host(60, min_gain=41)], CopyOf(0, 20)),
        ([], [host(20), disk(83)], load(host(20))),
        ([], [host(20), disk(84)], load(disk(84))),
        ([], [disk(63)], Cold()),
        ([running(0, 20, 20)], [disk(83)], CopyOf(0, 20)),
        ([running(0, 0, 36)], [], Follow(0, 36)),
        ([running(0, 0, 15)], [], Cold()),
        ([running(0, 10, 25)], [], CopyOf(0, 10)),
        ([running(0, 10, 80)], [host(65)], load(host(65), 10)),
        ([running(0, 10, 81)], [host(65)], Follow(0, 81)),
        ([running(0, 0, 60), idle(1, 50, 50)], [], CopyOf(1, 50)),
        ([running(0, 0, 66), idle(1, 50, 50)], [], Follow(0, 66)),
    ],
)
def test_the_best_start_of_an_empty_slot(sources, offers, expected):
    """
    Waiting must save 16 tokens, a file 64, a snapshot one, or what its speed asks for.
    """
    assert fill(CUT, sources, offers) == expected


@pytest.mark.parametrize(
    ("wanted", "sources", "offers", "free", "expected"),
    [
        (CUT, [], [], [3, 1], (3, Cold())),
        (CUT, [idle(1, 20, 20)], [], [3, 1], (1, TakeOver(1, 20))),
        (CUT, [idle(1, 20, 30)], [], [3, 1], (3, CopyOf(1, 20))),
        (CUT, [idle(1, 20, 30)], [], [1, 3], (3, CopyOf(1, 20))),
        (CUT, [idle(1, N_MOST, 130)], [], [3, 1], (1, TakeOver(1, N_MOST))),
        (CUT, [idle(1, 20, 30)], [], [1], (1, TakeOver(1, 20))),
        (WHOLE, [idle(1, 20, 30)], [], [1], (1, Cold())),
        (WHOLE, [idle(1, 20, 20)], [], [3, 1], (1, TakeOver(1, 20))),
        (CUT, [idle(1, 20, 20)], [host(83)], [3, 1], (1, TakeOver(1, 20))),
        (CUT, [idle(1, 20, 20)], [host(84)], [1, 3], (3, load(host(84), 20))),
        (CUT, [idle(1, 20, 20)], [host(84)], [1], (1, load(host(84)))),
        (CUT, [running(0, 20, 20)], [], [1], (1, CopyOf(0, 20))),
        (CUT, [idle(1, 20, 20), running(0, 0, 40)], [], [1, 3], (3, Follow(0, 40))),
        (CUT, [running(0, 20, 20), idle(1, 20, 20)], [], [3, 1], (1, TakeOver(1, 20))),
    ],
)
def test_the_slot_of_a_sequence_and_its_start(wanted, sources, offers, free, expected):
    """
    It goes on where nothing is lost, else the slot that is missed least is emptied, and
    not the one that is copied.
    """
    assert place(wanted, sources, offers, free) == expected


@pytest.mark.parametrize(
    ("sources", "offers", "wish", "expected"),
    [
        ([], [], 1, (1, Cold())),
        ([], [], 2, (3, Cold())),
        ([idle(3, 20, 20)], [], 1, (1, CopyOf(3, 20))),
        ([idle(3, 20, 20), idle(1, 20, 90)], [], 1, (1, TakeOver(1, 20))),
        ([idle(3, 21, 21), idle(1, 20, 90)], [], 1, (1, CopyOf(3, 21))),
        ([idle(1, 20, 20)], [host(21)], 1, (1, load(host(21)))),
        ([idle(1, 20, 20)], [host(20)], 1, (1, TakeOver(1, 20))),
        ([idle(1, 20, 20), running(0, 0, 40)], [], 1, (1, Follow(0, 40))),
    ],
)
def test_a_slot_that_the_caller_chose_is_had_if_it_is_idle(
    sources, offers, wish, expected
):
    """
    Whatever is in it, and from the best start that there is for it.
    """
    assert place(CUT, sources, offers, [3, 1], wish) == expected
