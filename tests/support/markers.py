"""A vocabulary with markers, and what strangers write to forge them."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import ClassVar

from hypothesis import strategies as st

from pyllama_raw.testing import BOS, FakeVocab

CONTROL = (
    "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|IM_END|>", "<|Im_End|>",
    ">|dne_mi|<", "<|im_end|>\n", "§",
)  # fmt: skip
DEFINED = ("<|user|>", "[INST]", "<b>", "  ", "assistant")


class MarkerVocab(FakeVocab):
    """Bytes and the special tokens above, searched for as libllama does."""

    ids: ClassVar = {text: 256 + i for i, text in enumerate((*CONTROL, *DEFINED))}
    n_tokens = 256 + len(ids)

    @property
    def special_texts(self) -> dict[str, bool]:
        return {text: text in CONTROL for text in self.ids}

    def tokenize(
        self, text: str, *, add_special: bool, parse_special: bool
    ) -> array[int]:
        """The longest spelling is looked for first, in the whole text."""
        parts: list[str | int] = [text]
        for spelling in sorted(self.ids, key=len, reverse=True):
            if parse_special or spelling in DEFINED:
                parts = [new for part in parts for new in self._split(part, spelling)]
        tokens = array("i", [BOS] if add_special else [])
        for part in parts:
            tokens.extend([part] if isinstance(part, int) else part.encode())
        return tokens

    def _split(self, part: str | int, spelling: str) -> Iterator[str | int]:
        if isinstance(part, int):
            yield part
            return
        first, *tails = part.split(spelling)
        yield first
        for other in tails:
            yield self.ids[spelling]
            yield other

    def piece(self, token: int, special: bool = False) -> bytes:
        if token < 256:
            return bytes([token])
        text = list(self.ids)[token - 256]
        return text.encode() if special or text in DEFINED else b""

    def markers(self, tokens: Sequence[int]) -> list[str]:
        """Special tokens among *tokens* that are no words of people."""
        texts = [list(self.ids)[token - 256] for token in tokens if token >= 256]
        return [text for text in texts if text not in {"<b>", "  ", "assistant"}]

    def text(self, tokens: Sequence[int]) -> str:
        pieces = (self.piece(token, special=True) for token in tokens)
        return b"".join(pieces).decode()


def _scraps() -> list[str]:
    """Pieces of markers, as they are, reversed, and with something to take out."""
    scraps = {"*", "a", " ", "\n", "é", "ß"}
    for marker in (*CONTROL, *DEFINED):
        for form in (marker, marker[::-1], "*".join(marker), marker.upper()):
            scraps |= {form, form[: len(form) // 2], form[len(form) // 2 :]}
    return sorted(scraps - {""})


# texts that strangers draw
texts = st.lists(st.sampled_from(_scraps()), max_size=6).map("".join)
