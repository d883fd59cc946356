"""Victims: the sequences that lose their slots, if some must and no policy says which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Items
from typing import Literal

from pyllama_raw.core.sequence import Running

Victim = Literal["latest", "largest", "smallest"]

MAX_PREEMPTED = 3  # after so many times, others are preempted first

KEYS: Mapping[Victim, Callable[[Running], int]] = {
    "latest": lambda _: 0,
    "largest": lambda running: running.n_computed,
    "smallest": lambda running: -running.n_computed,
}


def choose(victim: Victim, running: Items[Running]) -> Running:
    """One of *running*: the one with the largest key, and of those the worst rank."""
    left = running
    if victim != "latest":  # the worst rank gets better as others end; sizes need not
        rare = [r for r in running if r.sequence.n_preempted < MAX_PREEMPTED]
        left = rare or running
    return max(left, key=lambda each: (KEYS[victim](each), each.sequence.rank))
