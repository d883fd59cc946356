"""
Deficit round-robin over the prompts that are being computed.

The prompt whose turn it is takes tokens until its quantum is spent or it is done, then
the next one's turn comes. A turn outlives the step: what is left of a quantum is the
sequence's `deficit`. So a short prompt waits for at most one quantum of each other
prompt, however long those are, and few prompts share a step, which keeps chunks large.

Source: Shreedhar and Varghese, Efficient Fair Queuing using Deficit Round Robin, 1995.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Items

from pyllama_raw.core.exact import chunk_size
from pyllama_raw.core.memory.slots import slot_of
from pyllama_raw.core.sequence import Sequence


class PrefillTurns:
    """Remembers whose turn it is between steps."""

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._turn = 0  # slot that goes first
        self._last_turn = 0  # the one that went first the last time

    def share(
        self, budget: int, prompts: Items[Sequence], *, single: bool = False
    ) -> dict[int, int]:
        """
        Divide *budget* tokens among *prompts*.

        Args:
            prompts: sequences with a slot and more than one token behind, by slot.
            single: whether only one may have tokens.

        Returns:
            Tokens by slot; they sum up to the budget unless no prompt can take more.
        """
        self._last_turn = self._turn
        ring = self._ring(prompts)
        given: dict[int, int] = {}
        while ring and budget > 0:
            sequence = ring[0]
            slot = slot_of(sequence)
            if sequence.deficit == 0:
                sequence.deficit = self._quantum
            taken = given.get(slot, 0)
            ready = n_ready(sequence)
            wanted = ready - taken
            if given and (budget == 1 < wanted or (single and slot not in given)):
                break  # better two tokens in the next step than one in this
            share = min(budget, sequence.deficit)
            chunk = chunk_size(taken + share, ready, taken + budget)
            given[slot], n_tokens = chunk, chunk - taken
            budget -= n_tokens
            sequence.deficit = max(sequence.deficit - n_tokens, 0)
            if n_tokens == wanted:
                sequence.deficit = 0
                ring.popleft()
            elif sequence.deficit == 0:
                ring.rotate(-1)
        if ring:
            self._turn = slot_of(ring[0])
        return given

    def repeat(self) -> None:
        """What was shared last was not computed: whose turn it was goes first again."""
        self._turn = self._last_turn

    def _ring(self, prompts: Items[Sequence]) -> deque[Sequence]:
        ring = deque(prompts)
        for _ in range(len(ring)):
            if slot_of(ring[0]) >= self._turn:
                break
            ring.rotate(-1)
        return ring


def n_ready(sequence: Sequence) -> int:
    """
    Tokens *sequence* may compute in one step.

    Chunks end at its points; while it is scored each token takes an output row, and what
    has been scored before is computed without.
    """
    n_ready = sequence.n_in_chunks - sequence.n_computed
    if sequence.points:
        n_ready = sequence.points[0] - sequence.n_computed
    if sequence.is_scoring:
        n_scored = len(sequence.prompt_logprobs)
        n_plain = n_scored - sequence.n_computed
        n_rows = sequence.max_rows
        n_ready = min(n_ready, n_plain) or chunk_size(n_rows, n_ready, n_rows)
    return n_ready


def share_rows(n_rows: int, prompts: Items[Sequence], *, single: bool = False) -> None:
    """
    Divide *n_rows* output rows among *prompts*: one for each that is not scored.

    Where only one of them gets into the step, it has all.
    """
    scoring = [sequence for sequence in prompts if sequence.is_scoring]
    if scoring:
        n_free = n_rows - (len(prompts) - len(scoring))
        n_each = n_rows if single else n_free // len(scoring)
        for sequence in scoring:
            sequence.max_rows = max(n_each, 1)
