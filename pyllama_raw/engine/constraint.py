"""
Constraints on the output of a request: made once, started for each output.

Making it may take long and is done in a worker thread; the engine thread starts it. A
grammar is asked about each token that was drawn; of a schema each step computes a mask.

Closing an engine does not wait for what is made here, but for the moments in which the
vocabulary is read.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import Lock
from typing import NamedTuple

from pyllama_raw.engine.guidance import BYTES, Guidance, MaskState, Trials, byte_trials
from pyllama_raw.engine.parts import Reading, at_once
from pyllama_raw.engine.sampling import NamedTokens, dry_stage
from pyllama_raw.errors import BadGrammar, BadSchema, Unsupported
from pyllama_raw.native.grammar import Grammar, MaskTokenizer, Matcher, Triggers
from pyllama_raw.native.stages import HISTORY_MAX
from pyllama_raw.native.vocab import Vocab
from pyllama_raw.options.constraints import refusal
from pyllama_raw.options.sampling import SamplingParams

# Makes the state of one output, because states are never shared. A grammar is asked by the
# sampler about each token that it drew.
Start = Callable[[], Grammar | MaskState]


class OutputRules(NamedTuple):
    """Rules that are the same for all outputs of a request."""

    start: Start | None  # the constraint of one output, if there is any
    token_names: NamedTokens


class Constraints:
    """Makes the constraints of one model; any thread may call it."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._lock = Lock()
        self._guidance: Guidance | None = None
        self._grammars: Grammars | None = None

    def rules(self, params: SamplingParams, reading: Reading) -> OutputRules:
        """
        Check and compile all that *params* ask for.

        Stages that are slow to make are made too, so that the engine thread finds them.

        Raises:
            BadGrammar, BadSchema: it cannot be used; the error says where and why.
            Unsupported: the vocabulary has no end token.
        """
        # Tables of tokens and dry runs read the whole vocabulary.
        token_names = reading(partial(self._read, params))
        return OutputRules(self.make(params, reading), token_names)

    def _read(self, params: SamplingParams) -> NamedTokens:
        vocab = self._vocab
        dry = dry_stage(params, min(vocab.n_ctx_train, HISTORY_MAX))
        if dry is not None:
            dry.prepare(vocab)
        return NamedTokens.of(params, vocab)

    def make(self, params: SamplingParams, reading: Reading = at_once) -> Start | None:
        """Starts the language of *params*; None if they name none. Raises like rules()."""
        match params.constraint:
            # Most requests.
            case None:
                return None
            # GBNF, which is written as a Lark grammar first.
            case "grammar":
                with self._lock:
                    if self._grammars is None:
                        self._grammars = reading(partial(Grammars, self._vocab))
                return self._grammars.make(params, reading)
            case "json_schema" | "regex" | "lark" as kind:
                with self._lock:  # the first request of this kind reads the vocabulary
                    if self._guidance is None:
                        make = partial(Guidance, self._vocab, reading)
                        self._guidance = reading(make)
                return self._guidance.make(kind, getattr(params, kind))


class Grammars:
    """Makes the grammars of one vocabulary; any thread may call it."""

    def __init__(self, vocab: Vocab) -> None:
        """
        Reads the whole vocabulary.

        Raises:
            Unsupported: the vocabulary has no end token.
        """
        if vocab.kind == "none" or not vocab.eog_tokens:
            raise Unsupported("a grammar", "the vocabulary has no end token")
        self._vocab = vocab
        pieces = [vocab.piece(t, special=True) for t in range(vocab.n_tokens)]
        # Tokens without text cannot be told apart by a grammar of texts.
        silent = {t for t, piece in enumerate(pieces) if piece[:1] in (b"", b"\0")}
        self._silent = silent | vocab.eog_tokens
        for token in vocab.eog_tokens:
            pieces[token] = b"\xff" + pieces[token]  # in no text
        ends = sorted(vocab.eog_tokens)
        self._tokenizer = MaskTokenizer(pieces, ends, None)
        self._trials = Trials(pieces, ends)

    def make(self, params: SamplingParams, reading: Reading) -> partial[Grammar]:
        """Compile the grammar of *params*, with its first mask. Raises BadGrammar."""
        from pyllama_raw.options.gbnf import to_lark  # few engines see any

        assert params.grammar is not None
        find_token = partial(self._find_token, reading)
        text = to_lark(params.grammar, params.grammar_root, find_token, self._silent)
        try:
            # In a process of its own first, which may die of it.
            self._trials.n_bytes("lark", text)
        except BadSchema as error:
            # Its place is one in a text of ours.
            raise BadGrammar(error.reason, None) from error
        matcher = Matcher.compile(self._tokenizer, "lark", text)
        matcher.compute_mask()
        if matcher.error:
            raise BadGrammar(refusal("lark", matcher.error).reason, None)
        # A lazy grammar begins at one of these.
        triggers = Triggers(
            [t for t in params.grammar_triggers if isinstance(t, str)],
            [t for t in params.grammar_triggers if isinstance(t, int)],
        )
        return partial(Grammar, matcher, self._vocab, triggers)

    def _find_token(self, reading: Reading, name: int | str) -> int | None:
        vocab = self._vocab
        # A number names a token of the vocabulary.
        if isinstance(name, int):
            return name if name < vocab.n_tokens else None
        tokens = reading(
            lambda: vocab.tokenize(f"<{name}>", add_special=False, parse_special=True)
        )
        return tokens[0] if len(tokens) == 1 else None


WHITE = frozenset(
    b"\t\n\v\f\r\x1c\x1d\x1e\x1f \xc2\xe1\xe2\xe3"
)  # and first bytes of it


def may_begin_with_space(rule: str) -> bool:
    """
    Whether what *rule*, of a Lark grammar, stands for may begin with white space.

    Also where that cannot be told without the vocabulary, or the rule is wrong.
    """
    text = f"start: {rule}"
    try:
        byte_trials().n_bytes("lark", text)
        matcher = Matcher.compile(MaskTokenizer(BYTES, [256], None), "lark", text)
        matcher.compute_mask()
    except BadSchema:
        return True
    mask = matcher.mask
    return bool(matcher.error) or any(mask[b // 32] >> b % 32 & 1 for b in WHITE)
