"""Facts that people, monitors and balancers ask of a running service."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.responses import PlainTextResponse, Response

from pyllama_raw import AsyncEngine, SamplingParams, __version__
from pyllama_raw.api.metrics import EngineMetrics
from pyllama_raw.results import HealthState
from pyllama_raw.serve.failures import JSON
from pyllama_raw.serve.native.body import settings
from pyllama_raw.serve.service import Service

COMPUTED, CACHED = "computed prompt tokens", "vllm:prefix_cache_hits_total"
TIME = "vllm:request_{}_time_seconds_sum"
LLAMACPP = {  # names of its server, with our sample and what it says
    "prompt_tokens": (COMPUTED, "Prompt tokens that were computed"),
    "prompt_tokens_cached": (CACHED, "Those that were not"),
    "prompt_seconds": (TIME.format("prefill"), "Seconds of prompts"),
    "tokens_predicted": ("vllm:generation_tokens_total", "Output tokens"),
    "tokens_predicted_seconds": (TIME.format("decode"), "Those of all but the first"),
    "n_decode": ("pyllama_raw:steps_total", "Decodes"),
    "requests_processing": ("vllm:num_requests_running", "Requests that run"),
    "requests_deferred": ("vllm:num_requests_waiting", "Requests that wait"),
}


def routes(app: FastAPI, service: Service) -> None:
    """Add the endpoints; probes need no key."""
    metrics = _Metrics(service)

    @app.get("/metrics", tags=["facts"], response_class=PlainTextResponse)
    async def told() -> Response:
        """Counts and times, in the text format of Prometheus, each with its model."""
        headers = {"process-start-time-unix": str(service.started)}
        kind = "text/plain; version=0.0.4"
        return Response(generate_latest(metrics), media_type=kind, headers=headers)

    @app.get("/props", tags=["facts"])
    async def props(model: str | None = None) -> Response:
        """The model and what its options came to."""
        found = service.named(model)
        return JSON(_props(found.name, found.engine, service.config.sampling))

    @app.get("/slots", tags=["facts"])
    async def slots(model: str | None = None) -> Response:
        """What runs now, by slot, between two steps."""
        return JSON(await _slots(service.named(model).engine))

    @app.get("/livez", tags=["probes"])
    async def livez() -> Response:
        """200 unless an engine thread hangs or has failed: then restart the process."""
        stall_s = service.config.stall_s
        states = {n: e.health(stall_s).state for n, e in service.engines.items()}
        lives = not {HealthState.STALLED, HealthState.DEAD} & {*states.values()}
        told = {"status": "ok" if lives else "stalled", "models": states}
        return JSON(told, 200 if lives else 503)

    @app.get("/readyz", tags=["probes"])
    @app.get("/health", tags=["probes"])
    @app.get("/v1/health", include_in_schema=False)
    async def readyz() -> Response:
        """200 while new requests are taken."""
        ready = not service.drains and all(e.alive for e in service.engines.values())
        return JSON({"status": "ok" if ready else "draining"}, 200 if ready else 503)


def _props(name: str, engine: AsyncEngine, defaults: dict[str, Any]) -> dict[str, Any]:
    params = SamplingParams(**{"max_tokens": engine.n_ctx_slot} | defaults)
    usual = {"n_ctx": engine.n_ctx_slot, "params": settings(params, engine)}
    info, known = asdict(engine.info), engine.capabilities
    del info["config"], info["metadata"]
    return {
        "model": name,
        "model_path": engine.info.model_path,
        "total_slots": engine.info.n_slots,
        "default_generation_settings": usual,
        "chat_template": engine.info.metadata.get("tokenizer.chat_template", ""),
        "build_info": f"pyllama_raw {__version__}",
        "modalities": {"vision": known.images, "audio": known.sounds},
        "stats": asdict(engine.stats()),
        **info,
    }


async def _slots(engine: AsyncEngine) -> list[dict[str, Any]]:
    told: list[dict[str, Any]] = [
        {"id": slot, "n_ctx": engine.n_ctx_slot, "is_processing": False}
        for slot in range(engine.info.n_slots)
    ]
    for has in await engine.slots():
        told[has.slot] |= {
            "is_processing": True,
            "id_task": has.request_id,
            "n_prompt": has.n_prompt,
            "n_cached": has.n_cached,
            "n_computed": has.n_computed,
            "n_decoded": has.n_output,
        }
    return told


class _Metrics(Collector):
    """The metrics of all engines, each sample with the name of its model, and of the gate."""

    def __init__(self, service: Service) -> None:
        self._of = {n: EngineMetrics(e) for n, e in service.engines.items()}
        self._names, self._traffic = service.config.metrics_names, service.traffic

    def collect(self) -> Iterator[Metric]:
        """All families."""
        found: dict[str, Metric] = {}
        for model, metrics in self._of.items():
            for family in metrics.collect():
                new = Metric(family.name, family.documentation, family.type)
                known = found.setdefault(family.name, new)
                for sample in family.samples:
                    labels = {**sample.labels, "model_name": model}
                    known.samples.append(sample._replace(labels=labels))
        for family in found.values():
            if "vllm" in self._names or not family.name.startswith("vllm:"):
                yield family
        if "llamacpp" in self._names:
            yield from _of_llamacpp(found.values())
        yield from self._traffic.collect()


def _of_llamacpp(families: Iterable[Metric]) -> Iterator[Metric]:
    """The sums over all models, which have no label at llama.cpp's server."""
    totals = defaultdict[str, float](float)
    for sample in (sample for family in families for sample in family.samples):
        totals[sample.name] += sample.value
    totals[COMPUTED] = totals["vllm:prompt_tokens_total"] - totals[CACHED]
    for name, (source, text) in LLAMACPP.items():
        is_now = name.startswith("requests_")
        kind = GaugeMetricFamily if is_now else CounterMetricFamily
        yield kind(f"llamacpp:{name}", text, totals[source])
