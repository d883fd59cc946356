"""
A span of OpenTelemetry for each request; needs the extra `otel`.

    EngineSpans(engine)

Attributes have the names of the conventions for generative AI, and vLLM's where these have none.
A span is made when its request has ended. Its parent is the span that was current for the caller
of the request.
"""

from __future__ import annotations

import time

from opentelemetry import trace

from pyllama_raw.api.facts import Facts
from pyllama_raw.api.results import timings_of
from pyllama_raw.core.request import Finished, Request
from pyllama_raw.engine.watcher import Watcher


class EngineSpans(Watcher):
    """Makes the spans of one engine, in its thread: exporters that wait must batch."""

    def __init__(
        self, engine: Facts, provider: trace.TracerProvider | None = None
    ) -> None:
        """
        Args:
            provider: None: the one of the process.

        Raises:
            ClosedError, EngineStopped: *engine* has ended.
        """
        self._tracer = trace.get_tracer("pyllama_raw", tracer_provider=provider)
        self._clock = engine.clock
        self._model = engine.model_name
        engine.watch(self)

    def ended(self, request: Request, end: Finished) -> None:
        """Make a span, below the one that was current for the caller."""
        to_epoch_ns = time.time_ns() - round(1e9 * self._clock())
        span = self._tracer.start_span(
            "llm_request",
            None,
            trace.SpanKind.INTERNAL,
            {**self._asked(request), **_given(end), **_latencies(end)},
            start_time=to_epoch_ns + round(1e9 * end.timings.submitted),
        )
        if end.error is not None:
            span.set_attribute("error.type", end.error.code)
            span.set_status(trace.StatusCode.ERROR, str(end.error))
        span.end(to_epoch_ns + round(1e9 * end.timings.finished))

    def _asked(self, request: Request) -> dict[str, str | int]:
        model = {} if self._model is None else {"gen_ai.request.model": self._model}
        operation = "embeddings" if request.lot.makes_vectors else "text_completion"
        return {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": "pyllama_raw",
            **model,
            "gen_ai.request.id": str(request.request_id),
            "gen_ai.request.max_tokens": request.max_tokens,
        }


def _given(end: Finished) -> dict[str, int | tuple[str, ...]]:
    return {
        "gen_ai.response.finish_reasons": (end.why,),
        "gen_ai.usage.input_tokens": end.n_prompt,
        "gen_ai.usage.output_tokens": end.n_output,
        "gen_ai.usage.cache_read.input_tokens": end.n_cached,
        "pyllama_raw.preemptions": end.n_preempted,
    }


def _latencies(end: Finished) -> dict[str, float]:
    """Seconds; of what it did not come to there are none."""
    times = timings_of(end)
    latencies = {
        "e2e": times.e2e_s,
        "time_in_queue": times.queue_s,
        "time_to_first_token": times.ttft_s,
        "time_in_model_prefill": times.prefill_s,
        "time_in_model_decode": times.decode_s,
    }
    return {f"gen_ai.latency.{k}": s for k, s in latencies.items() if s is not None}
