"""The vocabulary of a model: text to tokens, token to bytes."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from functools import cached_property
from itertools import compress, pairwise
from threading import Lock
from typing import Any, Literal, get_args, overload

from pyllama_raw.errors import InvalidRequest, NativeError, Unsupported
from pyllama_raw.native.libllama import (
    INT64,
    Handle,
    ffi,
    last_error,
    lib,
    pointer,
    zeros,
)

INT32_MAX = 2**31 - 1
_MAX_TEXT_BYTES = INT32_MAX - 16

# Patterns that split texts are matched by std::regex, which recurses once a character: 321
# bytes of stack each, as built by GCC with -O3.
STACK_BYTES_PER_CHARACTER = 1024
SMALL_WORD = 256  # characters that any thread has the stack for
MAX_WORD = 2**18  # characters: take 84 MiB while they are matched
# libllama walks past all special tokens of a text for each of them: 20,000 take 4 s. So a text is
# parted where one of them certainly begins.
FEW_MARKERS = 512  # special tokens of a part
MAX_MARKERS = 2**14  # of a part that cannot be parted: takes 2 s
SMALL_TEXT = 2**12  # bytes that are not parted
# Tokenizers that look at the rest of a stretch from each place of it: 20,000 blanks take half
# a minute with the first. What that is made of, and how many characters of it are allowed.
_QUADRATIC = {
    "deepseek-llm": ("blanks", 512),
    "superbpe": ("digits", 512),
    "jais-2": ("blanks", 2**14),
}

# In messages of exceptions that tell of a text, and not of the machine.
_REFUSALS = ("GGML_ASSERT", "::at", "out of array bounds", "invalid", "regex")

Kind = Literal["none", "spm", "bpe", "wpm", "ugm", "rwkv", "plamo2", "test", "other"]
_KINDS: tuple[Kind, ...] = get_args(Kind)  # llama.h: enum llama_vocab_type, from 0 on


class Vocab:
    """
    Lives in its model and is as closed as it.

    Thread:
        Any; libllama's tokenizer is thread-safe.
    """

    def __init__(self, owner: Handle, n_ctx_train: int, splitting: str = "") -> None:
        """
        Args:
            owner: the model.
            n_ctx_train: tokens of the longest text that it was trained for.
            splitting: the name of the patterns by which its tokenizer splits texts.
        """
        self.owner, self.n_ctx_train = owner, n_ctx_train
        self._quadratic = _QUADRATIC.get(splitting)
        self._ptr = ptr = lib.llama_model_get_vocab(owner.ptr)
        number = min(lib.llama_vocab_type(ptr), len(_KINDS) - 1)
        self.kind = _KINDS[number]  # the tokenizer; "none": the file has no vocabulary
        self.n_tokens = int(lib.llama_vocab_n_tokens(ptr))
        self.bos = self._special(lib.llama_vocab_bos(ptr))
        self.eos = self._special(lib.llama_vocab_eos(ptr))
        self.sep = self._special(lib.llama_vocab_sep(ptr))
        self.eot = self._special(lib.llama_vocab_eot(ptr))
        self.add_bos = bool(lib.llama_vocab_get_add_bos(ptr))
        self.add_eos = bool(lib.llama_vocab_get_add_eos(ptr))
        self.add_sep = bool(lib.llama_vocab_get_add_sep(ptr))
        self.fill_tokens = {  # of models that fill a gap in a text
            "prefix": self._special(lib.llama_vocab_fim_pre(ptr)),
            "suffix": self._special(lib.llama_vocab_fim_suf(ptr)),
            "middle": self._special(lib.llama_vocab_fim_mid(ptr)),
            "pad": self._special(lib.llama_vocab_fim_pad(ptr)),
            "repo": self._special(lib.llama_vocab_fim_rep(ptr)),
            "separator": self._special(lib.llama_vocab_fim_sep(ptr)),
        }
        self.lock = Lock()  # for templates
        self.templates: dict[object, Handle] = {}  # of stages that are slow to make

    def _special(self, token: int) -> int | None:
        return token if 0 <= token < self.n_tokens else None

    @property
    def ptr(self) -> Any:
        """llama_vocab *. Raises ClosedError after the model's close()."""
        assert self.owner.ptr
        return self._ptr

    @cached_property
    def eog_tokens(self) -> frozenset[int]:
        """All tokens that end generation."""
        if self.kind == "none":
            return frozenset()
        is_eog = ffi.new("bool[]", self.n_tokens)
        lib.plr_vocab_eog(self.ptr, is_eog)
        return frozenset(compress(range(self.n_tokens), bytes(ffi.buffer(is_eog))))

    @cached_property
    def suppress_tokens(self) -> tuple[int, ...]:
        """Tokens that the model file says must not be sampled."""
        count = ffi.new("int32_t *")
        pointer = lib.llama_vocab_get_suppress_tokens(self.ptr, count)
        tokens = (int(pointer[i]) for i in range(count[0]))
        return tuple(token for token in tokens if 0 <= token < self.n_tokens)

    @cached_property
    def special_texts(self) -> dict[str, bool]:
        """
        Texts that tokenize() finds before all else, and whether each is control.

        Control tokens are found only if *parse_special*.
        """
        if self.kind == "none":
            return {}
        ptr = self.ptr
        control = lib.LLAMA_TOKEN_ATTR_CONTROL | lib.LLAMA_TOKEN_ATTR_UNKNOWN
        texts: dict[str, bool] = {}
        # tokenize() looks for those of users always, for control tokens if it is told to.
        for token in range(self.n_tokens):
            attr = lib.llama_vocab_get_attr(ptr, token)
            if attr & (control | lib.LLAMA_TOKEN_ATTR_USER_DEFINED):
                text = self.piece(token, special=True).decode(errors="replace")
                texts[text] = bool(attr & control)
        texts.pop("", None)
        return texts

    def tokenize(
        self, text: str, *, add_special: bool, parse_special: bool
    ) -> array[int]:
        """
        Tokens of *text* as array("i").

        Args:
            add_special: put BOS and EOS around it if the model wants that.
            parse_special: read names of special tokens as such, not as plain text.

        Raises:
            InvalidRequest: lone surrogates, more than 2 GiB, or a stretch without a break
                that the tokenizer would take too long or too much memory for.
            Unsupported: the model has no vocabulary, or one that no text can be written in.
        """
        if self.kind == "none":
            raise Unsupported("text", "the model has no vocabulary: give token ids")
        # There libllama's tokenizer would not come back.
        if self._unfinished:
            reason = f"the byte {self._unfinished!r} begins tokens of the vocabulary and is none"
            raise Unsupported(
                "text", f"{reason}, so the tokenizer may not end: give token ids"
            )
        raw = _encode(text)
        # A long word needs a larger stack, a text of many special tokens has to be parted.
        stack_bytes = self._stack_bytes(raw)
        ends = self._parts(raw, parse_special=parse_special)
        # Nearly all texts: one call for the whole.
        if not ends:
            return self._whole(raw, (add_special, parse_special), stack_bytes)
        # Parts have nothing around them. BOS and EOS are those of an empty text, and the kind
        # of the vocabulary tells which of them stand before.
        around = self._whole(b"", (add_special, False), 0)
        n_before = min(len(around), int(self.kind == "wpm" or self.add_bos))
        tokens = around[:n_before]
        for start, end in pairwise([0, *ends, len(raw)]):
            tokens += self._whole(raw[start:end], (False, parse_special), stack_bytes)
        return tokens + around[n_before:]

    @cached_property
    def _unfinished(self) -> bytes:
        """
        A byte that begins tokens, and is none; empty if there is no such byte.

        The tokenizer of RWKV begins anew, without an end, where no token fits what follows.
        """
        if self.kind != "rwkv":
            return b""
        texts = {
            piece or self.piece(token, special=True)
            for token, piece in enumerate(self.pieces)
        }
        return min({text[:1] for text in texts} - texts, default=b"")

    @cached_property
    def _specials(self) -> Any:
        """llama_token[] of the tokens that are found in texts before all else."""
        specials = ffi.new("llama_token[]", self.n_tokens)
        n_specials = lib.plr_vocab_specials(self.ptr, specials)
        return ffi.new("llama_token[]", ffi.unpack(specials, n_specials))

    def _parts(self, raw: bytes, *, parse_special: bool) -> list[int]:
        """
        Where parts of *raw* end that have the tokens of the whole, but for the last one.

        Raises:
            InvalidRequest: it has too many special tokens, and cannot be parted.
        """
        if len(raw) <= SMALL_TEXT:
            return []
        # C looks for places where a special token certainly begins, FEW_MARKERS apart.
        specials, max_ends = self._specials, len(raw) // FEW_MARKERS + 1
        ends, longest = ffi.new("int32_t[]", max_ends), ffi.new("int32_t *")
        n_ends = lib.plr_text_parts(
            *(self.ptr, raw, len(raw), parse_special, specials, len(specials)),
            *(FEW_MARKERS, ends, max_ends, longest),
        )
        if n_ends < 0:
            raise NativeError("plr_text_parts", n_ends, last_error())
        if longest[0] > MAX_MARKERS:
            value = f"{longest[0]} special tokens that overlap or strip blanks"
            allowed = f"at most {MAX_MARKERS} in a row: shorten or part the text"
            raise InvalidRequest("text", value, allowed)
        return [int(ends[i]) for i in range(n_ends)]

    def _whole(
        self, raw: bytes, flags: tuple[bool, bool], stack_bytes: int
    ) -> array[int]:
        # A token has a byte or more in nearly all vocabularies; 16 are for those around.
        tokens = array("i", bytes(4 * (len(raw) + 16)))
        n_tokens = self._tokenize(raw, tokens, flags, stack_bytes)
        # Rare: more tokens than bytes. libllama tells how many.
        if n_tokens < 0:
            tokens = array("i", bytes(4 * -n_tokens))
            n_tokens = self._tokenize(raw, tokens, flags, stack_bytes)
        del tokens[n_tokens:]
        return tokens

    def _stack_bytes(self, raw: bytes) -> int:
        """
        Of the stack that *raw* needs; 0: it may be that of the caller.

        Raises:
            InvalidRequest: a stretch of it is too long.
        """
        if self.kind != "bpe" or len(raw) <= SMALL_WORD:
            return 0  # the others have no patterns
        stretches = ffi.new("plr_stretches *")
        lib.plr_text_stretches(raw, len(raw), stretches)
        # Time: tokenizers of some models take the square of a stretch of one kind.
        if self._quadratic is not None:
            kind, limit = self._quadratic
            if (n_characters := int(getattr(stretches, kind))) > limit:
                value = f"{n_characters} {kind} in a row"
                allowed = f"at most {limit} with the tokenizer of this model"
                raise InvalidRequest("text", value, f"{allowed}: break or shorten them")
        # Memory: std::regex recurses once a character of a word.
        n_characters = int(stretches.word)
        if n_characters > MAX_WORD:
            value = f"{n_characters} characters without a break"
            allowed = f"at most {MAX_WORD}: put blanks or line breaks between them"
            raise InvalidRequest("text", value, allowed)
        if n_characters <= SMALL_WORD:
            return 0
        return 2**18 + STACK_BYTES_PER_CHARACTER * n_characters

    def _tokenize(
        self, raw: bytes, tokens: array[int], flags: tuple[bool, bool], stack_bytes: int
    ) -> int:
        n_tokens = ffi.new("int32_t *")
        with ffi.from_buffer("llama_token[]", tokens, require_writable=True) as out:
            code = lib.plr_tokenize(
                self.ptr, raw, len(raw), out, len(tokens), *flags, stack_bytes, n_tokens
            )
        message = last_error() if code else "more tokens than fit a 32-bit count"
        # The tokenizer fails for what stands in the text, and is as it was before: that of some
        # models takes no two blanks together, or no characters that have no token.
        if code != 0 and any(word in message for word in _REFUSALS):
            raise self._refusal(raw, message)
        if code != 0 or n_tokens[0] == -INT32_MAX - 1:
            raise NativeError("llama_tokenize", code, message)
        return int(n_tokens[0])

    def _refusal(self, raw: bytes, message: str) -> InvalidRequest:
        """That of a text for which libllama raised an exception with this *message*."""
        stretches = ffi.new("plr_stretches *")
        lib.plr_text_stretches(raw, len(raw), stretches)
        value, advice = f"{len(raw)} bytes", "give another text, or token ids"
        if "find(' ')" in message:  # its assertion that no blank is in a word
            value = f"{int(stretches.blanks)} blanks in a row"
            advice = "put single blanks between words"
        allowed = f"what the tokenizer of this model takes ({message}): {advice}"
        return InvalidRequest("text", value, allowed)

    @cached_property
    def pieces(self) -> Pieces:
        """piece() of every token; outlives the model."""
        if self.kind == "none":
            return Pieces(b"", zeros(INT64, self.n_tokens))
        # A guess, which most vocabularies fit; C tells the size if this one does not.
        size = 16 * self.n_tokens
        ends = zeros(INT64, self.n_tokens)
        ends_ptr = pointer(ends, INT64, writable=True)
        while True:
            buffer = ffi.new("char[]", size)
            n_bytes = lib.plr_vocab_pieces(self.ptr, buffer, size, ends_ptr)
            if n_bytes < 0:
                raise NativeError("llama_token_to_piece", n_bytes, last_error())
            if n_bytes <= size:
                break
            size = n_bytes
        return Pieces(bytes(ffi.buffer(buffer, n_bytes)), ends)

    def piece(self, token: int, special: bool = False) -> bytes:
        """
        Bytes of *token*, part of a character perhaps; b"" without a vocabulary.

        Args:
            special: write control tokens by their names; otherwise they are b"".
        """
        if not 0 <= token < self.n_tokens:
            raise InvalidRequest("token", token, f"0 to {self.n_tokens - 1} (n_vocab)")
        if self.kind == "none":
            return b""
        size = 64
        while True:
            buffer = ffi.new("char[]", size)
            n = lib.llama_token_to_piece(self.ptr, token, buffer, size, 0, special)
            if n >= 0:
                return bytes(ffi.buffer(buffer, n))
            size = -n


