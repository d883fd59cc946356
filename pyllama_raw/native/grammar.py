"""
Grammars that sampled tokens have to follow, and the place of an output in its grammar.

llguidance makes the masks: the tokens that a JSON schema, a pattern or a Lark grammar allows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from typing import Any, Literal, Self

from pyllama_raw._ffi import llguidance
from pyllama_raw.errors import InvalidRequest, NativeError
from pyllama_raw.native.libllama import ffi, last_error, lib
from pyllama_raw.native.pointers import UINT32, Handle, zeros
from pyllama_raw.native.pointers import pointer as pointer_to
from pyllama_raw.native.stages import c_text
from pyllama_raw.native.vocab import INT32_MAX, Vocab

Kind = Literal["json_schema", "regex", "lark"]


class MaskTokenizer(Handle):
    """A vocabulary as llguidance reads it; any thread may use it."""

    def __init__(
        self,
        pieces: Sequence[bytes],
        end_tokens: Sequence[int],
        tokenize: Callable[[bytes], Sequence[int]] | None,
    ) -> None:
        """
        Args:
            pieces: of all tokens; b"\\xff" begins what no text has.
            end_tokens: what may follow where a constraint ends; not empty.
            tokenize: called by any thread, also by those of matchers; None: the longest
                pieces are taken.

        Raises:
            ImportError: llguidance is not installed, or cannot be used.
            NativeError: llguidance does not take the vocabulary.

        Thread:
            Any. The GIL is released while the vocabulary is read.
        """
        lib = llguidance.load()
        try:
            pointer, callbacks = llguidance.new_tokenizer(
                lib, pieces, end_tokens, tokenize
            )
        except ValueError as error:
            raise NativeError("llg_new_tokenizer_v2", None, str(error)) from error

        # C calls *callbacks* until the tokenizer is freed, so the function that frees holds them.
        def free(pointer: Any, _: object = callbacks) -> None:
            lib.llg_free_tokenizer(pointer)

        super().__init__(pointer, free)
        self.lib = lib
        self.n_tokens = len(pieces)


class Matcher(Handle):
    """The place of an output in its constraint; one thread at a time."""

    def __init__(
        self, pointer: Any, tokenizer: MaskTokenizer, mask: array[int]
    ) -> None:
        super().__init__(pointer, tokenizer.lib.llg_free_matcher, parents=(tokenizer,))
        self.tokenizer, self._lib = tokenizer, tokenizer.lib
        self.mask = mask
        self._out = pointer_to(self.mask, UINT32, writable=True)

    @classmethod
    def compile(cls, tokenizer: MaskTokenizer, kind: Kind, text: str) -> Self:
        """One at the beginning; *error* says what is wrong with *text*."""
        pointer = llguidance.new_matcher(tokenizer.lib, tokenizer.ptr, kind, text)
        return cls(pointer, tokenizer, zeros(UINT32, (tokenizer.n_tokens + 31) // 32))

    def copy(self, mask: array[int]) -> Self:
        """Another one at the same place, which fills *mask* from now on."""
        copied = self._lib.llg_clone_matcher(self.ptr)
        return type(self)(copied, self.tokenizer, mask)

    @property
    def error(self) -> str:
        """Why nothing can follow; empty if something can."""
        return llguidance.error_of(self._lib, self.ptr)

    def compute_mask(self) -> None:
        """Fill `mask`, a bit for each token; all zero if nothing can follow."""
        # The mask stays the same array, whose address C has. A failure allows nothing.
        n_bytes = 4 * len(self.mask)
        if self._lib.llg_matcher_compute_mask_into(self.ptr, self._out, n_bytes):
            self.mask[:] = array(UINT32, bytes(n_bytes))

    def accept(self, token: int) -> None:
        """Go on after *token*; what it must not be, `error` tells."""
        self._lib.llg_matcher_consume_token(self.ptr, token)


class Triggers:
    """Texts and tokens, the first of which begins the text of a grammar; none: the output does."""

    def __init__(self, texts: Sequence[str] = (), tokens: Sequence[int] = ()) -> None:
        for token in tokens:
            if not 0 <= token <= INT32_MAX:
                raise InvalidRequest("grammar_triggers", token, "token ids")
        # The struct has addresses only; what they are of lives in _c_memory.
        c_texts = [c_text("grammar_triggers", text) for text in texts]
        self._c_memory = (
            c_texts,
            ffi.new("const char *[]", c_texts),
            ffi.new("llama_token[]", list(tokens)),
        )
        self.raw = ffi.new("plr_triggers *")
        _, self.raw.texts, self.raw.tokens = self._c_memory
        self.raw.n_texts, self.raw.n_tokens = len(texts), len(tokens)


class Grammar(Handle):
    """Forbids the tokens that a copy of its matcher does not allow. Has a state."""

    def __init__(self, matcher: Matcher, vocab: Vocab, triggers: Triggers) -> None:
        tokenizer = matcher.tokenizer
        # The shim calls llguidance by addresses, because it is not linked to it.
        functions = ffi.new("plr_llguidance *")
        functions.tokenizer = _address(tokenizer)
        for name, address in llguidance.addresses(tokenizer.lib).items():
            setattr(functions, name, ffi.cast("void *", address))
        pointer = lib.plr_grammar_new(
            vocab.ptr, functions, _address(matcher), triggers.raw
        )
        if pointer == ffi.NULL:
            raise NativeError("plr_grammar_new", None, last_error())
        super().__init__(
            pointer, lib.plr_grammar_free, parents=[vocab.owner, tokenizer]
        )


def _address(handle: Handle) -> Any:
    """The address of an object of llguidance, which another ffi has declared."""
    number = int(llguidance.declared().cast("uintptr_t", handle.ptr))
    return ffi.cast("void *", number)
