"""A vocabulary of bytes."""

from __future__ import annotations

import re
from array import array
from collections.abc import Mapping, Sequence

BOS, EOS = 256, 257


class FakeVocab:
    """Tokens 0 to 255 are bytes; 256 and 257 are the control tokens <s> and </s>."""

    n_tokens = 258
    bos: int | None = BOS
    eos: int | None = EOS
    sep: int | None = None
    add_bos = True
    add_eos = False
    add_sep = False
    eog_tokens = frozenset({EOS})

    @property
    def special_texts(self) -> Mapping[str, bool]:
        """Both control tokens."""
        return dict.fromkeys(_CONTROL, True)

    def tokenize(
        self, text: str, *, add_special: bool, parse_special: bool
    ) -> array[int]:
        """One token a byte of UTF-8."""
        tokens = array("i", [BOS] if add_special else [])
        parts = _SPLIT(text) if parse_special else [text]
        for number, part in enumerate(parts):
            tokens.extend([_CONTROL[part]] if number % 2 else part.encode())
        return tokens

    def piece(self, token: int, special: bool = False) -> bytes:
        """The byte of *token*."""
        if token < 256:
            return bytes([token])
        name = {token: name for name, token in _CONTROL.items()}[token]
        return name.encode() if special else b""

    @property
    def pieces(self) -> Sequence[bytes]:
        """All of them."""
        return [self.piece(token) for token in range(self.n_tokens)]


_CONTROL = {"<s>": BOS, "</s>": EOS}
_SPLIT = re.compile("(</?s>)").split  # each second part is a control token
