"""
Facts that people, monitors and balancers ask of a running service: its adapters, slots and counts.

Keys of most clients see their own requests only, and no folders.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from anyio import create_task_group, to_thread
from fastapi import FastAPI
from prometheus_client import generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from pyllama_raw import AsyncEngine, SamplingParams
from pyllama_raw.options.chat_templates import model_template
from pyllama_raw.results import EngineState, HealthState
from pyllama_raw.runners import ModelCache
from pyllama_raw.serve.failures import JSON, Failure
from pyllama_raw.serve.llamacpp import settings
from pyllama_raw.serve.media import MARKER
from pyllama_raw.serve.service import ServedModel, Service, ServingProcess

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
LLAMACPP_RATES = {  # gauges of its server, by ours of which they are the quotient
    "prompt_tokens_seconds": (COMPUTED, TIME.format("prefill")),
    "predicted_tokens_seconds": ("vllm:generation_tokens_total", TIME.format("decode")),
}

SHOWN = (  # of /props, to keys that do not see all
    *("model", "model_path", "total_slots", "default_generation_settings"),
    *("chat_template", "build_info", "modalities", "n_slots", "vocab"),
    *("chat_template_caps", "model_alias", "bos_token", "eos_token", "media_marker"),
    *("endpoint_slots", "endpoint_props", "endpoint_metrics", "ui", "is_sleeping"),
)
ENDPOINTS = ("slots", "props", "metrics")
ANSWERS = "pyllama_raw:model_process_answers"


def routes(app: FastAPI, service: Service) -> None:
    """Add the endpoints; probes need no key, and what changes something that of an operator."""

    @app.get("/lora-adapters", tags=["adapters"])
    async def adapters(request: Request) -> Response:
        """All adapters that requests may name."""
        adapters = adapters_of(service)
        for process in service.processes.values():
            adapters += await process.fact("/lora-adapters") or []
        return JSON(adapters if sees_all(request) else [*map(_without_users, adapters)])

    @app.get("/metrics", tags=["facts"], response_class=PlainTextResponse)
    async def told() -> Response:
        """Counts and times, in the text format of Prometheus, each with its model."""
        headers = {"process-start-time-unix": str(service.started)}
        kind = "text/plain; version=0.0.4"
        metrics = _Metrics(service, await _of_processes(service))
        return Response(generate_latest(metrics), media_type=kind, headers=headers)

    @app.get("/props", tags=["facts"])
    async def props(request: Request, model: str | None = None) -> Response:
        """The model and what its options came to; of no model of many, what the service is."""
        if model is None and service.is_router:
            return JSON(_router(service))
        served = service.named(model)
        facts = await _props(served.name, served.engine, service)
        if not sees_all(request):  # what is left is what clients of the model need
            names = facts["model"], Path(facts["model_path"]).name
            facts = {n: facts[n] for n in SHOWN} | {"model_path": names[1] or names[0]}
        return JSON(facts)

    @app.get("/slots", tags=["facts"])
    async def slots(
        request: Request, model: str | None = None, fail_on_no_slot: str | None = None
    ) -> Response:
        """What runs now, by slot, between two steps."""
        if model is None and service.is_router:
            message = "model name is missing from the request"
            raise Failure(400, "invalid_request", message, "model")
        owner = None if sees_all(request) else request.state.exchange.client
        facts = await _slots(service.named(model), owner)
        if fail_on_no_slot and all(slot["is_processing"] for slot in facts):
            raise Failure(503, "no_slot", "no slot available")
        return JSON(facts)

    @app.get("/livez", tags=["probes"])
    async def livez() -> Response:
        """200 unless an engine thread hangs or has failed: then restart the process."""
        stall_s = service.config.stall_s
        states: dict[str, str] = {}
        states |= {n: e.health(stall_s).state for n, e in service.engines.items()}
        lives = not {HealthState.STALLED, HealthState.DEAD} & {*states.values()}
        answer: dict[str, Any] = {"status": "ok" if lives else "stalled"}
        # A process of a model that hangs takes nothing along, so this one need not be restarted.
        states |= await _states_of_processes(service)
        # Probes need no key, so they tell no names where there are keys.
        if not service.keys:
            answer["models"] = states
        return JSON(answer, 200 if lives else 503)

    @app.get("/readyz", tags=["probes"])
    @app.get("/health", tags=["probes"])
    @app.get("/v1/health", include_in_schema=False)
    async def readyz() -> Response:
        """200 while new requests are taken."""
        # An engine that has ended is opened anew where models are loaded on demand.
        alive = [service.models.is_dynamic or e.alive for e in service.engines.values()]
        ready = not service.drains and all(alive)
        return JSON({"status": "ok" if ready else "draining"}, 200 if ready else 503)


def sees_all(request: Request) -> bool:
    """Whether who sends *request* may be told of the requests of others."""
    key = request.state.exchange.key
    return key is None or key.sees_all


def _router(service: Service) -> dict[str, Any]:
    """The properties of a service of many models, in llama-server's words."""
    return {
        "role": "router",
        "max_instances": service.models.max_models or 0,
        "models_autoload": service.autoload,
        "model_alias": "llama-server" if service.is_llama else "pyllama_raw",
        "model_path": "none",
        "default_generation_settings": {"params": {}, "n_ctx": 0},
        "build_info": service.config.build,
        "ui": "page" not in service.config.closed,
    }


