"""A grammar that sampled tokens have to follow, and where it is in one output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pyllama_raw._ffi import llguidance
from pyllama_raw.errors import InvalidRequest, NativeError
from pyllama_raw.native.guidance import Matcher
from pyllama_raw.native.handle import Handle
from pyllama_raw.native.libllama import ffi, last_error, lib
from pyllama_raw.native.stages import c_text
from pyllama_raw.native.vocab import INT32_MAX, Vocab


class Triggers:
    """Texts and tokens, the first of which begins the text of a grammar; none: the output does."""

    def __init__(self, texts: Sequence[str] = (), tokens: Sequence[int] = ()) -> None:
        for token in tokens:
            if not 0 <= token <= INT32_MAX:
                raise InvalidRequest("grammar_triggers", token, "token ids")
        held = [c_text("grammar_triggers", text) for text in texts]
        self._held = (
            held,
            ffi.new("const char *[]", held),
            ffi.new("llama_token[]", list(tokens)),
        )
        self.raw = ffi.new("plr_triggers *")
        _, self.raw.texts, self.raw.tokens = self._held
        self.raw.n_texts, self.raw.n_tokens = len(texts), len(tokens)


class Grammar(Handle):
    """Forbids the tokens that a copy of its matcher does not allow. Has a state."""

    def __init__(self, matcher: Matcher, vocab: Vocab, triggers: Triggers) -> None:
        tokenizer = matcher.tokenizer
        functions = ffi.new("plr_llguidance *")
        functions.tokenizer = _address(tokenizer)
        for name, address in llguidance.addresses(tokenizer.lib).items():
            setattr(functions, name, ffi.cast("void *", address))
        found = lib.plr_grammar_new(
            vocab.ptr, functions, _address(matcher), triggers.raw
        )
        if found == ffi.NULL:
            raise NativeError("plr_grammar_new", None, last_error())
        super().__init__(found, lib.plr_grammar_free, parents=[vocab.owner, tokenizer])


def _address(handle: Handle) -> Any:
    """The address of an object of llguidance, which another ffi has declared."""
    number = int(llguidance.declared().cast("uintptr_t", handle.ptr))
    return ffi.cast("void *", number)
