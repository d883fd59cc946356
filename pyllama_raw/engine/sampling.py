"""
From sampling parameters to what samples the rows of a request, on the host or in the graph; and
the samplers of all requests that are open.

The order is that of llama-server: biases, the stages as given, then one draw. Greedy
requests keep only the stages that can change which token is the most likely; without any
they need no chain.

Lanes choose tokens in the graph; all other tokens are chosen from logits on the host. A lane is
the resident top-k of a slot: the device leaves the likeliest FIRST_MAX tokens of a row, and the
request's own chain goes on with them on the host.

Rules:
1. All slots have a lane or none has: one row that is needed whole makes libllama copy all.
2. A lane keeps nothing between steps. Seeds and histories stay in the request's chain, so
   a token is the same with and without lanes.
3. Lanes are used only if somebody asks for them, because the host is faster. On a CPU a lane runs
   on one thread, while the others wait (`benchmarks/placement.py`). Elsewhere each lane is a few
   operations of its own in the graph, one after the other, which take longer than the copy of all
   rows that they save.
4. Lanes are attached when the context has been probed. The first step that needs a whole row takes
   them away for good: each switch has all graphs prepared anew, and a program
   that has asked for whole rows once usually asks again.
5. A constraint is made once and started for each output. Making it may take long and is done in a
   worker thread; the engine thread starts it. A grammar is asked about each token that was drawn;
   of a schema each step computes a mask.
6. Closing an engine does not wait for a constraint that is made, but for the moments in which the
   vocabulary is read.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, Self

from pyllama_raw.core.request import SamplerUse
from pyllama_raw.core.step import Work
from pyllama_raw.engine.guidance import BYTES, Guidance, MaskState, Trials, byte_trials
from pyllama_raw.engine.parts import Reading, at_once
from pyllama_raw.errors import BadGrammar, BadSchema, Unsupported
from pyllama_raw.native import stages
from pyllama_raw.native.context import Context
from pyllama_raw.native.model import Model
from pyllama_raw.native.sampler import (
    FIRST_MAX,
    Grammar,
    MaskTokenizer,
    Matcher,
    RowLogprobs,
    RowSampler,
    SamplerChain,
    TokenTable,
    Triggers,
)
from pyllama_raw.native.stages import HISTORY_MAX, Stage, TopK
from pyllama_raw.native.vocab import Vocab
from pyllama_raw.options.config import EngineConfig
from pyllama_raw.options.constraints import refusal
from pyllama_raw.options.gbnf import to_lark
from pyllama_raw.options.sampling import SamplingParams

if TYPE_CHECKING:
    from pyllama_raw.engine.media_desk import MediaRows

NO_LANES = "the model reads prompts with an encoder: its rows have no lanes"
AUTO = "auto: the host chooses faster than lanes do"
CANNOT = "the device cannot select candidates"
LANES_GONE = "lanes were taken away, because a request needed all logits"
FAILED = "lanes were given up after a context had failed"


class NamedTokens(NamedTuple):
    """The tokens that a request names, for all of its outputs."""

    suppress: TokenTable
    bias: TokenTable

    @classmethod
    def of(cls, params: SamplingParams, vocab: Vocab) -> Self:
        suppress = {*params.suppress_tokens, *vocab.suppress_tokens}
        if params.ignore_eos:
            suppress |= vocab.eog_tokens
        return cls(
            TokenTable("suppress_tokens", sorted(suppress)),
            TokenTable("logit_bias", params.logit_bias),
        )


def open_sampler(
    params: SamplingParams,
    vocab: Vocab,
    prompt: array[int],
    ending: frozenset[int],
    constraint: Grammar | MaskState | None,
    *,
    token_names: NamedTokens | None = None,
) -> RowSampler:
    """
    Build the sampler of a request, with what its penalties see of the prompt.

    Args:
        params: its seed is resolved.
        prompt: its text; nobody repeats an image.
        ending: tokens that end the request.
        constraint: of this request alone; a grammar is closed with the sampler.
        token_names: of *params*; None: it is made here, where there are few tokens.

    Raises:
        RequestError: the model or libllama cannot do what is asked.
    """
    grammar = constraint if isinstance(constraint, Grammar) else None
    mask = constraint.mask if isinstance(constraint, MaskState) else None
    n_ctx = min(vocab.n_ctx_train, stages.HISTORY_MAX)
    reach = Reach(min(len(prompt) + params.max_tokens, stages.HISTORY_MAX), n_ctx)
    chain_stages = stages_of(params, reach)
    n_history = history_of(params, reach.n_most)
    suppress, bias = token_names or NamedTokens.of(params, vocab)
    chain: SamplerChain | None = None
    n_first = 0  # the size of the top-k that it begins with
    # Greedy requests mostly have no chain: the shim takes the largest logit.
    if chain_stages:
        chain = SamplerChain.build(chain_stages, vocab)
        # Penalties look back into the prompt.
        if n_history:
            chain.accept(prompt[-n_history:])
        # The shim then gives the chain so many candidates, and no more.
        if isinstance(chain_stages[0], stages.TopK) and chain_stages[0].k <= FIRST_MAX:
            n_first = chain_stages[0].k
    return RowSampler(
        chain,
        suppress,
        ending=sorted(ending) if params.min_tokens else (),
        n_min=params.min_tokens,
        bias=bias,
        grammar=grammar,
        mask=mask,
        n_first=n_first,
    )


class Reach(NamedTuple):
    """The longest history that makes sense, in tokens."""

    n_most: int  # of this request
    n_ctx: int  # of the model


def stages_of(params: SamplingParams, reach: Reach) -> list[Stage]:
    """
    The chain for *params*; empty where it would be the largest logit.
    """
    seed = params.seed
    assert seed is not None
    # The stages before the draw, as they are given; mirostat has its own.
    names: Sequence[str] = params.stages
    if params.greedy:
        names = _before_greedy(params)
    elif params.mirostat:
        names = ("temperature",)
    sequence = [stage for name in names if (stage := _STAGES[name](params, reach))]
    if params.greedy:
        return [*sequence, stages.Greedy()] if sequence else []
    if params.mirostat:
        tau, eta = params.mirostat_tau, params.mirostat_eta
        return [*sequence, stages.Mirostat(params.mirostat, tau, eta, seed)]
    # Each way to draw is a last stage of its own.
    if params.adaptive_target is not None:
        target, decay = params.adaptive_target, params.adaptive_decay
        return [*sequence, stages.AdaptiveP(target, decay, seed)]
    return [*sequence, stages.Draw(seed)]


def _before_greedy(params: SamplingParams) -> Sequence[str]:
    """The stages that decide which token is the most likely; none if it is the logit."""
    if params.mirostat:
        return ()
    names = params.stages
    # A temperature of 0 leaves one token, so nothing behind it matters.
    if params.is_cold and "temperature" in names:
        names = names[: names.index("temperature")]
    # Most stages keep the most likely token. These may drop it, so all before them count.
    drops_best = {
        "typical": params.typical_p < 1,
        "xtc": params.xtc_probability > 0,
        "infill": True,
    }
    if any(drops_best.get(name, False) for name in names):
        return [name for name in names if name != "temperature"]
    # Else only stages that change logits decide which is the largest.
    return [name for name in names if name in ("penalties", "dry")]


def _penalties(params: SamplingParams, reach: Reach) -> Stage | None:
    if not params.penalizes:
        return None
    return stages.Penalties(
        _history(params.penalty_last_n, reach.n_most),
        params.repeat_penalty,
        params.frequency_penalty,
        params.presence_penalty,
    )


def dry_stage(params: SamplingParams, n_ctx: int) -> stages.Dry | None:
    """Equal for all requests with equal parameters, so that one can be kept; or None."""
    if not params.dries:
        return None
    return stages.Dry(
        _history(params.dry_last_n, n_ctx),
        params.dry_multiplier,
        params.dry_base,
        params.dry_allowed_length,
        tuple(params.dry_sequence_breakers),
    )


def history_of(params: SamplingParams, n_most: int) -> int:
    """Tokens that penalties look back, of *n_most* there can be; 0: none do."""
    n_penalties = _history(params.penalty_last_n, n_most) if params.penalizes else 0
    n_dry = _history(params.dry_last_n, n_most) if params.dries else 0
    return max(n_penalties, n_dry)


def _history(limit: int | None, n_most: int) -> int:
    return n_most if limit is None else min(limit, n_most)


def _xtc(params: SamplingParams, reach: Reach) -> Stage | None:  # noqa: ARG001
    probability, threshold = params.xtc_probability, params.xtc_threshold
    # No two tokens can have more than a half each.
    if probability == 0 or threshold > 0.5:
        return None
    assert params.seed is not None
    return stages.Xtc(probability, threshold, params.seed, params.min_keep)


def _temperature(params: SamplingParams, reach: Reach) -> Stage | None:  # noqa: ARG001
    spread = 0.0 if params.mirostat else params.dynatemp_range
    if params.temperature == 1 and spread == 0:
        return None
    return stages.Temperature(params.temperature, spread, params.dynatemp_exponent)


_STAGES: dict[str, Callable[[SamplingParams, Reach], Stage | None]] = {
    "penalties": _penalties,
    "dry": lambda p, reach: dry_stage(p, reach.n_ctx),
    "top_n_sigma": lambda p, _: (
        stages.TopNSigma(p.top_n_sigma) if p.top_n_sigma else None
    ),
    "top_k": lambda p, _: stages.TopK(p.top_k) if p.top_k else None,
    "typical": lambda p, _: (
        stages.Nucleus("typical", p.typical_p, p.min_keep) if p.typical_p < 1 else None
    ),
    "top_p": lambda p, _: (
        stages.Nucleus("top_p", p.top_p, p.min_keep) if p.top_p < 1 else None
    ),
    "min_p": lambda p, _: (
        stages.Nucleus("min_p", p.min_p, p.min_keep) if p.min_p else None
    ),
    "xtc": _xtc,
    "temperature": _temperature,
    "infill": lambda p, _: stages.Infill(p.top_k),
}


def lanes_refusal(model: Model, config: EngineConfig) -> str:
    """Why there can be no lanes, before a context is made; empty if there can."""
    if model.reads_sources:
        return NO_LANES
    if config.sampler_placement == "host":
        return "sampler_placement is host"
    if config.model.split_mode == "tensor":
        return "split_mode tensor has no lanes"
    return AUTO if config.sampler_placement == "auto" else ""


def make_lanes(vocab: Vocab, n_slots: int) -> list[SamplerChain]:
    """A fresh lane for each slot."""
    return [SamplerChain.build([TopK(FIRST_MAX)], vocab) for _ in range(n_slots)]


def needs_all(params: SamplingParams, sampler: RowSampler) -> str:
    """Why a lane cannot serve a request; empty if it can."""
    n_first, n_forbidden = sampler.n_first, sampler.n_forbidden
    # A lane has only the likeliest tokens of a row.
    reads_row = params.logprobs is not None and params.logprobs_of == "model"
    reasons = (
        (params.constraint is not None, f"{params.constraint} may allow any token"),
        (params.prompt_logprobs is not None, "prompt_logprobs reads all logits"),
        (reads_row, "logprobs of the model reads all logits"),
        (bool(params.logit_bias), "logit_bias may make any token likely"),
        (not n_first, f"its first stage is not a top_k up to {FIRST_MAX}"),
        (
            n_first + n_forbidden > FIRST_MAX,
            f"top_k and forbidden tokens are more than {FIRST_MAX} together",
        ),
    )
    return next((why for is_so, why in reasons if is_so), "")


class Lanes:
    """
    The lanes of an engine, through all its contexts.

    Args:
        off: why there are none; empty: they are wanted.
    """

    def __init__(self, vocab: Vocab, n_slots: int, *, off: str) -> None:
        self.off = off
        self.n_fallbacks = 0  # requests sampled on the host, though lanes were wanted
        self._are_wanted = not off
        self._vocab = vocab
        self._n_slots = n_slots

    def fresh(self) -> Sequence[SamplerChain]:
        """For a new context."""
        return () if self.off else make_lanes(self._vocab, self._n_slots)

    def give_up(self) -> None:
        """A context has failed: from now on without lanes, which take memory."""
        self.off = self.off or FAILED

    def missing(self, params: SamplingParams, sampler: RowSampler) -> str:
        """Why no lane can serve a request; empty: one can, or none is wanted."""
        return needs_all(params, sampler) if self._are_wanted else ""

    def use(self, sampler: RowSampler, why: str) -> SamplerUse | None:
        """Place in which the tokens of a request that ends were chosen; None: it has none."""
        if not sampler.n_on_host + sampler.n_on_lane:
            return None
        # All of its tokens came from a lane.
        if not sampler.n_on_host:
            return SamplerUse("backend", "")
        self.n_fallbacks += self._are_wanted
        return SamplerUse("host", why or self.off or CANNOT)

    def take_away(self, context: Context) -> None:
        """The next step needs a whole row."""
        if not self.off:
            context.set_lanes(())
            self.off = LANES_GONE


# Makes the state of one output, because states are never shared. A grammar is asked by the
# sampler about each token that it drew.
Start = Callable[[], Grammar | MaskState]


@dataclass(frozen=True, slots=True)
class BuiltSampler:
    """A request whose sampler is built."""

    params: SamplingParams
    sampler: RowSampler
    mask: MaskState | None  # of a constraint that Python advances after each token
    logprobs: RowLogprobs | None  # of its last token; None: not asked for, or certain
    needs_all: str  # why no lane can serve it; empty: one can
    spans: tuple[MediaRows, ...] = ()
    is_drafted: bool = False  # steps may verify drafts of it


class BuiltSamplers:
    """All that are open, by request_id."""

    def __init__(self) -> None:
        self.by_id: dict[int, BuiltSampler] = {}
        self.n_masked = self.n_scored = self.n_needing_all = 0

    def add(self, request_id: int, sampler: BuiltSampler) -> None:
        self.by_id[request_id] = sampler
        self._count(sampler, 1)

    def pop(self, request_id: int) -> BuiltSampler | None:
        """Take one out; None: it is not open."""
        sampler = self.by_id.pop(request_id, None)
        if sampler is not None:
            self._count(sampler, -1)
        return sampler

    def need_all(self, works: Iterable[Work]) -> bool:
        """Whether a request of *works* needs whole rows."""
        return any(self.by_id[work.request_id].needs_all for work in works)

    def _count(self, sampler: BuiltSampler, change: int) -> None:
        params = sampler.params
        is_scored = params.logprobs is not None or params.prompt_logprobs is not None
        self.n_masked += change * (sampler.mask is not None)
        self.n_scored += change * is_scored
        self.n_needing_all += change * bool(sampler.needs_all)


def watch(
    params: SamplingParams, sampler: RowSampler, n_places: int = 1
) -> RowLogprobs | None:
    """
    Let *sampler* write what *params* ask for; None: nothing, or each is certain.

    Args:
        n_places: rows of its sequence in a step, at most.
    """
    if params.logprobs is None:
        return None
    # A greedy sampler leaves one token, which is certain.
    of_sampler = params.logprobs_of == "sampler"
    if of_sampler and params.greedy:
        return None
    row = RowLogprobs(params.logprobs, of_sampler=of_sampler, n_places=n_places)
    sampler.watch(row)
    return row


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
