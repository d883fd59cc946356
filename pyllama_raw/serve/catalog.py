"""
The models of a service: the list of them with their states, what loads and unloads them, and what
becomes of them as events.

Names and forms are those of llama-server's router. Nothing here loads a model but `/models/load`, and
nothing keeps one awake.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from anyio import create_task_group, move_on_after
from fastapi import FastAPI
from pydantic import BaseModel, ValidationError
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from pyllama_raw import AsyncEngine
from pyllama_raw.runners import ModelEvent, ModelState
from pyllama_raw.serve.answer import EventStream, event
from pyllama_raw.serve.downloads import CACHE, Downloads
from pyllama_raw.serve.failures import JSON, Failure, refused
from pyllama_raw.serve.service import Service, ServingProcess

UNLOADED, LOADING = ModelState.UNLOADED, ModelState.LOADING
SLEEPING, LEAVING = ModelState.SLEEPING, ModelState.LEAVING
LOOK_S = 0.25  # between two looks how far loads are
VOCABULARIES = {  # llama.h: enum llama_vocab_type, by the word of the file
    "llama": 1, "gpt2": 2, "bert": 3, "t5": 4, "rwkv": 5, "plamo2": 6,
}  # fmt: skip


class ModelBody(BaseModel):
    """A model that is to be loaded or unloaded; other fields change nothing."""

    model: str
    """A name of `/v1/models`."""


def routes(app: FastAPI, service: Service) -> None:
    """Add the endpoints."""

    @app.get("/v1/models", tags=["models"])
    @app.get("/models", include_in_schema=False)
    async def models(reload: str = "") -> Response:
        """
        All models, and each adapter of one as a model `base:adapter`.

        Args:
            reload: anything: the list is read anew first, where it is that of a folder or a file.
        """
        if reload:
            await service.reread()
        engines, cards = service.engines, await _cards(service)
        data = [
            model
            for name in service.models
            for engine in (engines.get(name),)
            for model in cards.get(name)
            or [_model(service, name, engine, end) for end in ("", *_adapters(engine))]
            if not (service.is_llama and model["parent"])
        ]
        data += _coming(service)
        answer = {"object": "list", "data": data}
        if service.is_llama:
            inputs = {name: _inputs(engine) for name, engine in engines.items()}
            for name, [card, *_] in cards.items():
                inputs[name] = card["architecture"]["input_modalities"]
            answer["models"] = [_listed(name, inputs[name]) for name in inputs]
        return JSON(answer)

    @app.get("/v1/models/{name:path}", tags=["models"])
    async def model(name: str) -> Response:
        """One model."""
        name = unquote(name)
        for card in (await _cards(service)).get(service.base_of(name) or "", []):
            if card["id"] == service.config.aliases.get(name, name):
                return JSON(card)
        # A model on demand need not be there.
        if service.models.is_dynamic and service.base_of(name) == name:
            return JSON(_model(service, name, service.engines.get(name), ""))
        served = service.named(name)
        suffix = "".join(f":{adapter}" for adapter in served.adapters)
        return JSON(_model(service, served.name, served.engine, suffix))

    @app.post("/models/load", tags=["models"])
    async def load_model(request: Request) -> Response:
        """Begin to load a model, or to wake it; `/models/sse` tells how that goes on."""
        name = _named_model(await _wish(request, service), request, service)
        if service.models.status(name).state not in (UNLOADED, SLEEPING, LEAVING):
            raise Failure(400, "invalid_request", "model is already running", "model")
        service.models.begin(name)
        return JSON({"success": True})

    @app.post("/models/unload", tags=["models"])
    async def unload_model(request: Request) -> Response:
        """Unload a model as soon as no request uses it; one that is being fetched is left."""
        wish = await _wish(request, service)
        if service.downloads is not None and await service.downloads.cancel(wish):
            return JSON({"success": True})
        name = _named_model(wish, request, service)
        if service.models.status(name).state is UNLOADED:
            raise Failure(400, "invalid_request", "model is not running", "model")
        service.models.unload(name)
        return JSON({"success": True})

    @app.get("/models/sse", tags=["models"])
    async def model_events() -> Response:
        """Changes of models as events, as long as the client listens."""
        _check_on_demand(service)
        return ModelEvents(service)


# -- the list ----------------------------------------------------------------------------


def _adapters(engine: AsyncEngine | None) -> list[str]:
    """The ends of names of a model with an adapter."""
    return [] if engine is None else [f":{info.name}" for info in engine.adapters()]


def _model(
    service: Service, name: str, engine: AsyncEngine | None, suffix: str
) -> dict[str, Any]:
    """A model; of one that is not loaded what is known without it."""
    entry = {
        "id": name + suffix,
        "object": "model",
        "created": service.started,
        "owned_by": "llamacpp" if service.is_llama else "pyllama_raw",
        "aliases": [a for a, n in service.config.aliases.items() if n == name],
        "tags": service.config.tags,
        "root": name,
        "parent": name if suffix else None,
    }
    entry |= _as_of_router(service, name)
    if engine is None:
        texts = {"input_modalities": ["text"], "output_modalities": ["text"]}
        return entry | {"architecture": texts}
    uses = engine.capabilities
    if service.is_router or service.is_behind:
        modalities = {
            "input_modalities": _inputs(engine),
            "output_modalities": ["text"],
        }
        entry["architecture"] = modalities
    return entry | {
        "max_model_len": engine.n_ctx_slot,
        "chat_template": engine.info.chat_template,
        "capabilities": [str(operation) for operation in uses.operations],
        "meta": {
            "n_ctx": engine.n_ctx_slot,
            "n_ctx_train": uses.model.n_ctx_train,
            "n_embd": uses.model.n_embd,
            "n_params": engine.info.n_params,
            "n_vocab": uses.model.n_vocab,
            "size": engine.info.model_bytes,
            "vocab_type": VOCABULARIES.get(
                engine.info.metadata.get("tokenizer.ggml.model", ""), 0
            ),
            "architecture": uses.model.architecture,
        },
    }


def _inputs(engine: AsyncEngine) -> list[str]:
    """Kinds of parts of chats that a model takes."""
    uses = engine.capabilities
    senses = {"image": uses.images, "audio": uses.sounds}
    return ["text", *(sense for sense, has in senses.items() if has)]


async def _cards(service: Service) -> dict[str, list[dict[str, Any]]]:
    """The entries of models in processes, which these tell, by name; none of one that does not."""
    own: dict[str, list[dict[str, Any]]] = {}
    if not service.has_processes:
        return own

    async def tell(name: str, process: ServingProcess) -> None:
        listed = await process.fact("/v1/models")
        if listed is not None:
            common = {"created": service.started, "tags": service.config.tags}
            common |= _as_of_router(service, name)
            own[name] = [card | common for card in listed["data"]]

    async with create_task_group() as group:
        for name, process in service.processes.items():
            group.start_soon(tell, name, process)
    return own


def routes_of_cache(app: FastAPI, service: Service) -> None:
    """Add the endpoints that fetch models and remove them, which llama-server alone has."""
    if not service.is_llama or service.is_behind:
        return

    @app.post("/models", include_in_schema=False)
    async def fetch_model(request: Request) -> Response:
        """Begin to fetch a model; `/models/sse` tells how that goes on."""
        downloads = _downloads_of(service)
        await downloads.begin(_not_empty(await _wish(request, service)))
        return JSON({"success": True})

    @app.delete("/models", include_in_schema=False)
    async def remove_model(model: str = "") -> Response:
        """Remove a model that was fetched."""
        await _downloads_of(service).remove(_not_empty(model))
        return JSON({"success": True})


def _as_of_router(service: Service, name: str) -> dict[str, Any]:
    """What a service that has several models tells of one."""
    if not service.is_router:
        return {}
    source = service.models.source_of(name)
    entry: dict[str, Any] = {"status": status_of(service, name), "source": source}
    return entry | {"can_remove": source == CACHE, "need_download": False}


def _coming(service: Service) -> list[dict[str, Any]]:
    """The models that are being fetched."""
    progress = {} if service.downloads is None else service.downloads.progress()
    common = {"object": "model", "created": service.started, "owned_by": "llamacpp"}
    common |= {"aliases": [], "tags": [], "source": CACHE, "can_remove": True}
    texts = {"input_modalities": ["text"], "output_modalities": ["text"]}
    return [
        {
            "id": name,
            **common,
            "status": {"value": "downloading", "args": [], "progress": files},
            "architecture": texts,
        }
        for name, files in progress.items()
    ]


def status_of(service: Service, name: str) -> dict[str, Any]:
    """Where a model is, in llama-server's words, with what it takes and who waits for it."""
    status = service.models.status(name)
    # A model that leaves is loaded until it has left, as there.
    is_leaving = status.state is ModelState.LEAVING
    entry: dict[str, Any] = {"value": ModelState.LOADED if is_leaving else status.state}
    entry |= {"args": [], "running": status.n_running, "waiting": status.n_waiting}
    entry |= {"pinned": status.is_pinned, "bytes": dict(status.n_bytes)}
    if status.progress is not None:
        entry["progress"] = progress_of(status.progress)
    if status.error is not None:
        entry |= {"failed": True, "exit_code": 1, "error": status.error.code}
    return entry


