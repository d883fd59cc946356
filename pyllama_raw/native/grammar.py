"""A grammar that sampled tokens have to follow, and where it is in one output."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pyllama_raw.errors import BadGrammar, InvalidRequest, NativeError
from pyllama_raw.native.arrays import UINT32, pointer
from pyllama_raw.native.handle import Handle
from pyllama_raw.native.libllama import ffi, last_error, lib
from pyllama_raw.native.stages import c_text
from pyllama_raw.native.vocab import INT32_MAX, Vocab

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class Grammar(Handle):
    """Forbids the tokens that a program does not allow. Has a state."""

    @classmethod
    def make(
        cls,
        nodes: array[int],
        sets: Sequence[int],
        start: int,
        vocab: Vocab,
        *,
        trigger_texts: Sequence[str] = (),
        trigger_tokens: Sequence[int] = (),
    ) -> Grammar:
        """
        The program at its start.

        Args:
            nodes: op, arg and next of each, as in _ffi/grammar/grammar.h.
            sets: of bytes; bit b is byte b.
            trigger_texts, trigger_tokens: the first of these in the output begins the
                grammar's text; none: the output does.

        Raises:
            BadGrammar: it begins in more places than PLR_GRAMMAR_MAX_WORK.
        """
        for token in trigger_tokens:
            if not 0 <= token <= INT32_MAX:
                raise InvalidRequest("grammar_triggers", token, "token ids")
        raw = b"".join(bits.to_bytes(32, "little") for bits in sets)
        words = array("I", struct.unpack(f"<{len(raw) // 4}I", raw))
        texts = [c_text("grammar_triggers", text) for text in trigger_texts]
        triggers = ffi.new("plr_triggers *")
        triggers.texts = kept = ffi.new("const char *[]", texts)
        triggers.tokens = tokens = ffi.new("llama_token[]", list(trigger_tokens))
        triggers.n_texts, triggers.n_tokens = len(texts), len(trigger_tokens)
        pieces = _pieces(vocab)
        found = lib.plr_grammar_new(
            pieces.ptr, ffi.from_buffer("plr_node[]", nodes), len(nodes) // 3,
            pointer(words, UINT32), len(sets), start, triggers,
        )  # fmt: skip
        del kept, tokens  # C has copied them
        if found == ffi.NULL:
            raise BadGrammar(last_error(), None)
        return cls(found, lib.plr_grammar_free, parents=[pieces])

    def copy(self, vocab: Vocab) -> Grammar:
        """One of its own, in the same state."""
        found = lib.plr_grammar_copy(self.ptr)
        if found == ffi.NULL:
            raise NativeError("plr_grammar_copy", None, last_error())
        return Grammar(found, lib.plr_grammar_free, parents=[_pieces(vocab)])

    def allowed(self, vocab: Vocab) -> NDArray[np.bool_]:
        """By token: whether it may come next. Shape [n_vocab]."""
        import numpy as np

        found = np.zeros(vocab.n_tokens, np.uint8)
        code = lib.plr_grammar_mask(self.ptr, ffi.from_buffer("uint8_t[]", found))
        if code:
            raise NativeError("plr_grammar_mask", code, last_error())
        return found.astype(np.bool_)


def _pieces(vocab: Vocab) -> Handle:
    """What its tokens write; read when the first grammar is made."""
    with vocab.lock:
        if vocab.grammar_pieces is None:
            found = lib.plr_pieces_new(vocab.ptr)
            if found == ffi.NULL:
                raise NativeError("plr_pieces_new", None, last_error())
            vocab.grammar_pieces = Handle(found, lib.plr_pieces_free)
        return vocab.grammar_pieces
