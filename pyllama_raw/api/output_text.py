"""The text of one output that is not taken apart."""

from __future__ import annotations

from collections.abc import Sequence

from pyllama_raw.core.detokenizer import Detokenizer
from pyllama_raw.core.request import Request
from pyllama_raw.replies.parts import Part, ToolCall


class OutputText:
    """The part that has been read; it has the attributes of a Reply."""

    reasoning = ""
    calls: tuple[ToolCall, ...] = ()
    n_reasoning = 0

    def __init__(self, request: Request, pieces: Sequence[bytes]) -> None:
        self._ends, self._names = request.stop_token_ids, request.names
        self._pieces = pieces
        self._detokenizer = Detokenizer(request.stop)
        self._texts: list[str] = []
        self._n_shown = 0  # texts that deltas have shown

    def take(self, tokens: tuple[int, ...]) -> None:
        """Take in the next tokens; one that ends the output has no text."""
        shown = tokens if tokens[-1] not in self._ends else tokens[:-1]
        pieces = [self._pieces[token] for token in shown]
        if self._names:
            pairs = zip(pieces, shown, strict=True)
            pieces = [piece or self._names.get(token, b"") for piece, token in pairs]
        if text := self._detokenizer.push(b"".join(pieces)):
            self._texts.append(text)

    def finish(self) -> bool:
        """Take in what was held back; whether there is more text now."""
        text = self._detokenizer.flush()
        if text:
            self._texts.append(text)
        return bool(text)

    def take_shown(self) -> tuple[str, tuple[Part, ...]]:
        """The text that was not shown before; it has no parts."""
        text = "".join(self._texts[self._n_shown :])
        self._n_shown = len(self._texts)
        return text, ()

    @property
    def content(self) -> str:
        return "".join(self._texts)
