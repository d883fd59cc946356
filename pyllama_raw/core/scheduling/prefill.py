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
from collections.abc import Mapping
from collections.abc import Sequence as Items
from types import MappingProxyType

from pyllama_raw.core.exact import chunk_size
from pyllama_raw.core.sequence import Running
from pyllama_raw.core.spans import border

NO_CAPS: Mapping[int, int] = MappingProxyType({})


class PrefillTurns:
    """Remembers whose turn it is between steps."""

    def __init__(self, quantum: int) -> None:
        self._quantum = quantum
        self._turn = 0  # slot that goes first
        self._last_turn = 0  # the one that went first the last time

    def share(
        self,
        budget: int,
        prompts: Items[Running],
        *,
        single: bool = False,
        caps: Mapping[int, int] = NO_CAPS,
    ) -> dict[int, int]:
        """
        Divide *budget* tokens among *prompts*.

        Args:
            prompts: sequences with a slot and more than one token behind, by slot.
            single: whether only one may have tokens.
            caps: the most tokens of some, two or more, by slot.

        Returns:
            Tokens by slot; they sum up to the budget unless no prompt can take more.
        """
        self._last_turn = self._turn
        ring = self._ring(prompts)
        given: dict[int, int] = {}
        while ring and budget > 0:
            running = ring[0]
            slot = running.slot
            if running.deficit == 0:
                running.deficit = self._quantum
            taken = given.get(slot, 0)
            ready = n_ready(running)
            if slot in caps:
                ready = min(ready, caps[slot])
            wanted = ready - taken
            if given and (budget == 1 < wanted or (single and slot not in given)):
                break  # better two tokens in the next step than one in this
            share = min(budget, running.deficit)
            chunk = chunk_size(taken + share, ready, taken + budget)
            given[slot], n_tokens = chunk, chunk - taken
            budget -= n_tokens
            running.deficit = max(running.deficit - n_tokens, 0)
            if n_tokens == wanted:
                running.deficit = 0
                ring.popleft()
            elif running.deficit == 0:
                ring.rotate(-1)
        if ring:
            self._turn = ring[0].slot
        return given

    def pick(self, prompts: Items[Running]) -> Running:
        """The prompt whose turn it is, where a turn is one work."""
        self._last_turn = self._turn
        chosen = self._ring(prompts)[0]
        self._turn = chosen.slot + 1
        return chosen

    def repeat(self) -> None:
        """Take back the last turn, because it was not computed."""
        self._turn = self._last_turn

    def _ring(self, prompts: Items[Running]) -> deque[Running]:
        ring = deque(prompts)
        for _ in range(len(ring)):
            if ring[0].slot >= self._turn:
                break
            ring.rotate(-1)
        return ring


def n_ready(running: Running) -> int:
    """
    Tokens *running* may compute in one step.

    Chunks end at its points and have text or rows of one span. While it is scored each token
    takes an output row, and what has been scored before is computed without.
    """
    sequence, n_computed = running.sequence, running.n_computed
    n_ready = sequence.n_in_chunks - n_computed
    if running.points:
        n_ready = running.points[0] - n_computed
    end = border(running.request.spans, n_computed)
    if end is not None:
        n_ready = min(n_ready, end - n_computed)
    if sequence.is_scoring:
        n_scored = len(sequence.prompt_logprobs)
        n_plain = n_scored - n_computed
        n_rows = running.max_rows
        n_ready = min(n_ready, n_plain) or chunk_size(n_rows, n_ready, n_rows)
    return n_ready


def share_rows(n_rows: int, prompts: Items[Running], *, single: bool = False) -> None:
    """
    Divide *n_rows* output rows among *prompts*: one for each that is not scored.

    Where only one of them gets into the step, it has all.
    """
    scoring = [running for running in prompts if running.sequence.is_scoring]
    if scoring:
        n_free = n_rows - (len(prompts) - len(scoring))
        n_each = n_rows if single else n_free // len(scoring)
        for running in scoring:
            running.max_rows = max(n_each, 1)
