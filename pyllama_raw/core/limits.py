"""What the context can hold and do, as it reported it."""

from __future__ import annotations

from dataclasses import dataclass

from pyllama_raw.core.memory.snapshot_kind import SnapshotKind
from pyllama_raw.core.sequence import Sequence

# Tokens of a prompt that are always computed; one has to be sampled from. A single token is
# computed by another kernel than several, which gives it other last digits.
N_FRESH = 2
ALIGN = 64  # cells that no sum over cells divides: CPUs add 4 to 64 side by side


@dataclass(frozen=True, slots=True)
class ContextLimits:
    """What the context can hold, as it reported it."""

    n_slots: int  # sequences that run at once
    n_ctx_slot: int  # positions one slot may hold
    n_batch: int  # tokens of one step
    n_cells: int  # cells of all slots together
    n_parked: int = 0  # slots beyond n_slots, for what idle ones hold
    unified: bool = True
    mixes: bool = True  # False: in split KV libllama cuts a row off a mixed prompt
    can_shift: bool = True
    kind: SnapshotKind = SnapshotKind.RANGE
    n_outputs: int | None = None  # output rows of one step; None: one a slot
    n_swa: int = 0  # positions a window of the model holds; 0: it has none
    n_ubatch: int = 0  # tokens of one graph; 0: as many as a step has

    def __post_init__(self) -> None:
        assert self.n_ctx_slot >= 2, "one token of a prompt and one of output"
        assert self.n_batch >= self.n_slots >= 1, "every stream goes on in every step"
        assert self.n_cells >= 1
        assert min(self.n_parked, self.n_swa) >= 0
        assert self.n_outputs is None or self.n_outputs >= self.n_slots

    @property
    def can_cut(self) -> bool:
        """Whether a slot can forget its last tokens only."""
        return self.kind is not SnapshotKind.EXACT

    def n_kept(self, sequence: Sequence) -> int:
        """
        Tokens of *sequence* that others may take over, once they are computed.

        Where outputs must not depend on what ran before, only those of the prompt, and
        not of a prompt of one token: the output was computed token by token.
        """
        if self.mixes:
            return len(sequence.tokens)
        n_prompt = sequence.request.n_prompt
        return n_prompt if n_prompt >= N_FRESH else 0

    def n_movable(self, n_tokens: int) -> int:
        """
        The most of a slot's first *n_tokens* that others may get a copy of.

        libllama saves what is in the window and restores it to the first cells. Where
        outputs must not depend on what ran before, it has to move by a multiple of
        ALIGN: by less, sums over cells are made in another order.
        """
        n_moved = max(n_tokens - self.n_swa, 0) if self.n_swa else 0
        return n_tokens if self.mixes else n_tokens - n_moved % ALIGN
