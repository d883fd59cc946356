"""
Which tokens are chosen in the graph, and which from rows of logits on the host.

A lane is the resident top-k of a slot: the device leaves the likeliest FIRST_MAX tokens of
a row, and the request's own chain goes on with them on the host.

Rules:
1. All slots have a lane or none has: one row that is needed whole makes libllama copy all.
2. A lane keeps nothing between steps. Seeds and histories stay in the request's chain, so
   a token is the same with and without lanes.
3. Switching has all graphs prepared anew by the next decode. Off, as soon as a step needs
   a whole row; on again after that many requests in a row that need none, each time twice
   as many.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pyllama_raw.core.request import SamplerUse
from pyllama_raw.core.step import Chunk
from pyllama_raw.native.context import Context
from pyllama_raw.native.sampler import FIRST_MAX, RowSampler, SamplerChain
from pyllama_raw.native.stages import TopK
from pyllama_raw.native.vocab import Vocab
from pyllama_raw.sampling.params import SamplingParams

PATIENCE = 16  # requests
ARE_OFF = "lanes are off, a request beside it or before it needed all logits"
CANNOT = "the device cannot select candidates"
SLOWER = "auto: measured, the device chooses more slowly than the host"
FAILED = "lanes were given up after a context had failed"


@dataclass(slots=True)
class LaneCounts:
    """Totals since the engine was opened."""

    attaches: int = 0  # of a chain to a slot
    reserves: int = 0  # decodes that prepared all graphs anew because lanes changed
    fallbacks: int = 0  # requests with tokens from the host, though lanes are wanted


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
    """The lanes of an engine, through all its contexts."""

    def __init__(self, vocab: Vocab, n_slots: int, *, unwanted: str) -> None:
        """
        Args:
            unwanted: why there are none; empty: they are wanted.
        """
        self.counts = LaneCounts()
        self.unwanted = unwanted
        self._vocab = vocab
        self._n_slots = n_slots
        self._are_on = not unwanted
        self._needs_all: dict[int, str] = {}  # why, by request_id; those that do
        self._n_in_row = 0  # requests since the last one that needs all
        self._patience = PATIENCE

    def settle(self, pays: bool) -> None:
        """The first context has been measured, and has lanes just if they pay."""
        if not pays:
            self._are_on, self.unwanted = False, SLOWER

    def fresh(self) -> list[SamplerChain]:
        """For a new context."""
        return self._made() if self._are_on else []

    def give_up(self) -> None:
        """A context has failed: from now on without lanes, which take memory."""
        if self._are_on:
            self._are_on, self.unwanted = False, FAILED

    def open(
        self, request_id: int, params: SamplingParams, sampler: RowSampler
    ) -> None:
        """Note what a request needs."""
        why = needs_all(params, sampler)
        if why:
            self._needs_all[request_id] = why
        self._n_in_row = 0 if why else self._n_in_row + 1

    def close(self, request_id: int, sampler: RowSampler) -> SamplerUse | None:
        """Forget a request; tells where its tokens were chosen, if there were any."""
        why = self._needs_all.pop(request_id, "")
        if not sampler.n_on_host + sampler.n_on_lane:
            return None
        if self.unwanted:
            return SamplerUse("host", self.unwanted)
        if not sampler.n_on_host:
            return SamplerUse("backend", "")
        self.counts.fallbacks += 1
        return SamplerUse("host", why or (CANNOT if self._are_on else ARE_OFF))

    def prepare(self, context: Context, chunks: Iterable[Chunk]) -> None:
        """Switch, if the step of *chunks* needs it or the time has come."""
        if self.unwanted:
            return
        if self._are_on:
            needed = self._needs_all
            if needed and any(chunk.request_id in needed for chunk in chunks):
                self._switch(context, on=False)
        elif not self._needs_all and self._n_in_row >= self._patience:
            self._patience *= 2
            self._switch(context, on=True)

    def _switch(self, context: Context, *, on: bool) -> None:
        context.set_lanes(self._made() if on else [])
        self._are_on = on
        self.counts.reserves += 1

    def _made(self) -> list[SamplerChain]:
        self.counts.attaches += self._n_slots
        return make_lanes(self._vocab, self._n_slots)
