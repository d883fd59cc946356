"""A GBNF grammar that sampled tokens have to follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

from pyllama_raw.errors import BadGrammar, InvalidRequest, NativeError
from pyllama_raw.native import log
from pyllama_raw.native.handle import Handle
from pyllama_raw.native.libllama import ffi, last_error, lib
from pyllama_raw.native.stages import c_text
from pyllama_raw.native.vocab import INT32_MAX, Vocab


class Grammar(Handle):
    """A llama_sampler that forbids what its grammar does not allow. Has a state."""

    @classmethod
    def parse(
        cls,
        text: str,
        vocab: Vocab,
        *,
        root: str = "root",
        trigger_texts: Sequence[str] = (),
        trigger_tokens: Sequence[int] = (),
    ) -> Self:
        """
        The grammar at its start.

        Args:
            text: checked already: libllama hangs or overflows its stack on some that
                break the rules of pyllama_raw/sampling/gbnf.py.
            trigger_texts, trigger_tokens: the first of these in the output begins the
                grammar's text; none: the output does.

        Raises:
            BadGrammar: libllama refused it.
        """
        if vocab.kind == "none":
            raise BadGrammar("the model has no vocabulary", None)
        for token in trigger_tokens:
            if not 0 <= token <= INT32_MAX:
                raise InvalidRequest("grammar_triggers", token, "token ids")
        lazy = bool(trigger_texts or trigger_tokens)
        patterns = [c_text("grammar_triggers", _escape(t)) for t in trigger_texts]
        since = log.mark()
        pointer = lib.plr_init_grammar(
            vocab.ptr, c_text("grammar", text), c_text("grammar_root", root), lazy,
            ffi.new("const char *[]", patterns), len(patterns),
            ffi.new("llama_token[]", list(trigger_tokens)), len(trigger_tokens),
        )  # fmt: skip
        if pointer == ffi.NULL:
            said = last_error() or log.last_errors(since) or "libllama gave no reason"
            raise BadGrammar(said, None)
        return cls._own(pointer, vocab)

    def copy(self, vocab: Vocab) -> Grammar:
        """One of its own, in the same state."""
        pointer = lib.plr_sampler_clone(self.ptr)
        if pointer == ffi.NULL:
            raise NativeError("llama_sampler_clone", None, last_error())
        return self._own(pointer, vocab)

    @classmethod
    def _own(cls, pointer: Any, vocab: Vocab) -> Self:
        return cls(pointer, lib.llama_sampler_free, parents=[vocab.model])


def _escape(text: str) -> str:
    """*text* as an ECMAScript pattern. Patterns of users could overflow C's stack."""
    return "".join("\\" + c if c in "^$\\.*+?()[]{}|" else c for c in text)