def progress_of(fraction: float) -> dict[str, Any]:
    """How far a load is, in llama-server's words."""
    stage = "text_model"
    return {"stages": [stage], "current": stage, "value": round(fraction, 3)}


def _listed(name: str, inputs: list[str]) -> dict[str, Any]:
    """A model in the form of Ollama's list, whose other fields llama-server leaves empty, too."""
    sees = len(inputs) > 1
    empty = ("modified_at", "size", "digest", "description", "parameters")
    details = ("parent_model", "family", "parameter_size", "quantization_level")
    return {
        **dict.fromkeys(empty, ""),
        "name": name,
        "model": name,
        "type": "model",
        "tags": [""],
        "capabilities": ["completion", *(["multimodal"] if sees else [])],
        "details": {**dict.fromkeys(details, ""), "format": "gguf", "families": [""]},
    }


# -- changes -----------------------------------------------------------------------------


def _check_on_demand(service: Service) -> None:
    """Raise Failure if all models are there from the beginning to the end."""
    if not service.models.is_dynamic:
        message = "models are loaded at the start: give --on-demand or --models-dir"
        raise Failure(501 if service.is_llama else 400, "unsupported", message)


def _downloads_of(service: Service) -> Downloads:
    """The downloads of a service whose list of models changes. Raises Failure."""
    if service.downloads is None:
        message = "models are fetched where none is named at the start"
        raise Failure(501, "unsupported", message)
    return service.downloads


