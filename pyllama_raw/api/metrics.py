"""
Metrics of an engine for Prometheus; needs the extra `metrics`.

    REGISTRY.register(EngineMetrics(engine))

Names that dashboards of vLLM know are vLLM's; all others begin with `pyllama_raw:`. Requests
are counted when they end, those that were there before included.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping
from threading import Lock

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from pyllama_raw.api.facts import Facts, HealthState
from pyllama_raw.api.results import EngineStats, timings_of
from pyllama_raw.core.request import Finished, FinishReason, Request
from pyllama_raw.engine.watcher import Watcher

SHORT_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0)
LONG_S = (2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0)
SECONDS = (*SHORT_S, *LONG_S)
TOKENS = tuple(float(d * 10**n) for n in range(6) for d in (1, 2, 5))
VLLM_REASONS = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length"}
INF = float("inf")

HISTOGRAMS = {  # name: what it says, and its bounds
    "vllm:time_to_first_token_seconds": ("Submitted to first output token", SECONDS),
    "vllm:inter_token_latency_seconds": ("Gaps between output tokens", SECONDS),
    "vllm:request_time_per_output_token_seconds": ("Mean gap of a request", SECONDS),
    "vllm:e2e_request_latency_seconds": ("Submitted to finished", SECONDS),
    "vllm:request_queue_time_seconds": ("Submitted to first slot", SECONDS),
    "vllm:request_prefill_time_seconds": ("First slot to first token", SECONDS),
    "vllm:request_decode_time_seconds": ("First to last output token", SECONDS),
    "vllm:request_inference_time_seconds": ("First slot to finished", SECONDS),
    "vllm:request_prompt_tokens": ("Prompt tokens of a request", TOKENS),
    "vllm:request_generation_tokens": ("Output tokens of a request", TOKENS),
}
COUNTERS = {  # of EngineStats
    "pyllama_raw:steps": ("steps", "Steps"),
    "pyllama_raw:steps_aborted": ("aborted_steps", "Steps nobody wanted any more"),
    "pyllama_raw:steps_without_space": ("no_space_steps", "Steps that found no cells"),
    "pyllama_raw:steps_failed": ("failed_steps", "Decodes that libllama refused"),
    "pyllama_raw:rebuilds": ("rebuilds", "Contexts that were made anew"),
    "pyllama_raw:computed_tokens": ("computed_tokens", "Tokens that were computed"),
    "pyllama_raw:decode_seconds": ("decode_s", "Seconds in llama_decode"),
    "pyllama_raw:decode_cpu_seconds": ("decode_cpu_s", "CPU seconds in llama_decode"),
    "pyllama_raw:sample_seconds": ("sample_s", "Seconds of choosing tokens"),
    "pyllama_raw:capture_seconds": ("capture_s", "Seconds of copying slots"),
    "pyllama_raw:restore_seconds": ("restore_s", "Seconds of copying back"),
    "pyllama_raw:policy_faults": ("policy_faults", "Faults of the policy"),
    "pyllama_raw:watcher_faults": ("watcher_faults", "Watchers that raised"),
    "pyllama_raw:relaxed_schemas": (
        "relaxed_schemas",
        "Schemas of tools that a grammar keeps in part",
    ),
    "pyllama_raw:mended_chats": ("mended_chats", "Chats that were changed to be taken"),
    "vllm:num_preemptions": ("preempted", "Requests that lost their slot"),
    "vllm:generation_tokens": ("output_tokens", "Output tokens"),
    "vllm:spec_decode_num_draft_tokens": ("drafted_tokens", "Tokens that were drafted"),
    "vllm:spec_decode_num_accepted_tokens": (
        "accepted_tokens",
        "Drafts that were right",
    ),
}
GAUGES = {
    "vllm:num_requests_running": ("running", "Requests that run"),
    "vllm:num_requests_waiting": ("waiting", "Requests in the queue"),
    "pyllama_raw:slots": ("n_slots", "Requests that can run at a time"),
    "pyllama_raw:waiting_tokens": ("waiting_tokens", "Prompt tokens in the queue"),
    "pyllama_raw:kv_cells": ("n_cells", "KV cells"),
    "pyllama_raw:kv_cells_used": ("n_cells_used", "KV cells that hold tokens"),
    "pyllama_raw:kv_used_bytes": ("kv_bytes_used", "Bytes that these take"),
    "pyllama_raw:cache_bytes": ("cache_bytes", "Snapshots in host memory"),
    "pyllama_raw:cache_disk_bytes": ("disk_bytes", "Files of the cache"),
}


class Histogram:
    """Counts by upper bound, and the sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count *value*."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        """As Prometheus reads it."""
        n, buckets = 0, []
        for bound, count in zip((*self.bounds, INF), self.counts, strict=True):
            n += count
            buckets.append(("+Inf" if bound == INF else str(bound), float(n)))
        return HistogramMetricFamily(name, text, buckets, self.total)


class EngineMetrics(Collector, Watcher):
    """The metrics of one engine; collected when somebody asks."""

    def __init__(self, engine: Facts) -> None:
        """
        Raises:
            ClosedError, EngineStopped: *engine* has ended.
        """
        self._engine = engine
        self._lock = Lock()
        self._histograms = {
            n: Histogram(description[1]) for n, description in HISTOGRAMS.items()
        }
        self._reasons = Counter[str]()
        self._ends = Counter[str]()
        self._n_prompt = self._n_looked_for = self._n_cached = 0
        engine.watch(self)

    def text(self) -> str:
        """The metrics of this engine alone, in the text format of Prometheus."""
        registry = CollectorRegistry()
        registry.register(self)
        return generate_latest(registry).decode()

    def ended(self, request: Request, end: Finished) -> None:
        """Take in a request. Thread: the engine's."""
        times = timings_of(end)
        held_s = None if times.queue_s is None else times.e2e_s - times.queue_s
        values = {
            "vllm:e2e_request_latency_seconds": times.e2e_s,
            "vllm:request_prompt_tokens": end.n_prompt,
            "vllm:request_generation_tokens": end.n_output,
            "vllm:request_queue_time_seconds": times.queue_s,
            "vllm:request_inference_time_seconds": held_s,
            "vllm:time_to_first_token_seconds": times.ttft_s,
            "vllm:request_prefill_time_seconds": times.prefill_s,
            "vllm:request_decode_time_seconds": times.decode_s,
            "vllm:request_time_per_output_token_seconds": times.tpot_s,
        }
        reason = VLLM_REASONS.get(end.reason, "abort") if end.reason else "error"
        with self._lock:
            for name, value in values.items():
                if value is not None:
                    self._histograms[name].add(value)
            for gap_s in times.itl_s:
                self._histograms["vllm:inter_token_latency_seconds"].add(gap_s)
            self._reasons[reason] += 1
            self._ends[end.why] += 1
            self._n_prompt += end.n_prompt
            if not request.lot.makes_vectors:
                self._n_looked_for += end.n_prompt
            self._n_cached += end.n_cached

    def collect(self) -> Iterator[Metric]:
        """All of it. Thread: any."""
        stats = self._engine.stats()
        yield from self._of_stats(stats)
        yield from self._of_health()
        with self._lock:
            yield from [*self._of_requests()]

    def _of_stats(self, stats: EngineStats) -> Iterator[Metric]:
        for name, (field, text) in COUNTERS.items():
            yield CounterMetricFamily(name, text, getattr(stats, field))
        for name, (field, text) in GAUGES.items():
            yield GaugeMetricFamily(name, text, getattr(stats, field))
        name, text = "pyllama_raw:multiply_adds", "Multiply-adds with weights"
        products = CounterMetricFamily(name, text, labels=["weights", "kernels"])
        for weights, counts in stats.products.items():
            for kernels, n in counts.items():
                products.add_metric([weights, kernels], n)
        yield products
        share = stats.n_cells_used / max(stats.n_cells, 1)
        text = "Share of the KV cells that hold tokens"
        yield GaugeMetricFamily("vllm:kv_cache_usage_perc", text, share)

    def _of_health(self) -> Iterator[Metric]:
        health = self._engine.health()
        name, text = "pyllama_raw:oldest_wait_seconds", "The longest wait for a slot"
        yield GaugeMetricFamily(name, text, health.oldest_wait_s)
        name, text = "pyllama_raw:health", "1 for the state that it is in"
        states = GaugeMetricFamily(name, text, labels=["state"])
        for state in HealthState:
            states.add_metric([str(state)], float(state is health.state))
        yield states

    def _of_requests(self) -> Iterator[Metric]:
        for name, (text, _) in HISTOGRAMS.items():
            yield self._histograms[name].family(name, text)
        text = "Prompt tokens of requests that have ended"
        yield CounterMetricFamily("vllm:prompt_tokens", text, self._n_prompt)
        name, text = "vllm:prefix_cache_queries", "Prompt tokens that were looked for"
        yield CounterMetricFamily(name, text, self._n_looked_for)
        name, text = "vllm:prefix_cache_hits", "Prompt tokens that were not computed"
        yield CounterMetricFamily(name, text, self._n_cached)
        success = "vllm:request_success", "Requests, as vLLM says"
        yield _labelled(*success, "finished_reason", self._reasons)
        ended = "pyllama_raw:requests_ended", "Requests, as we say"
        yield _labelled(*ended, "why", self._ends)


def _labelled(
    name: str, text: str, label: str, counts: Mapping[str, int]
) -> CounterMetricFamily:
    """The *counts* by the value of *label*."""
    family = CounterMetricFamily(name, text, labels=[label])
    for value, n in counts.items():
        family.add_metric([value], n)
    return family
