"""Models and adapters that a client may name: `/v1/models` and `/lora-adapters`."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from urllib.parse import unquote

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from pyllama_raw import AsyncEngine
from pyllama_raw.serve.body import Body, Exact
from pyllama_raw.serve.facts import sees_all
from pyllama_raw.serve.failures import JSON
from pyllama_raw.serve.service import Service


class AdapterBody(Body, Exact):
    """An adapter that is to be loaded."""

    name: str
    """The name that requests give."""
    path: str
    """A GGUF file on the machine of the service."""


def routes(app: FastAPI, service: Service) -> None:
    """Add the endpoints; those that change something need the key of an operator."""

    @app.get("/v1/models", tags=["models"])
    @app.get("/models", include_in_schema=False)
    async def models() -> Response:
        """All models, and each adapter of one as a model `base:adapter`."""
        told = [
            _model(service, name, engine, suffix)
            for name, engine in service.engines.items()
            for suffix in ("", *(f":{each.name}" for each in engine.adapters()))
        ]
        return JSON({"object": "list", "data": told})

    @app.get("/v1/models/{name:path}", tags=["models"])
    async def model(name: str) -> Response:
        """One model."""
        found = service.named(unquote(name))
        suffix = "".join(f":{adapter}" for adapter in found.adapters)
        return JSON(_model(service, found.name, found.engine, suffix))

    @app.get("/lora-adapters", tags=["adapters"])
    async def adapters(request: Request) -> Response:
        """All adapters that requests may name."""
        return JSON(_adapters(service, sees_all=sees_all(request)))

    @app.put("/lora-adapters", tags=["adapters"])
    async def load(body: AdapterBody) -> Response:
        """Load an adapter; one of that name gives way to it."""
        await service.named(body.model).engine.load_adapter(body.name, body.path)
        return JSON(_adapters(service))

    @app.delete("/lora-adapters/{name}", tags=["adapters"])
    async def unload(name: str, model: str | None = None) -> Response:
        """Let no further request have the adapter."""
        await service.named(model).engine.unload_adapter(name)
        return JSON(_adapters(service))


def _model(
    service: Service, name: str, engine: AsyncEngine, suffix: str
) -> dict[str, Any]:
    known = engine.capabilities
    return {
        "id": name + suffix,
        "object": "model",
        "created": service.started,
        "owned_by": "pyllama_raw",
        "root": name,
        "parent": name if suffix else None,
        "max_model_len": engine.n_ctx_slot,
        "chat_template": engine.info.chat_template,
        "capabilities": [str(one) for one in known.operations],
        "meta": {
            "n_ctx_train": known.model.n_ctx_train,
            "n_embd": known.model.n_embd,
            "architecture": known.model.architecture,
        },
    }


def _adapters(service: Service, *, sees_all: bool = True) -> list[dict[str, Any]]:
    """All adapters; without folders and users unless a key *sees_all*."""
    told = [
        {
            "id": index,
            "model": model,
            "name": adapter.name,
            "path": adapter.path if sees_all else Path(adapter.path).name,
            "bytes": adapter.n_bytes,
            "requests": adapter.n_requests if sees_all else None,
        }
        for model, engine in service.engines.items()
        for index, adapter in enumerate(engine.adapters())
    ]
    return [
        {n: value for n, value in each.items() if value is not None} for each in told
    ]
