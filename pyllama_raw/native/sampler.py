"""
Sampling: output rows become tokens, and log-probabilities are noted beside them.

A row is sampled by a chain, or, without one, by taking the largest logit. Around it: what
must not be sampled, what its logits get added, and a grammar, which sampled tokens have to follow.
llguidance makes the masks: the tokens that a JSON schema, a pattern or a Lark grammar allows.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from pyllama_raw._ffi import llguidance
from pyllama_raw.errors import InvalidRequest, NativeError, SamplingFailed
from pyllama_raw.native.libllama import (
    FLOAT32,
    INT32,
    UINT32,
    Handle,
    ffi,
    last_error,
    lib,
    pointer,
    zeros,
)
from pyllama_raw.native.libllama import pointer as pointer_to
from pyllama_raw.native.stages import Stage, c_text, check, made
from pyllama_raw.native.vocab import INT32_MAX, Vocab

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


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

    def n_valid(self, tokens: array[int]) -> int:
        """How many of *tokens* may follow, one after the other; changes nothing."""
        raw = self._numbers(tokens)
        n_valid = self._lib.llg_matcher_validate_tokens(self.ptr, raw, len(tokens))
        return max(int(n_valid), 0)

    def take_back(self, n_tokens: int) -> None:
        """Be where it was before the last *n_tokens*."""
        self._lib.llg_matcher_rollback(self.ptr, n_tokens)

    def forced(self, n_most: int) -> tuple[int, ...]:
        """Tokens of the one text that can follow, at most so many; none if there are several."""
        out = array("I", bytes(4 * n_most))
        raw = self._numbers(out)
        n_tokens = self._lib.llg_matcher_compute_ff_tokens(self.ptr, raw, n_most)
        return tuple(out[: max(n_tokens, 0)])

    @staticmethod
    def _numbers(tokens: array[int]) -> Any:
        return llguidance.declared().from_buffer("uint32_t[]", tokens)


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


FIRST_MAX = 128  # candidates that are worth choosing before all else is done
MAX_TOP = 4096  # insertion into a sorted list: not for more


class SamplerChain(Handle):
    """A llama_sampler chain. Belongs to one request, or is the lane of a slot."""

    # It was a lane: libllama takes a chain once, and apply() would skip stages.
    spent = False

    @classmethod
    def build(cls, stages: Sequence[Stage], vocab: Vocab) -> Self:
        """
        The chain of *stages*; the last one has to choose a token.

        Raises:
            InvalidRequest: a number out of range.
            Unsupported: the vocabulary lacks what a stage needs.
            NativeError: libllama could not make a stage.
        """
        params = lib.llama_sampler_chain_default_params()
        chain = cls(
            lib.llama_sampler_chain_init(params),
            lib.llama_sampler_free,
            parents=[vocab.owner],  # some stages read its vocabulary
        )
        # The chain owns its stages, so closing it frees those that were made.
        try:
            for stage in stages:
                stage_ptr = made(type(stage).__name__, stage.make(vocab))
                lib.llama_sampler_chain_add(chain.ptr, stage_ptr)
        except BaseException:
            chain.close()
            raise
        return chain

    def accept(self, tokens: array[int]) -> None:
        """Let the penalties know *tokens*, in one call."""
        code = lib.plr_sampler_accept_many(
            self.ptr, pointer(tokens, INT32), len(tokens)
        )
        if code:
            raise NativeError("llama_sampler_accept", code, last_error())

    def spend(self) -> Any:
        """The pointer, for a context that runs the chain in its graph; for the only time."""
        if self.spent:
            raise InvalidRequest("chain", "a lane", "chains that never were one")
        self.spent = True
        return self.ptr


class TokenTable:
    """
    Token ids, and what their logits get added, as C reads them. Samplers may share one.

    Making one takes a tenth of a microsecond a token, so large ones are not made in the
    engine thread.
    """

    __slots__ = ("raw",)

    def __init__(self, name: str, tokens: Sequence[int] | Mapping[int, float]) -> None:
        """*name* is what a wrong id is told with."""
        for token in tokens:
            if not 0 <= token <= INT32_MAX:
                raise InvalidRequest(name, token, "token ids")
        if isinstance(tokens, Mapping):
            self.raw = ffi.new("llama_logit_bias[]", list(tokens.items()))
        else:
            self.raw = ffi.new("llama_token[]", list(tokens))

    def __len__(self) -> int:
        return len(self.raw)


class RowSampler:
    """
    The sampler of the rows of one request.

    Closes its chain and grammar. Used after close(), its rows fail and no other.

    Args:
        chain: None takes the largest logit, the lowest id among equals.
        suppress: ids that are never sampled.
        ending: ids that are not sampled before n_min others have been.
        bias: added to the logits of these ids, before all else.
        grammar: what the token must be allowed by.
        mask: uint32 [ceil(n_vocab / 32)], one bit a token, read at every sampling; None:
            all may be sampled.
        n_first: the chain begins with a top-k of so many, 0 to FIRST_MAX; 0: with anything.
            Rows of a slot with a lane need it.
    """

    def __init__(
        self,
        chain: SamplerChain | None = None,
        suppress: Sequence[int] | TokenTable = (),
        *,
        ending: Sequence[int] = (),
        n_min: int = 0,
        bias: Mapping[int, float] | TokenTable | None = None,
        grammar: Grammar | None = None,
        mask: array[int] | NDArray[np.uint32] | None = None,
        n_first: int = 0,
    ) -> None:
        # A lane skips stages on the host: libllama takes a chain once, for the graph.
        check("n_first", n_first, 0, FIRST_MAX)
        if chain is not None and chain.spent:
            raise InvalidRequest("chain", "a lane", "chains that never were one")
        self.chain, self.grammar, self.mask = chain, grammar, mask
        self._suppress = _table("suppress", suppress)
        self._ending = _table("ending", ending)
        self._bias = _table("bias", bias or {})
        self._mask = ffi.NULL if mask is None else pointer(mask, UINT32)
        # C reads the struct at every sampling. What it points to is held by this object.
        self._struct = ffi.new("plr_sampler *")
        self._struct.chain = ffi.NULL if chain is None else chain.ptr
        self._struct.grammar = ffi.NULL if grammar is None else grammar.ptr
        self._struct.mask = self._mask
        self._struct.bias, self._struct.n_bias = self._bias.raw, len(self._bias)
        self._struct.suppress = self._suppress.raw
        self._struct.n_suppress = len(self._suppress)
        self._struct.ending, self._struct.n_ending = self._ending.raw, len(ending)
        self._struct.n_min = n_min
        # Without a chain the largest logit is taken, which is a top-k of one.
        self.n_first = 1 if chain is None else n_first
        self.n_forbidden = len(suppress) + len(ending)  # at most
        self._struct.n_first = self.n_first
        self.address = int(ffi.cast("uintptr_t", self._struct))

    def watch(self, logprobs: RowLogprobs | None) -> None:
        """Fill *logprobs* with every token from now on."""
        self._logprobs = logprobs
        self._struct.logprobs = ffi.NULL if logprobs is None else logprobs.ptr

    def use_masks(self, masks: array[int]) -> None:
        """Read *masks* from now on: one, or one for each place of a sequence in the step."""
        self._mask = pointer(masks, UINT32)
        self._struct.mask = self._mask

    @property
    def n_on_host(self) -> int:
        """Tokens chosen from a row of logits."""
        return int(self._struct.n_on_host)

    @property
    def n_on_lane(self) -> int:
        """Tokens chosen from what the lane of a slot left."""
        return int(self._struct.n_on_lane)

    def sample(self, logits: NDArray[np.float32]) -> int:
        """
        A token for a row that comes from no context. *logits* are changed.

        Raises:
            SamplingFailed: no token is allowed, or this is closed.
        """
        token = ffi.new("llama_token *")
        row = pointer(logits, FLOAT32, writable=True)
        code = lib.plr_sample(self._struct, row, len(logits), token)
        if code:
            raise SamplingFailed("llama_sampler_sample", code, last_error())
        return int(token[0])

    def close(self) -> None:
        """Free chain and grammar. Idempotent."""
        # The sign by which C refuses rows of a closed sampler, and only those.
        self._struct.n_suppress = -1
        self._struct.chain = self._struct.grammar = self._struct.mask = ffi.NULL
        for owned in (self.chain, self.grammar):
            if owned is not None:
                owned.close()


class RowSamplers:
    """The samplers of a step by row: a table of pointers, cheap to set each step."""

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise InvalidRequest("capacity", capacity, "at least 1")
        self.capacity = capacity
        self._table = array("Q", bytes(8 * capacity))
        self._samplers: list[RowSampler | None] = [None] * capacity
        self.ptr = ffi.cast("plr_sampler **", ffi.from_buffer(self._table))

    def set_all(self, samplers: list[RowSampler]) -> None:
        """Set rows 0 to len(samplers) - 1."""
        # Streams go on in the same rows for many steps, so the table seldom changes.
        count = len(samplers)
        if count > self.capacity:
            raise InvalidRequest("rows", count, f"at most {self.capacity}")
        if self._samplers[:count] != samplers:
            addresses = [sampler.address for sampler in samplers]
            self._table[:count] = array("Q", addresses)
            self._samplers[:count] = samplers


def _table(
    name: str, tokens: Sequence[int] | Mapping[int, float] | TokenTable
) -> TokenTable:
    return tokens if isinstance(tokens, TokenTable) else TokenTable(name, tokens)


class RowScores(NamedTuple):
    """Log-softmax of rows: of one token each, and of the most likely ones."""

    logprobs: array[float]  # [n_rows]
    ids: array[int]  # [n_rows * n_top], of a row best first; -1 where there is none
    values: array[float]  # [n_rows * n_top]


class RowLogprobs:
    """
    The records that a row sampler writes when it samples; valid until it does so again.

    Args:
        n_top: most likely tokens to tell.
        of_sampler: of the distribution the token was drawn from, not of the raw row.
        n_places: rows of its sequence in a step, at most.
    """

    def __init__(
        self, n_top: int, *, of_sampler: bool = False, n_places: int = 1
    ) -> None:
        check_top(n_top)
        self._n_top = n_top
        self._ids = zeros(INT32, n_top * n_places)
        self._values = zeros(FLOAT32, n_top * n_places)
        self.ptr = ffi.new("plr_logprobs[]", n_places)
        ids = pointer(self._ids, INT32, writable=True)
        values = pointer(self._values, FLOAT32, writable=True)
        for place in range(n_places):
            record = self.ptr[place]
            record.n_top, record.of_sampler = n_top, of_sampler
            record.ids, record.values = ids + place * n_top, values + place * n_top

    @property
    def value(self) -> float:
        """The logprob of the token that was sampled."""
        return self.value_at(0)

    @property
    def top(self) -> tuple[tuple[int, float], ...]:
        """(id, logprob) of the most likely tokens, best first."""
        return self.top_at(0)

    def value_at(self, place: int) -> float:
        """As `value`, of the row *place* of its sequence."""
        return float(self.ptr[place].value)

    def top_at(self, place: int) -> tuple[tuple[int, float], ...]:
        """As `top`, of the row *place* of its sequence."""
        start = place * self._n_top
        row = slice(start, start + self.ptr[place].n_found)
        ids, values = self._ids[row].tolist(), self._values[row].tolist()
        return tuple(zip(ids, values, strict=True))


def check_top(n_top: int) -> None:
    """Raise InvalidRequest if so many are not told."""
    if not 0 <= n_top <= MAX_TOP:
        raise InvalidRequest("n_top", n_top, f"0 to {MAX_TOP}")
