"""Metrics of an engine, as Prometheus reads them."""

import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pyllama_raw import SamplingParams
from pyllama_raw.api.metrics import EngineMetrics, Histogram
from pyllama_raw.testing import fake_engine

pytestmark = pytest.mark.anyio
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana.json"


async def read():
    """Samples by name and labels, after requests that ended in two ways."""
    async with fake_engine() as engine:
        metrics = EngineMetrics(engine)
        await engine.complete("hello", SamplingParams(max_tokens=3))
        await engine.complete("hello!", SamplingParams(max_tokens=5))
        async with engine.generate("hello", deadline_s=1e-9) as generation:
            await generation.collect()
        text = metrics.text()
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


async def test_the_text_says_what_has_happened():
    """
    The parser of Prometheus reads totals, requests by their end, and histograms.
    """
    found = await read()

    assert found["vllm:generation_tokens_total",] == 8
    assert found["vllm:request_success_total", "length"] == 2
    assert found["vllm:request_success_total", "abort"] == 1
    assert found["pyllama_raw:requests_ended_total", "deadline"] == 1
    assert found["vllm:request_generation_tokens_bucket", "1.0"] == 1
    assert found["vllm:request_generation_tokens_bucket", "5.0"] == 3
    assert found["vllm:request_generation_tokens_sum",] == 8
    assert found["vllm:inter_token_latency_seconds_count",] == 2 + 4
    assert found["vllm:time_to_first_token_seconds_count",] == 2
    assert found["vllm:prefix_cache_queries_total",] == 6 + 7 + 6
    assert found["vllm:prefix_cache_hits_total",] == 0  # there is no cache
    assert found["pyllama_raw:health", "ready"] == 1
    assert found["pyllama_raw:health", "dead"] == 0
    assert found["vllm:num_requests_running",] == 0


async def test_the_dashboard_names_metrics_that_exist():
    """
    Every name in an expression is a sample of an engine.
    """
    found = {name for name, *_ in await read()}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    texts = [target["expr"] for panel in panels for target in panel["targets"]]
    named = {name for text in texts for name in re.findall(r"\w+:\w+", text)}

    assert len(panels) == 12
    assert named <= found


def test_a_histogram_counts_by_upper_bound():
    """
    A value at a bound belongs to it; one above all of them to +Inf.
    """
    histogram = Histogram((1.0, 2.0))
    for value in (2.5, 1.0, 0.5, 1.5):
        histogram.add(value)
    (family,) = [histogram.family("a_seconds", "text")]

    assert [(s.name, s.labels.get("le"), s.value) for s in family.samples] == [
        ("a_seconds_bucket", "1.0", 2.0),
        ("a_seconds_bucket", "2.0", 3.0),
        ("a_seconds_bucket", "+Inf", 4.0),
        ("a_seconds_count", None, 4.0),
        ("a_seconds_sum", None, 5.5),
    ]