def adapters_of(service: Service) -> list[dict[str, Any]]:
    """All adapters of models in this process."""
    return [
        {
            "id": index,
            "model": model,
            "name": adapter.name,
            "path": adapter.path,
            "bytes": adapter.n_bytes,
            "requests": adapter.n_requests,
            "scale": service.scales.get(model, {}).get(adapter.name, 0.0),
        }
        for model, engine in service.engines.items()
        for index, adapter in enumerate(engine.adapters())
    ]


def _without_users(adapter: dict[str, Any]) -> dict[str, Any]:
    """An adapter as keys see it that do not see all: without its folder and who uses it."""
    facts = {n: value for n, value in adapter.items() if n != "requests"}
    return facts | {"path": Path(adapter["path"]).name}


async def _states_of_processes(service: Service) -> dict[str, str]:
    """The states of models in processes of their own, by name; what processes say is not waited for long."""
    states: dict[str, str] = {}

    async def ask(name: str, process: ServingProcess) -> None:
        states[name] = await process.state()

    async with create_task_group() as group:
        for name, process in service.processes.items():
            group.start_soon(ask, name, process)
    return states


async def _of_processes(service: Service) -> list[tuple[str, Metric]]:
    """
    Families of models in processes of their own, with the names of the models.

    One that does not answer has the family alone that says so.
    """
    families: list[tuple[str, Metric]] = []

    async def ask(name: str, process: ServingProcess) -> None:
        own = await process.metrics()
        text = "Whether the process of the model told its counts in time"
        answers = GaugeMetricFamily(ANSWERS, text, float(own is not None))
        families.extend((name, family) for family in (answers, *(own or ())))

    async with create_task_group() as group:
        for name, process in service.processes.items():
            group.start_soon(ask, name, process)
    return families


async def _props(name: str, engine: AsyncEngine, service: Service) -> dict[str, Any]:
    defaults, closed = service.sampling, service.config.closed
    params = SamplingParams(**{"max_tokens": engine.n_ctx_slot} | defaults)
    # The chat template is tried in another process, once.
    has_tools = await to_thread.run_sync(lambda: engine.capabilities.tools)
    vocab = engine.info.vocab
    usual = {"n_ctx": engine.n_ctx_slot, "params": settings(params, engine)}
    info, uses = asdict(engine.info), engine.capabilities
    del info["config"], info["metadata"]
    return {
        **info,
        "model": name,
        "model_path": engine.info.model_path,
        "total_slots": engine.info.n_slots,
        "default_generation_settings": usual,
        "chat_template": template_of(engine),
        "build_info": service.config.build,
        "modalities": {"vision": uses.images, "audio": uses.sounds, "video": False},
        "chat_template_caps": {
            "supports_tools": has_tools,
            "supports_tool_calls": has_tools,
            "supports_system_role": True,
            "supports_string_content": True,
        },
        "model_alias": name,
        "bos_token": vocab.bos.text if vocab.bos else "",
        "eos_token": vocab.eos.text if vocab.eos else "",
        "media_marker": MARKER,
        **{f"endpoint_{facts}": facts not in closed for facts in ENDPOINTS},
        "ui": "page" not in closed,
        "is_sleeping": engine.state is EngineState.SLEEPING,
        "stats": asdict(engine.stats()),
    }


def template_of(engine: AsyncEngine) -> str:
    """The text of the chat template that chats have."""
    option = engine.info.config.model.chat_template
    own = engine.info.metadata.get("tokenizer.chat_template", "")
    template = model_template(option, own)
    return own if template is None else template.text


