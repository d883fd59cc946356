"""
The stages of a sampler chain, each with its guards.

A stage is a value; make() gives the llama_sampler to put into a chain. Each refuses the
numbers that libllama would abort on, hang on or turn into NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

from pyllama_raw.errors import InvalidRequest, NativeError, Unsupported
from pyllama_raw.native.libllama import Handle, ffi, last_error, lib
from pyllama_raw.native.vocab import INT32_MAX, Vocab

SEED_MAX = 2**32 - 2  # llama.h: LLAMA_DEFAULT_SEED, one more, is a random seed
HISTORY_MAX = 2**24  # tokens; libllama allocates them at once
INFILL_MAX = 4096  # candidates; all pairs are compared
MIROSTAT_M = 100  # candidates that llama.cpp estimates Zipf's exponent from
TEMPLATES_MAX = 16  # kept a vocabulary; the oldest goes
FINITE = 1e30


class Stage(Protocol):
    """One element of a chain."""

    def make(self, vocab: Vocab) -> Any:
        """A new llama_sampler *, owned by the caller. Raises InvalidRequest."""


@dataclass(frozen=True, slots=True)
class Penalties:
    """Against tokens of the last *last_n*."""

    last_n: int
    repeat: float = 1.0  # 1: none
    frequency: float = 0.0
    presence: float = 0.0

    def make(self, vocab: Vocab) -> Any:
        check("penalty_last_n", self.last_n, 0, HISTORY_MAX)
        check("repeat_penalty", self.repeat, 1e-6, 1e6)
        check("frequency_penalty", self.frequency, -1e6, 1e6)
        check("presence_penalty", self.presence, -1e6, 1e6)
        return lib.llama_sampler_init_penalties(
            vocab.n_tokens, self.last_n, self.repeat, self.frequency, self.presence
        )


@dataclass(frozen=True, slots=True)
class Dry:
    """Against tokens that would prolong a repetition."""

    last_n: int
    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    breakers: tuple[str, ...] = ()  # a repetition does not reach across these

    def make(self, vocab: Vocab) -> Any:
        """A copy of the one that prepare() keeps."""
        # A clone is cheap, because the breakers of the first one are read already.
        template = self.prepare(vocab)
        return made("llama_sampler_clone", lib.plr_sampler_clone(template.ptr))

    def prepare(self, vocab: Vocab) -> Handle:
        """Make it once: each breaker has the whole vocabulary read, for milliseconds."""
        with vocab.lock:
            # By value: requests with equal numbers and breakers share a template.
            template = vocab.templates.get(self)
            if template is None:
                template = Handle(self._first(vocab), lib.llama_sampler_free)
                # Requests choose breakers, so their number is limited: the oldest goes.
                if len(vocab.templates) >= TEMPLATES_MAX:
                    del vocab.templates[next(iter(vocab.templates))]
                vocab.templates[self] = template
            return template

    def _first(self, vocab: Vocab) -> Any:
        check("dry_last_n", self.last_n, 0, HISTORY_MAX)
        check("dry_multiplier", self.multiplier, 0, 1e6)
        check("dry_base", self.base, 1, 1e6)
        check("dry_allowed_length", self.allowed_length, 0, INT32_MAX)
        if vocab.kind == "none":
            raise Unsupported("DRY", "the model has no vocabulary")
        texts = [c_text("dry_sequence_breakers", text) for text in self.breakers]
        return made(
            "llama_sampler_init_dry",
            lib.plr_init_dry(
                vocab.ptr, self.multiplier, self.base, self.allowed_length,
                self.last_n, ffi.new("const char *[]", texts), len(texts),
            ),
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TopNSigma:
    """Logits at most *n* standard deviations below the largest."""

    n: float  # 0: all

    def make(self, vocab: Vocab) -> Any:  # noqa: ARG002 - see Stage
        check("top_n_sigma", self.n, 0, FINITE)
        return lib.llama_sampler_init_top_n_sigma(self.n)


@dataclass(frozen=True, slots=True)
class TopK:
    """The *k* most likely."""

    k: int

    def make(self, vocab: Vocab) -> Any:
        check("top_k", self.k, 1, INT32_MAX)
        return lib.llama_sampler_init_top_k(min(self.k, vocab.n_tokens))


@dataclass(frozen=True, slots=True)
class Nucleus:
    """The candidates that make up *p* by one of three orders, at least *min_keep*."""

    kind: Literal["typical", "top_p", "min_p"]
    p: float
    min_keep: int = 0

    def make(self, vocab: Vocab) -> Any:  # noqa: ARG002 - see Stage
        check(self.kind, self.p, 0, 1)
        check("min_keep", self.min_keep, 0, INT32_MAX)
        init = {
            "typical": lib.llama_sampler_init_typical,
            "top_p": lib.plr_init_top_p,
            "min_p": lib.llama_sampler_init_min_p,
        }
        return made(self.kind, init[self.kind](self.p, self.min_keep))


@dataclass(frozen=True, slots=True)
class Xtc:
    """With *probability*, without all but the least likely above *threshold*."""

    probability: float
    threshold: float
    seed: int
    min_keep: int = 0

    def make(self, vocab: Vocab) -> Any:  # noqa: ARG002 - see Stage
        check("xtc_probability", self.probability, 0, 1)
        check("xtc_threshold", self.threshold, 0, 1)
        check("min_keep", self.min_keep, 0, INT32_MAX)
        check("seed", self.seed, 0, SEED_MAX)
        return lib.llama_sampler_init_xtc(
            self.probability, self.threshold, self.min_keep, self.seed
        )


@dataclass(frozen=True, slots=True)
class Temperature:
    """Logits divided by *value*, or by value +- spread with the entropy."""

    value: float
    spread: float = 0.0
    exponent: float = 1.0

    def make(self, vocab: Vocab) -> Any:  # noqa: ARG002 - see Stage
        # Logits are divided by it: a smaller one would leave no finite number.
        check("temperature", self.value, 1e-4, 1e6)
        check("dynatemp_range", self.spread, 0, 1e6)
        check("dynatemp_exponent", self.exponent, 0, 1e3)
        return lib.llama_sampler_init_temp_ext(self.value, self.spread, self.exponent)


@dataclass(frozen=True, slots=True)
class Infill:
    """For text between two others; at most *n_candidates* come in."""

    n_candidates: int

    def make(self, vocab: Vocab) -> Any:
        # libllama compares all pairs of what comes in, and needs a token that ends the text.
        check("infill candidates", self.n_candidates, 1, INFILL_MAX)
        if vocab.eot is None and vocab.eos is None:
            raise Unsupported("infill", "the model has no token that ends a text")
        return lib.llama_sampler_init_infill(vocab.ptr)


@dataclass(frozen=True, slots=True)
class Draw:
    """One candidate by its probability; ends a chain, as do all below."""

    seed: int

    def make(self, vocab: Vocab) -> Any:  # noqa: ARG002 - see Stage
        check("seed", self.seed, 0, SEED_MAX)
        return lib.llama_sampler_init_dist(self.seed)


@dataclass(frozen=True, slots=True)
class Greedy:
    """The most likely candidate."""

    def make(self, vocab: Vocab) -> Any:  # noqa: ARG002 - see Stage
        return lib.llama_sampler_init_greedy()


@dataclass(frozen=True, slots=True)
class Mirostat:
    """Draws at a constant surprise of *tau* bits."""

    version: Literal[1, 2]
    tau: float
    eta: float
    seed: int

    def make(self, vocab: Vocab) -> Any:
        check("mirostat_tau", self.tau, 1e-6, 100)
        check("mirostat_eta", self.eta, 1e-6, 10)
        check("seed", self.seed, 0, SEED_MAX)
        # Version 1 estimates from the most likely candidates, version 2 needs none of that.
        if self.version == 2:
            return lib.llama_sampler_init_mirostat_v2(self.seed, self.tau, self.eta)
        return lib.llama_sampler_init_mirostat(
            vocab.n_tokens, self.seed, self.tau, self.eta, MIROSTAT_M
        )


@dataclass(frozen=True, slots=True)
class AdaptiveP:
    """Draws near the probability *target*, as an average over time."""

    target: float
    decay: float
    seed: int

    def make(self, vocab: Vocab) -> Any:  # noqa: ARG002 - see Stage
        check("adaptive_target", self.target, 0, 1)
        check("adaptive_decay", self.decay, 0, 0.99)
        check("seed", self.seed, 0, SEED_MAX)
        return lib.llama_sampler_init_adaptive_p(self.target, self.decay, self.seed)


def check(name: str, value: float, low: float, high: float) -> None:
    """Raise InvalidRequest unless low <= value <= high; NaN is never."""
    if not low <= value <= high:
        raise InvalidRequest(name, value, f"{low} to {high}")


def c_text(name: str, text: str) -> Any:
    """*text* as a C string that Python owns. Raises InvalidRequest."""
    # C ends a text at the first NUL, and an empty one would match everywhere.
    try:
        raw = text.encode()
    except UnicodeEncodeError:
        raise InvalidRequest(name, text, "text without lone surrogates") from None
    if not raw or b"\0" in raw:
        raise InvalidRequest(name, text, "text, not empty and without NUL")
    return ffi.new("char[]", raw)


def made(function: str, pointer: Any) -> Any:
    """*pointer* unless it is NULL. Raises NativeError."""
    if pointer == ffi.NULL:
        raise NativeError(function, None, last_error() or "no reason was given")
    return pointer
