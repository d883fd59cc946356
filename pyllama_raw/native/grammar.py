"""A grammar that sampled tokens have to follow, and where it is in one output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from pyllama_raw._ffi import llguidance
from pyllama_raw.errors import InvalidRequest, NativeError
from pyllama_raw.native.guidance import MaskTokenizer, Matcher
from pyllama_raw.native.handle import Handle
from pyllama_raw.native.libllama import ffi, last_error, lib
from pyllama_raw.native.stages import c_text
from pyllama_raw.native.vocab import INT32_MAX, Vocab


class Grammar(Handle):
    """Forbids the tokens that its matcher does not allow. Has a state."""

    _parents_of_copies: Sequence[Handle]

    @classmethod
    def make(
        cls,
        matcher: Matcher,
        tokenizer: MaskTokenizer,
        vocab: Vocab,
        *,
        trigger_texts: Sequence[str] = (),
        trigger_tokens: Sequence[int] = (),
    ) -> Self:
        """
        Make the grammar of *matcher*, at its start.

        Args:
            tokenizer: of the matcher.
            trigger_texts, trigger_tokens: the first of these in the output begins the
                grammar's text; none: the output does.
        """
        for token in trigger_tokens:
            if not 0 <= token <= INT32_MAX:
                raise InvalidRequest("grammar_triggers", token, "token ids")
        texts = [c_text("grammar_triggers", text) for text in trigger_texts]
        triggers = ffi.new("plr_triggers *")
        triggers.texts = kept = ffi.new("const char *[]", texts)
        triggers.tokens = tokens = ffi.new("llama_token[]", list(trigger_tokens))
        triggers.n_texts, triggers.n_tokens = len(texts), len(trigger_tokens)
        functions = ffi.new("plr_llguidance *")
        functions.tokenizer = _address(tokenizer)
        for name, address in llguidance.addresses(tokenizer.lib).items():
            setattr(functions, name, ffi.cast("void *", address))
        pieces = _pieces(vocab)
        found = lib.plr_grammar_new(pieces.ptr, functions, _address(matcher), triggers)
        del kept, tokens  # C has copied them
        return cls._checked(found, [pieces, tokenizer])

    @classmethod
    def _checked(cls, found: Any, parents: Sequence[Handle]) -> Self:
        if found == ffi.NULL:
            raise NativeError("plr_grammar_new", None, last_error())
        made = cls(found, lib.plr_grammar_free, parents=parents)
        made._parents_of_copies = parents
        return made

    def copy(self) -> Self:
        """One of its own, in the same state."""
        return self._checked(lib.plr_grammar_copy(self.ptr), self._parents_of_copies)


def _address(handle: Handle) -> Any:
    """The address of an object of llguidance, which another ffi has declared."""
    number = int(llguidance.declared().cast("uintptr_t", handle.ptr))
    return ffi.cast("void *", number)


def _pieces(vocab: Vocab) -> Handle:
    """Pieces of the tokens of *vocab*; read when the first grammar is made."""
    with vocab.lock:
        if vocab.grammar_pieces is None:
            found = lib.plr_pieces_new(vocab.ptr)
            if found == ffi.NULL:
                raise NativeError("plr_pieces_new", None, last_error())
            vocab.grammar_pieces = Handle(found, lib.plr_pieces_free)
        return vocab.grammar_pieces