def _encode(text: str) -> bytes:
    try:
        raw = text.encode("utf-8")
    except UnicodeEncodeError as error:
        bad = text[error.start : error.start + 1]
        raise InvalidRequest("text", bad, "text without lone surrogates") from None
    if len(raw) > _MAX_TEXT_BYTES:
        raise InvalidRequest("text", f"{len(raw)} bytes", f"at most {_MAX_TEXT_BYTES}")
    return raw


class Pieces(Sequence[bytes]):
    """
    One string, out of which pieces are cut when somebody asks for them.

    A vocabulary has up to some hundred thousand, and a process reads few of them.
    """

    def __init__(self, joined: bytes, ends: array[int]) -> None:
        """
        Args:
            ends: ends[i] is where piece i ends in *joined* and the next one begins.
        """
        self._joined = joined
        self._starts = array("q", [0]) + ends

    def __len__(self) -> int:
        return len(self._starts) - 1

    @overload
    def __getitem__(self, token: int) -> bytes: ...

    @overload
    def __getitem__(self, token: slice) -> list[bytes]: ...

    def __getitem__(self, token: int | slice) -> bytes | list[bytes]:
        if isinstance(token, slice):
            return [self[i] for i in range(len(self))[token]]
        if token < 0:
            token = range(len(self))[token]
        starts = self._starts
        return self._joined[starts[token] : starts[token + 1]]
