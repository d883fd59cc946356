"""
What limits the output of a request: made once, started for each output.

Making it may take long and is done in a worker thread; the engine thread starts it. A
grammar is followed by the sampler itself; of a schema each step computes a mask.

Closing an engine does not wait for what is made here, but for the moments in which the
vocabulary is read.
"""

from __future__ import annotations

from functools import partial
from threading import Lock
from typing import NamedTuple

from pyllama_raw.engine.guidance import Guidance, MaskConstraint
from pyllama_raw.engine.parts import Reading, at_once
from pyllama_raw.engine.sampling import NamedTokens, dry_stage
from pyllama_raw.errors import BadGrammar
from pyllama_raw.native.grammar import Grammar
from pyllama_raw.native.stages import HISTORY_MAX
from pyllama_raw.native.vocab import Vocab
from pyllama_raw.options.sampling import SamplingParams


class OutputRules(NamedTuple):
    """What is the same for all outputs of a request."""

    constraint: GrammarConstraint | MaskConstraint | None
    named: NamedTokens


class Constraints:
    """Makes the constraints of one model; any thread may call it."""

    def __init__(self, vocab: Vocab) -> None:
        self._vocab = vocab
        self._lock = Lock()
        self._guidance: Guidance | None = None

    def rules(self, params: SamplingParams, reading: Reading) -> OutputRules:
        """
        Check and compile all that *params* ask for.

        Stages that are slow to make are made too, so that the engine thread finds them.

        Raises:
            BadGrammar, BadSchema: it cannot be used; the error says where and why.
            Unsupported: the extra "guidance" is not installed.
        """
        named = reading(partial(self._read, params))
        return OutputRules(self.make(params, reading), named)

    def _read(self, params: SamplingParams) -> NamedTokens:
        vocab = self._vocab
        dry = dry_stage(params, min(vocab.model.n_ctx_train, HISTORY_MAX))
        if dry is not None:
            dry.prepare(vocab)
        return NamedTokens.of(params, vocab)

    def make(
        self, params: SamplingParams, reading: Reading = at_once
    ) -> GrammarConstraint | MaskConstraint | None:
        """The language of *params*; None if they name none. Raises like rules()."""
        match params.constraint:
            case None:
                return None
            case "grammar":
                return GrammarConstraint(params, self._vocab, reading)
            case "json_schema" | "regex" | "lark" as kind:
                with self._lock:  # the first request of this kind reads the vocabulary
                    if self._guidance is None:
                        make = partial(Guidance, self._vocab, reading)
                        self._guidance = reading(make)
                return self._guidance.make(kind, getattr(params, kind))


class GrammarConstraint:
    """GBNF: the sampler checks each token it drew."""

    def __init__(
        self, params: SamplingParams, vocab: Vocab, reading: Reading = at_once
    ) -> None:
        from pyllama_raw.options.grammar import compile_grammar  # few engines see any

        if reading(lambda: vocab.kind) == "none":
            raise BadGrammar("the model has no vocabulary", None)
        self._vocab = vocab
        self._reading = reading
        assert params.grammar is not None
        root = params.grammar_root
        program = compile_grammar(params.grammar, root, self._find_token)
        triggers = params.grammar_triggers
        self._grammar = reading(
            partial(
                Grammar.make,
                program.nodes,
                program.sets,
                program.start,
                vocab,
                trigger_texts=[t for t in triggers if isinstance(t, str)],
                trigger_tokens=[t for t in triggers if isinstance(t, int)],
            )
        )

    def _find_token(self, name: int | str) -> int | None:
        vocab = self._vocab
        if isinstance(name, int):
            return name if name < vocab.n_tokens else None
        tokens = self._reading(
            lambda: vocab.tokenize(f"<{name}>", add_special=False, parse_special=True)
        )
        return tokens[0] if len(tokens) == 1 else None

    def start(self) -> Grammar:
        """One at its beginning: grammars have a state and are never shared."""
        return self._grammar.copy(self._vocab)
