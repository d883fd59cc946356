"""
The choice of output tokens, as users write it, and as a model file declares it.

Rules:
1. A value that would change nothing (0, 1 or None, as the comment says) adds no stage.
2. Ranges keep every number that C computes finite.
3. At most one of grammar, json_schema, regex and lark. What they end, ends: they go with
   neither ignore_eos nor min_tokens.
4. Whatever is given, checking it takes milliseconds: it is done where the caller makes
   it, often in an event loop. So lists and texts have limits, counted before they are read.
5. With `from_model` a request has what the file declares by the keys of llama.h
   (llama_model_meta_key), with llama.cpp's meaning of their values. What a request sets itself wins;
   the rest is checked like the words of a user.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator

from pyllama_raw.errors import ConfigError, InvalidSampling, Unsupported
from pyllama_raw.options.config import Count, Finite, Token
from pyllama_raw.options.frozen import Frozen, Listed, Mapped, Mistake

Stage = Literal[
    "penalties",
    "dry",
    "top_n_sigma",
    "top_k",
    "typical",
    "top_p",
    "min_p",
    "xtc",
    "temperature",
    "infill",
]
STAGES: tuple[Stage, ...] = (
    "penalties", "dry", "top_n_sigma", "top_k", "typical", "top_p", "min_p", "xtc",
    "temperature",
)  # fmt: skip

Constraint = Literal["grammar", "json_schema", "regex", "lark"]
CONSTRAINTS: tuple[Constraint, ...] = ("grammar", "json_schema", "regex", "lark")

MAX_ITEMS = {  # of each list and mapping
    "stages": len(STAGES) + 1,
    "logit_bias": 2**17,
    "suppress_tokens": 2**17,
    "stop": 256,
    "stop_token_ids": 1024,
    "grammar_triggers": 64,
    "dry_sequence_breakers": 32,
    "json_schema": 2**12,  # names at the top
}
MAX_STOP_BYTES = 2**14  # of all stop strings, in UTF-8
MAX_GRAMMAR = 2**17  # characters
MAX_PATTERN = 2**14  # characters: a mask takes time in proportion to those of a literal
MAX_TOP = 4096  # likely tokens listed at each place of an output
MAX_PROMPT_TOP = 20  # and of a prompt, whose places are many
MAX_LISTED = (
    2**20
)  # likely tokens of all outputs, if more than MAX_PROMPT_TOP are at a place
MAX_HISTORY = 2**20  # tokens that penalties look back
MAX_INFILL = 1000  # candidates: infill compares all pairs
MIN_TEMPERATURE = 1e-3  # logits divided by less are no numbers any more

Fraction = Annotated[Finite, Field(ge=0, le=1)]
History = Annotated[int, Field(ge=0, le=MAX_HISTORY)]
Text = Annotated[str, Field(min_length=1, pattern=r"^[^\x00]*$")]
Breaker = Annotated[Text, Field(max_length=40)]
Pattern = Annotated[Text, Field(max_length=MAX_PATTERN)]
NTop = Annotated[int, Field(ge=0, le=MAX_TOP)]
NPromptTop = Annotated[int, Field(ge=0, le=MAX_PROMPT_TOP)]
Penalty = Annotated[Finite, Field(ge=-100, le=100)]


class SamplingParams(Frozen):
    """The choice of output tokens of one request, and the reasons to stop."""

    max_items = MAX_ITEMS

    from_model: bool = False
    """Take from the model file what is not set here."""
    max_tokens: Count = 128
    """Most output tokens."""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """Output tokens before which only a stop string ends the output."""
    temperature: Annotated[Finite, Field(ge=0, le=100)] = 0.8
    """Randomness of the draw; 0 always takes the most likely token."""
    dynatemp_range: Annotated[Finite, Field(ge=0, le=100)] = 0.0
    """Range in which the temperature moves with the entropy; 0 is off."""
    dynatemp_exponent: Annotated[Finite, Field(ge=0, le=10)] = 1.0
    """Exponent of the map from the entropy to the dynamic temperature."""
    top_k: Annotated[int, Field(ge=0, le=2**31 - 1)] = 40
    """Only the k most likely tokens stay; 0 is off."""
    top_p: Annotated[Finite, Field(gt=0, le=1)] = 0.95
    """Only the most likely tokens with this probability together stay; 1 is off."""
    min_p: Fraction = 0.05
    """Only tokens with this share of the best one's probability stay; 0 is off."""
    typical_p: Annotated[Finite, Field(gt=0, le=1)] = 1.0
    """
    Only tokens of typical information with this probability together stay; 1 is off.
    """
    top_n_sigma: Annotated[Finite, Field(ge=0, le=100)] = 0.0
    """
    Only tokens within so many standard deviations of the best logit stay; 0 is off.
    """
    xtc_probability: Fraction = 0.0
    """Probability that the most likely tokens are taken out (XTC); 0 is off."""
    xtc_threshold: Fraction = 0.1
    """Probability from which XTC takes tokens out; above 0.5 is off."""
    min_keep: Annotated[int, Field(ge=0, le=2**31 - 1)] = 0
    """Candidates that top_p, min_p, typical_p and XTC leave at least."""
    repeat_penalty: Annotated[Finite, Field(ge=0.01, le=100)] = 1.0
    """Logits of tokens that occurred are divided by it; 1 is off."""
    frequency_penalty: Penalty = 0.0
    """Taken from a logit for each time that the token occurred; 0 is off."""
    presence_penalty: Penalty = 0.0
    """Taken once from the logit of a token that occurred; 0 is off."""
    penalty_last_n: History | None = 64
    """Tokens that the penalties look back; 0 is off. None: all."""
    dry_multiplier: Annotated[Finite, Field(ge=0, le=100)] = 0.0
    """Strength of the penalty on repeated runs of tokens (DRY); 0 is off."""
    dry_base: Annotated[Finite, Field(ge=1, le=100)] = 1.75
    """Growth of the penalty of DRY with the length of the run."""
    dry_allowed_length: History = 2
    """Tokens of a run that DRY lets repeat without a penalty."""
    dry_last_n: History | None = None
    """Tokens that DRY looks back; 0 is off. None: all."""
    dry_sequence_breakers: Listed[Breaker] = ("\n", ":", '"', "*")
    """Texts that end a run for DRY."""
    mirostat: Literal[0, 1, 2] = 0
    """Version 1 or 2 replaces all stages but temperature; 0 is off."""
    mirostat_tau: Annotated[Finite, Field(gt=0, le=50)] = 5.0
    """The surprise that mirostat aims at."""
    mirostat_eta: Annotated[Finite, Field(gt=0, le=1)] = 0.1
    """Speed at which mirostat learns."""
    adaptive_target: Fraction | None = None
    """Probability near which tokens are drawn. None: off."""
    adaptive_decay: Annotated[Finite, Field(ge=0, le=0.99)] = 0.9
    """Slowness with which adaptive_target forgets earlier tokens."""
    stages: Listed[Stage] = STAGES
    """The stages that run, in this order; a stage that is not named is off."""
    logit_bias: Mapped[Token, Annotated[Finite, Field(ge=-1e6, le=1e6)]] = Field(
        default_factory=dict
    )
    """Numbers that are added to the logits of tokens, by token id."""
    suppress_tokens: Listed[Token] = ()
    """Token ids that are never sampled."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 2)] | None = None
    """
    Seed of the random draws. They repeat while nothing else runs (CPUs with AVX2, cells in
    f16); beside other requests a token may differ now and then. None: random.
    """
    stop: Listed[Annotated[str, Field(min_length=1, max_length=MAX_STOP_BYTES)]] = ()
    """Texts before which the output ends."""
    stop_token_ids: Listed[Token] = ()
    """Token ids that end the output."""
    special: bool = False
    """
    Control tokens have their names in the text, and stop strings may name them; the token that
    ends the output is not in the text.
    """
    n: Annotated[int, Field(ge=1, le=256)] = 1
    """Outputs of the prompt; their seeds are seed, seed + 1, and so on."""
    logprobs: NTop | None = None
    """Likely tokens that are listed with each output token. None: nothing is listed."""
    logprobs_of: Literal["model", "sampler"] = "model"
    """Probabilities that logprobs shows: the model's, or those after all stages."""
    prompt_logprobs: NPromptTop | None = None
    """Likely tokens that are listed with each prompt token. None: nothing is listed."""
    ignore_eos: bool = False
    """End-of-generation tokens are never sampled."""
    grammar: Annotated[Text, Field(max_length=MAX_GRAMMAR)] | None = None
    """A GBNF grammar that the output follows."""
    grammar_root: Annotated[Text, Field(max_length=1000)] = "root"
    """The rule of the grammar that the output is."""
    grammar_triggers: Listed[Annotated[Text, Field(max_length=1000)] | Token] = ()
    """
    Texts or token ids from which on the grammar holds; without any it holds at once.
    """
    json_schema: Mapped[str, Any] | None = None
    """A JSON schema that the output fits."""
    regex: Pattern | None = None
    r"""
    A regular expression that the whole output matches. Its
    `\d`, `\w` and `\s` are ASCII; `\p{Nd}`, `\p{L}` and their like are Unicode.
    """
    lark: Pattern | None = None
    """A Lark grammar that the output follows."""

    @classmethod
    def refusal(cls, mistakes: list[Mistake]) -> InvalidSampling:
        """The first mistake: it is the request's fault."""
        return InvalidSampling(*mistakes[0])

    @field_validator("stop", mode="before")
    @classmethod
    def _one_stop(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else value

    @field_validator("json_schema", mode="before")
    @classmethod
    def _schema_of(cls, value: object) -> object:
        """The schema of a class that pydantic made, which is how many have theirs."""
        if isinstance(value, type) and hasattr(value, "model_json_schema"):
            return value.model_json_schema()
        return value

    def _misfits(self) -> Iterator[tuple[str, str]]:
        if len(set(self.stages)) < len(self.stages):
            yield "stages", "each stage once"
        if self.min_tokens > self.max_tokens:
            yield "min_tokens", f"at most max_tokens ({self.max_tokens})"
        if self.grammar_triggers and self.grammar is None:
            yield "grammar_triggers", "a grammar, too"
        if self.top_n_sigma and self._has("typical") and self.typical_p < 1:
            yield "typical_p", "1 with top_n_sigma, because typical_p would see gaps"
        n_bytes = sum(len(string.encode()) for string in self.stop)
        if n_bytes > MAX_STOP_BYTES:
            yield "stop", f"at most {MAX_STOP_BYTES} bytes together, not {n_bytes}"
        n_top, n_tokens = self.logprobs or 0, self.max_tokens * self.n
        if n_top > MAX_PROMPT_TOP and n_top * n_tokens > MAX_LISTED:
            limit = max(MAX_LISTED // n_tokens, MAX_PROMPT_TOP)
            yield "logprobs", f"at most {limit} with {n_tokens} output tokens"
        yield from self._misfits_of_forms()

    def _misfits_of_forms(self) -> Iterator[tuple[str, str]]:
        constraints = self._constraints
        if len(constraints) > 1:
            yield constraints[1], f"at most one of {', '.join(constraints)}"
        if constraints and (self.ignore_eos or self.min_tokens):
            yield constraints[0], "neither ignore_eos nor min_tokens beside it"
        if "infill" in self.stages:
            before = self.stages[: self.stages.index("infill")]
            if "top_k" not in before or not 0 < self.top_k <= MAX_INFILL:
                allowed = f"a top_k of 1 to {MAX_INFILL} and its stage before infill"
                yield "stages", allowed

    @property
    def is_empty(self) -> bool:
        """Whether nothing is set here, so that apply_to() changes nothing."""
        return not self._given

    def apply_to(self, base: Self) -> Self:
        """
        The parameters *base*, with those that are set here in their place.

        None keeps what *base* has; 0 is a value like any other. Raises InvalidSampling if they
        do not fit together.
        """
        return base.model_copy(update=self._given)

    @property
    def _given(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.model_fields_set}
        return {name: value for name, value in fields.items() if value is not None}

    @property
    def constraint(self) -> Constraint | None:
        """The constraint that is given."""
        return next(iter(self._constraints), None)

    @property
    def _constraints(self) -> list[Constraint]:
        return [name for name in CONSTRAINTS if getattr(self, name) is not None]

    @property
    def greedy(self) -> bool:
        """Whether the draw is no draw: the most likely candidate is taken."""
        if self.is_cold and (self.mirostat or "temperature" in self.stages):
            return True
        return self.top_k == 1 and "top_k" in self.stages and not self.mirostat

    @property
    def is_cold(self) -> bool:
        """Whether the temperature counts as 0."""
        return self.temperature < MIN_TEMPERATURE

    @property
    def penalizes(self) -> bool:
        """Whether the stage `penalties` changes anything."""
        neutral = (1.0, 0.0, 0.0)
        penalties = (self.repeat_penalty, self.frequency_penalty, self.presence_penalty)
        return (
            self._has("penalties") and penalties != neutral and self.penalty_last_n != 0
        )

    @property
    def dries(self) -> bool:
        """Whether the stage `dry` changes anything."""
        return self._has("dry") and self.dry_multiplier > 0 and self.dry_last_n != 0

    def _has(self, stage: Stage) -> bool:
        return stage in self.stages and not self.mirostat


PREFIX = "general.sampling."

# llama.cpp's names of stages where ours are others; adaptive_p is on by its target alone.
_STAGES = {"typ_p": "typical", "temp": "temperature"}
_IMPLIED = ("", "adaptive_p")


def _stages(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(";")]
    return tuple(_STAGES.get(name, name) for name in names if name not in _IMPLIED)


def _top_k(text: str) -> int:
    return max(int(text), 0)  # llama.cpp: below 1 is off


def _last_n(text: str) -> int | None:
    return None if int(text) == -1 else int(text)  # llama.cpp: -1 is the whole context


FIELDS: dict[str, tuple[str, Callable[[str], object]]] = {
    "sequence": ("stages", _stages),
    "top_k": ("top_k", _top_k),
    "top_p": ("top_p", float),
    "min_p": ("min_p", float),
    "xtc_probability": ("xtc_probability", float),
    "xtc_threshold": ("xtc_threshold", float),
    "temp": ("temperature", float),
    "penalty_last_n": ("penalty_last_n", _last_n),
    "penalty_repeat": ("repeat_penalty", float),
    "mirostat": ("mirostat", int),
    "mirostat_tau": ("mirostat_tau", float),
    "mirostat_eta": ("mirostat_eta", float),
}


def declared(metadata: Mapping[str, str]) -> dict[str, str]:
    """Values that *metadata* declares, by the end of its keys; not checked."""
    return {key: metadata[PREFIX + key] for key in FIELDS if PREFIX + key in metadata}


def with_declared(
    params: SamplingParams, metadata: Mapping[str, str]
) -> SamplingParams:
    """
    *params*, completed by what the model file declares if they ask for it.

    Raises:
        Unsupported: a declared value that the request does not replace cannot be used.
    """
    if not params.from_model:
        return params
    values: dict[str, Any] = {}
    for key, text in declared(metadata).items():
        name, read = FIELDS[key]
        if name in params.model_fields_set:
            continue
        try:
            values[name] = read(text)
        except ValueError:
            raise _refusal(f"{PREFIX}{key}={text!r} is no number") from None
    fields = {name: getattr(params, name) for name in params.model_fields_set}
    try:
        return SamplingParams(**(values | fields))
    except ConfigError as error:
        raise _refusal(f"with {PREFIX}*: {error}") from None


def _refusal(reason: str) -> Unsupported:
    return Unsupported(
        "from_model",
        f"the sampling defaults in the model file cannot be used: {reason}. Set the "
        "field in the request, or leave from_model out",
    )