def _not_empty(name: str) -> str:
    """The *name* of a model. Raises Failure."""
    if not name:
        raise refused("model", "model must be a non-empty string")
    return name


async def _wish(request: Request, service: Service) -> str:
    """The name in the body. Raises Failure."""
    _check_on_demand(service)
    content = (await request.receive())["body"]
    try:
        return ModelBody.model_validate_json(content).model
    except ValidationError:
        raise refused("model", "give the name of a model") from None


def _named_model(wish: str, request: Request, service: Service) -> str:
    """The model that *wish* stands for. Raises Failure."""
    name = service.base_of(wish)
    if name is None:
        status = 404 if request.url.path.endswith("/load") else 400
        raise Failure(status, "model_not_found", "model is not found", "model")
    return name


class ModelEvents(Response):
    """A stream of what becomes of models, which has no end of its own."""

    def __init__(self, service: Service) -> None:
        super().__init__()
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002
        """Return when the client has left, or the service is about to end."""
        events, config = EventStream(send), self._service.config
        await events.write(b": models\n\n")
        if scope["state"]["exchange"].method != "HEAD":
            try:
                async with create_task_group() as group:
                    group.start_soon(events.ping, config.ping_s, config.send_s)
                    await self._write(events)
                    group.cancel_scope.cancel()
            except* TimeoutError:  # nobody reads what is sent
                pass
        await events.end()

    async def _write(self, events: EventStream) -> None:
        """Write each change, and how far loads are, until the service is about to end."""
        service, fractions = self._service, dict[str, float]()
        with service.models.events() as changes:
            while not service.drains:
                change = None
                with move_on_after(LOOK_S):
                    change = await changes.receive()
                if change is not None:
                    await events.write(_event(change))
                for name, fraction in service.models.loading().items():
                    if fraction == fractions.get(name):
                        continue
                    fractions[name] = fraction
                    data = {"status": LOADING, "progress": progress_of(fraction)}
                    await events.write(_frame("model_status", name, data))


def _event(change: ModelEvent) -> bytes:
    """A change in llama-server's words."""
    if change.kind is not None:
        return _frame(change.kind, change.model, change.data)
    if change.state is None:
        return _frame("models_reload", change.model, None)
    data: dict[str, Any] = {"status": change.state}
    if change.state is UNLOADED:
        data["exit_code"] = 0 if change.error is None else 1
    return _frame("model_status", change.model, data)


def _frame(kind: str, model: str, data: Mapping[str, Any] | None) -> bytes:
    fields: dict[str, Any] = {"model": model, "event": kind}
    return event(fields if data is None else fields | {"data": data})
