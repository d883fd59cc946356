"""Limits of a context, and the rules of its memory that follow from them."""

from __future__ import annotations

from dataclasses import dataclass

from pyllama_raw.core import exact
from pyllama_raw.core.memory.snapshot_kind import SnapshotKind
from pyllama_raw.core.request import Request
from pyllama_raw.core.sequence import NO_LIMIT, Sequence
from pyllama_raw.errors import BadMedia, PromptTooLong


@dataclass(frozen=True, slots=True)
class ContextLimits:
    """Limits of a context, as it reported them."""

    n_slots: int  # sequences that run at once
    n_ctx_slot: int  # tokens one slot may hold
    n_batch: int  # tokens of one step
    n_cells: int  # cells of all slots together
    n_parked: int = 0  # slots beyond n_slots, for what idle ones hold
    unified: bool = True
    deterministic: bool = False  # outputs must not depend on others: see core.exact
    can_shift: bool = True
    kind: SnapshotKind = SnapshotKind.RANGE
    n_outputs: int | None = None  # output rows of one step; None: one a slot
    n_swa: int = 0  # positions a window of the model holds; 0: it has none
    n_ubatch: int = 0  # tokens of one graph; 0: as many as a step has
    n_source: int = 0  # tokens that an encoder reads at once; 0: there is no encoder

    def __post_init__(self) -> None:
        assert self.n_ctx_slot >= 2, "one token of a prompt and one of output"
        assert self.n_batch >= self.n_slots >= 1, "every stream goes on in every step"
        assert self.n_cells >= 1
        assert min(self.n_parked, self.n_swa) >= 0
        assert self.n_outputs is None or self.n_outputs >= self.n_slots
        assert 0 <= self.n_source <= self.n_batch

    @property
    def can_cut(self) -> bool:
        """Whether a slot can forget its last tokens only."""
        return self.kind.can_cut

    @property
    def n_whole_rows(self) -> int:
        """The most rows that can see each other."""
        return min(self.n_ubatch or self.n_batch, self.n_batch)

    def check(self, request: Request) -> None:
        """
        Check that the context can compute *request*; other contexts compute texts.

        Raises:
            PromptTooLong: it leaves no room for an output token, or an encoder reads it and
                cannot do so at once.
            BadMedia: rows that see each other are more than one micro-batch.
        """
        if request.lot.makes_vectors:
            return
        if len(request.tokens) >= self.n_ctx_slot:
            raise PromptTooLong(request.n_prompt, self.n_ctx_slot)
        assert (request.source is None) is (self.n_source == 0)
        if request.n_source > self.n_source:
            raise PromptTooLong(request.n_source, self.n_ctx_slot, self.n_source)
        for index, span in enumerate(request.spans):
            n_rows, n_most = span.stop - span.start, self.n_whole_rows
            if not span.is_causal and n_rows > n_most:
                raise BadMedia(
                    f"its {n_rows} rows see each other, so they are computed at once, "
                    f"and n_ubatch lets {n_most} be: raise it",
                    index,
                )

    def n_kept(self, sequence: Sequence) -> int:
        """Tokens of *sequence* that others may take over, once they are computed."""
        return exact.n_kept(sequence) if self.deterministic else len(sequence.tokens)

    def n_chunked(self, request: Request) -> int:
        """Tokens to be computed in chunks; those after them one by one."""
        return request.n_prompt if self.deterministic else NO_LIMIT

    def n_movable(self, n_tokens: int) -> int:
        """The most of a slot's first *n_tokens* that others may get a copy of."""
        return exact.n_movable(n_tokens, self.n_swa) if self.deterministic else n_tokens

    def is_repeatable(self, sequence: Sequence) -> bool:
        """
        Whether *sequence*, computed again, has the output that it would have had.

        What a shifted one holds was computed with tokens that are not there any more.
        """
        return not (self.deterministic and sequence.is_shifted)