async def _slots(model: ServedModel, owner: str | None) -> list[dict[str, Any]]:
    """All slots of a model, or those that run requests of *owner*."""
    engine = model.engine
    common = {"model": model.name, "n_ctx": engine.n_ctx_slot, "is_processing": False}
    common |= {"speculative": not engine.info.speculation.startswith("off")}
    slots: list[dict[str, Any]] = [
        {"id": slot, **common} for slot in range(engine.info.n_slots)
    ]
    # Slots that run nothing are told as idle, and only to whom may see all.
    for slot in await engine.slots():
        if owner is not None and slot.client != owner:
            continue
        slots[slot.slot] |= {
            "is_processing": True,
            "id_task": slot.request_id,
            "n_prompt": slot.n_prompt,
            "n_cached": slot.n_cached,
            "n_computed": slot.n_computed,
            "n_decoded": slot.n_output,
            # llama-server's words of the same.
            "n_prompt_tokens": slot.n_prompt,
            "n_prompt_tokens_processed": min(slot.n_computed, slot.n_prompt)
            - slot.n_cached,
            "n_prompt_tokens_cache": slot.n_cached,
            "next_token": [{"has_next_token": True, "n_decoded": slot.n_output}],
        }
    return [slot for slot in slots if owner is None or slot["is_processing"]]


class _Metrics(Collector):
    """The metrics of all engines, each sample with the name of its model, and of the gate."""

    def __init__(self, service: Service, families: list[tuple[str, Metric]]) -> None:
        """
        Args:
            families: of models in processes of their own, with the names of the models.
        """
        self._service = service
        self._own = [
            (model, family)
            for model, engine in service.engines.items()
            for family in service.metrics_of(engine).collect()
        ]
        self._own += families
        self._names, self._traffic = service.config.metrics_names, service.traffic

    def collect(self) -> Iterator[Metric]:
        """All families."""
        families: dict[str, Metric] = {}
        # All models have the same families, so their samples are put together.
        for model, family in self._own:
            new = Metric(family.name, family.documentation, family.type)
            shared = families.setdefault(family.name, new)
            for sample in family.samples:
                labels = {**sample.labels, "model_name": model}
                shared.samples.append(sample._replace(labels=labels))
        for family in families.values():
            if "vllm" in self._names or not family.name.startswith("vllm:"):
                yield family
        if "llamacpp" in self._names:
            yield from _of_llamacpp(families.values())
        yield from self._traffic.collect()
        if self._service.models.is_dynamic:
            yield from _of_models(self._service.models)


def _of_models(models: ModelCache) -> Iterator[Metric]:
    """Where the models of a cache are, who waits for them, and what they take."""
    name, text = "pyllama_raw:model_state", "1 for the state that a model has"
    states = GaugeMetricFamily(name, text, labels=("model_name", "state"))
    name, text = "pyllama_raw:model_claims_waiting", "Requests that wait for the model"
    waiting = GaugeMetricFamily(name, text, labels=("model_name",))
    name, text = "pyllama_raw:model_bytes", "Bytes that a model takes, as reckoned"
    sizes = GaugeMetricFamily(name, text, labels=("model_name", "device"))
    for model in models:
        status = models.status(model)
        states.add_metric((model, status.state), 1)
        waiting.add_metric((model,), status.n_waiting)
        for device, n_bytes in status.n_bytes.items():
            sizes.add_metric((model, device), n_bytes)
    yield from (states, waiting, sizes)


def _of_llamacpp(families: Iterable[Metric]) -> Iterator[Metric]:
    """The sums over all models, which have no label at llama.cpp's server."""
    totals = defaultdict[str, float](float)
    for sample in (sample for family in families for sample in family.samples):
        totals[sample.name] += sample.value
    # Ours counts all tokens of prompts, and theirs those that were computed.
    totals[COMPUTED] = totals["vllm:prompt_tokens_total"] - totals[CACHED]
    for name, (source, text) in LLAMACPP.items():
        is_now = name.startswith("requests_")
        kind = GaugeMetricFamily if is_now else CounterMetricFamily
        yield kind(f"llamacpp:{name}", text, totals[source])
    # Since the start, as its boards expect; of a shorter time monitors compute them of the counters.
    for name, (tokens, seconds) in LLAMACPP_RATES.items():
        rate = totals[tokens] / totals[seconds] if totals[seconds] else 0.0
        yield GaugeMetricFamily(f"llamacpp:{name}", "Tokens a second so far", rate)
