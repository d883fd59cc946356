"""Facts that people, monitors and balancers ask of a running service."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from fastapi import FastAPI
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from pyllama_raw import AsyncEngine, SamplingParams, __version__
from pyllama_raw.api.metrics import EngineMetrics
from pyllama_raw.results import HealthState
from pyllama_raw.serve.failures import JSON
from pyllama_raw.serve.native.body import settings
from pyllama_raw.serve.service import Found, Service

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


SHOWN = (  # of /props, to keys that do not see all
    *("model", "model_path", "total_slots", "default_generation_settings"),
    *("chat_template", "build_info", "modalities", "n_slots", "vocab"),
)


def sees_all(request: Request) -> bool:
    """Whether who sends *request* may be told of the requests of others."""
    key = request.state.exchange.key
    return key is None or key.sees_all


def owner_of(request: Request) -> str | None:
    """The owner of the only requests that *request* may be told of; None: of all."""
    return None if sees_all(request) else request.state.exchange.client


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
    async def props(request: Request, model: str | None = None) -> Response:
        """The model and what its options came to."""
        found = service.named(model)
        told = _props(found.name, found.engine, service.config.sampling)
        if not sees_all(request):  # what is left is what clients of the model need
            names = told["model"], Path(told["model_path"]).name
            told = {n: told[n] for n in SHOWN} | {"model_path": names[1] or names[0]}
        return JSON(told)

    @app.get("/slots", tags=["facts"])
    async def slots(request: Request, model: str | None = None) -> Response:
        """What runs now, by slot, between two steps."""
        return JSON(await _slots(service.named(model), owner_of(request)))

    @app.get("/livez", tags=["probes"])
    async def livez() -> Response:
        """200 unless an engine thread hangs or has failed: then restart the process."""
        stall_s = service.config.stall_s
        states = {n: e.health(stall_s).state for n, e in service.engines.items()}
        lives = not {HealthState.STALLED, HealthState.DEAD} & {*states.values()}
        told: dict[str, Any] = {"status": "ok" if lives else "stalled"}
        if not service.keys:
            told["models"] = states
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


async def _slots(found: Found, owner: str | None) -> list[dict[str, Any]]:
    """All slots of a model, or those that run requests of *owner*."""
    engine = found.engine
    common = {"model": found.name, "n_ctx": engine.n_ctx_slot, "is_processing": False}
    told: list[dict[str, Any]] = [
        {"id": slot, **common} for slot in range(engine.info.n_slots)
    ]
    for has in await engine.slots():
        if owner is not None and has.client != owner:
            continue
        told[has.slot] |= {
            "is_processing": True,
            "id_task": has.request_id,
            "n_prompt": has.n_prompt,
            "n_cached": has.n_cached,
            "n_computed": has.n_computed,
            "n_decoded": has.n_output,
        }
    return [slot for slot in told if owner is None or slot["is_processing"]]


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
