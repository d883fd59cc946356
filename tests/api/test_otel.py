"""Spans of requests, as the SDK of OpenTelemetry exports them."""

from dataclasses import replace

import pytest

from pyllama_raw import SamplingParams
from pyllama_raw.core.request import Finished, FinishReason, Moments
from pyllama_raw.errors import SamplingFailed
from pyllama_raw.testing import fake_engine
from tests.api.test_blocking import blocking
from tests.core.support import make_request

pytest.importorskip("opentelemetry.sdk", reason="the extra test is not installed")

from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pyllama_raw.api.otel import EngineSpans

pytestmark = pytest.mark.anyio
PARAMS = SamplingParams(max_tokens=3)
END = Finished(
    7,
    FinishReason.LENGTH,
    None,
    n_prompt=20,
    n_output=3,
    n_cached=16,
    cache_tier=None,
    n_preempted=1,
    timings=Moments(2.0, 3.0, 4.5, 9.0, (1.0, 3.5), 9.0),
)


@pytest.fixture
def exported():
    return InMemorySpanExporter()


@pytest.fixture
def provider(exported):
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exported))
    return provider


async def test_the_parent_is_the_span_of_the_caller(exported, provider):
    """
    Each request belongs to the span in which it was made, and without one to none.
    """
    tracer = provider.get_tracer("test")
    async with fake_engine() as engine:
        EngineSpans(engine, provider)
        with tracer.start_as_current_span("asks") as asking:
            await engine.complete("hello", PARAMS)
        await engine.complete("hello", PARAMS)

    found = exported.get_finished_spans()
    assert [span.name for span in found] == ["llm_request", "asks", "llm_request"]
    assert found[0].parent == asking.get_span_context()
    assert found[2].parent is None


def test_a_blocking_engine_keeps_the_parent(exported, provider):
    """
    Although its requests are made in another thread.
    """
    with blocking() as engine:
        EngineSpans(engine, provider)
        with provider.get_tracer("test").start_as_current_span("asks") as asking:
            engine.complete("hello", PARAMS)

    assert exported.get_finished_spans()[0].parent == asking.get_span_context()


async def test_a_span_says_what_became_of_the_request(exported, provider):
    """
    Names are those of the conventions and of vLLM; the span is as long as the request was.
    """
    async with fake_engine() as engine:
        spans = EngineSpans(engine, provider)
        spans.ended(make_request(7, max_tokens=5), END)

    (span,) = exported.get_finished_spans()
    assert dict(span.attributes) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "pyllama_raw",
        "gen_ai.request.id": "7",
        "gen_ai.request.max_tokens": 5,
        "gen_ai.response.finish_reasons": ("length",),
        "gen_ai.usage.input_tokens": 20,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 16,
        "pyllama_raw.preemptions": 1,
        "gen_ai.latency.e2e": 7.0,
        "gen_ai.latency.time_in_queue": 1.0,
        "gen_ai.latency.time_to_first_token": 2.5,
        "gen_ai.latency.time_in_model_prefill": 1.5,
        "gen_ai.latency.time_in_model_decode": 4.5,
    }
    assert span.end_time - span.start_time == 7 * 10**9
    assert span.status.is_unset


async def test_a_request_that_failed_is_a_span_that_failed(exported, provider):
    """
    The code of the error is its type; times that it did not come to are left out.
    """
    timings = replace(END.timings, admitted=None, first_token=None, itl=())
    async with fake_engine() as engine:
        spans = EngineSpans(engine, provider)
        error = SamplingFailed("f", None, "as told")
        end = replace(END, reason=None, error=error, timings=timings)
        spans.ended(make_request(7), end)

    (span,) = exported.get_finished_spans()
    assert span.attributes["error.type"] == "sampling_failed"
    assert span.status.status_code is trace.StatusCode.ERROR
    assert [name for name in span.attributes if "latency" in name] == [
        "gen_ai.latency.e2e"
    ]
