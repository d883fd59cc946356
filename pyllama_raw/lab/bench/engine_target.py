"""Our engine, in this process, through its public API."""

from __future__ import annotations

from dataclasses import asdict

from pyllama_raw.api.engine import AsyncEngine
from pyllama_raw.core.request import FinishReason
from pyllama_raw.lab.bench.call import CallFailed, Record
from pyllama_raw.options.sampling import SamplingParams

COUNTERS = (
    "steps",
    "computed_tokens",
    "preempted",
    "decode_s",
    "sample_s",
    "capture_s",
    "restore_s",
)


def fixed_length(max_tokens: int) -> SamplingParams:
    """Greedy, and exactly so many tokens."""
    return SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)


class EngineTarget:
    """A target that is an engine."""

    def __init__(self, engine: AsyncEngine) -> None:
        self.engine = engine

    async def send(self, record: Record) -> None:
        call = record.call
        params = fixed_length(call.max_tokens)
        stream = self.engine.generate(record.prompt, params, **call.options)
        async with stream as generation:
            async for delta in generation:
                record.take(len(delta.token_ids), delta.text, delta.token_ids)
        result = generation.result
        record.n_prompt = result.usage.prompt_tokens
        record.n_cached = result.usage.cached_tokens
        record.queue_s = result.timings.queue_s
        if result.finish_reason is FinishReason.DEADLINE:
            came = f"{record.n_output} of {call.max_tokens} tokens came"
            raise CallFailed(f"deadline_s={call.deadline_s} was over when {came}")
        record.check_length()

    def counters(self) -> dict[str, float]:
        """Totals of the engine; what a run adds to them is in its result."""
        stats = asdict(self.engine.stats())
        return {name: stats[name] for name in COUNTERS}
