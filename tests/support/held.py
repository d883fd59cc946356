"""What a context holds of each slot, against what core believes of it."""

from __future__ import annotations

from typing import Any

from pyllama_raw.core.memory.slots import Idle
from pyllama_raw.core.request import position
from pyllama_raw.core.sequence import Running
from pyllama_raw.core.step import Copy, Load, Move, Release, Shift, Trim


def check_held(parts: Any) -> None:
    """
    Compare the number of positions of every slot, whether it runs, is idle or is parked.

    A slot that a move of the next plan changes is left out. Call it between two steps, in the
    thread that makes them: what was begun ahead is dropped.
    """
    executor, slots = parts.executor, parts.scheduler.memory.slots
    executor._lost |= executor._drop()
    left_out = executor._lost.union(*map(_changed, slots._moves))
    context = executor.context
    if context.closed:  # it is made anew by the next step
        return
    believed = [0] * context.n_seq_max  # that of snapshots is empty between two moves
    for place in slots.all:
        believed[place.slot] = _n_positions(place)
    counts = [_n_held(context, slot) for slot in range(context.n_seq_max)]

    for slot in left_out:
        believed[slot] = counts[slot]
    assert counts == believed


def _n_held(context: Any, slot: int) -> int:
    highest = context.seq_pos_max(slot)
    return 0 if highest is None else highest + 1


def _n_positions(place: Idle | Running) -> int:
    if isinstance(place, Idle):
        return position(place.spans, place.n_held)
    return place.sequence.position(place.n_computed)


def _changed(move: Move) -> set[int]:
    match move:
        case Release() | Trim() | Shift() | Load():
            return {move.slot}
        case Copy():
            return {move.dst}
        case _:
            return set()
