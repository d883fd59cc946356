"""A vocabulary of bytes."""

from __future__ import annotations

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
        return dict.fromkeys(_CONTROL.values(), True)

    def tokenize(
        self, text: str, *, add_special: bool, parse_special: bool
    ) -> array[int]:
        """One token a byte of UTF-8."""
        tokens = array("i", [BOS] if add_special else [])
        while parse_special and (found := _first_control(text)):
            before, token, text = found
            tokens.extend(before.encode())
            tokens.append(token)
        tokens.extend(text.encode())
        return tokens

    def piece(self, token: int, special: bool = False) -> bytes:
        """The byte of *token*."""
        if token < 256:
            return bytes([token])
        return _CONTROL[token].encode() if special else b""

    @property
    def pieces(self) -> Sequence[bytes]:
        """All of them."""
        return [self.piece(token) for token in range(self.n_tokens)]


_CONTROL = {BOS: "<s>", EOS: "</s>"}


def _first_control(text: str) -> tuple[str, int, str] | None:
    """(before, token, after) of the first control token in *text*."""
    found = [
        (text.find(name), token) for token, name in _CONTROL.items() if name in text
    ]
    if not found:
        return None
    at, token = min(found)
    return text[:at], token, text[at + len(_CONTROL[token]) :]
