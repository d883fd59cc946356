"""
Lanes choose tokens in the graph; all other tokens are chosen from logits on the host.

A lane is the resident top-k of a slot: the device leaves the likeliest FIRST_MAX tokens of
a row, and the request's own chain goes on with them on the host.

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
"""

from __future__ import annotations

from collections.abc import Sequence

from pyllama_raw.core.request import SamplerUse
from pyllama_raw.native.context import Context
from pyllama_raw.native.model import Model
from pyllama_raw.native.sampler import FIRST_MAX, RowSampler, SamplerChain
from pyllama_raw.native.stages import TopK
from pyllama_raw.native.vocab import Vocab
from pyllama_raw.options.config import EngineConfig
from pyllama_raw.options.sampling import SamplingParams

NO_LANES = "the model reads prompts with an encoder: its rows have no lanes"
AUTO = "auto: the host chooses faster than lanes do"
CANNOT = "the device cannot select candidates"
TAKEN = "lanes were taken away, because a request needed all logits"
FAILED = "lanes were given up after a context had failed"


def refusal(model: Model, config: EngineConfig) -> str:
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
        if not sampler.n_on_host:
            return SamplerUse("backend", "")
        self.n_fallbacks += self._are_wanted
        return SamplerUse("host", why or self.off or CANNOT)

    def take_away(self, context: Context) -> None:
        """The next step needs a whole row."""
        if not self.off:
            context.set_lanes(())
            self.off = TAKEN
