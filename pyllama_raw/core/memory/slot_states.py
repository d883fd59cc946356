"""
The state of one slot by itself: copied for a file that somebody names, and brought back into a slot.

The cache keeps what pays, where it likes. Here a person says what is kept and where it goes.

Rules:
1. Moves are done at once, between two steps, by a plan without works, whose result is settled.
2. Only what others may take over is copied: text that a slot without a sequence holds.
3. A slot that is filled loses what it holds, which is saved as if its place was needed.
"""

from __future__ import annotations

from pyllama_raw.core.memory.memory import Memory
from pyllama_raw.core.memory.slots import Contents, Idle, contents_of
from pyllama_raw.core.request import CacheTier
from pyllama_raw.core.step import Load, Piece, Save, StepPlan

SLOT_SAVE = 0  # the id of a copy in `StepResult.saved`; those of tiers begin at 1


def plan_copy(memory: Memory, slot: int) -> tuple[Contents, StepPlan] | None:
    """
    The contents of a slot, and a plan that copies them as SLOT_SAVE.

    None if it holds nothing, or what others must not have, or rows of images and sounds.
    """
    place = memory.slots.all[slot]
    if not isinstance(place, Idle) or not (place.n_held and place.is_usable):
        return None
    if place.spans:
        return None
    most_bytes = memory.tiers.host.bound(place.n_held)
    save = Save(SLOT_SAVE, CacheTier.HOST, slot, 0, place.n_held, most_bytes)
    return contents_of(place), StepPlan((*memory.take_moves(), save))


def plan_fill(memory: Memory, contents: Contents, payload: object) -> StepPlan | None:
    """
    A plan that brings *contents* from elsewhere into their slot.

    None if a sequence has the slot, or those that run leave too few cells.
    """
    slots, n_tokens = memory.slots, len(contents.tokens)
    place = slots.all[contents.slot]
    if not isinstance(place, Idle) or n_tokens > slots.limits.n_ctx_slot:
        return None
    # What is here is saved where that pays, and gives its cells.
    before = contents_of(place)
    if place.n_held:
        if place.is_usable:
            slots.add(memory.tiers.save(before))
        slots.add(memory.tiers.write(before, is_whole=place.is_usable))
        slots.cut(place, 0)
    memory.reclaim(n_tokens)
    if slots.n_free_cells < n_tokens:
        return None
    # The slot was used last of all.
    idle = Idle(
        contents.slot,
        contents.tokens.tobytes(),
        n_held=n_tokens,
        namespace=contents.namespace,
        last_used=1 + max(other.last_used for other in slots.idle),
        n_prompt=contents.n_prompt,
    )
    slots.all[idle.slot] = idle
    slots.cells.n_used += n_tokens
    slots.add([Load(idle.slot, (Piece(payload, 0, n_tokens),), n_tokens - 1)])
    return StepPlan(memory.take_moves())
