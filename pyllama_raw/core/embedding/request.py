"""A request for vectors of texts."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from pyllama_raw.core.request import Request


@dataclass(frozen=True, slots=True)
class EmbedRequest(Request):
    """Texts, each of which becomes a vector; tokens are those of all texts."""

    ends: tuple[int, ...] = ()  # where each text ends in tokens; none is empty
    may_cut: bool = False  # whether a text may be computed in several steps

    def text(self, index: int) -> array[int]:
        """Tokens of the text *index*."""
        return self.tokens[self.ends[index - 1] if index else 0 : self.ends[index]]
