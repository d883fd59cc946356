"""`/v1/models`: what a client may name, and what each can do."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

from fastapi import APIRouter
from starlette.responses import Response

from pyllama_raw import AsyncEngine
from pyllama_raw.serve.json import JSON
from pyllama_raw.serve.service import Service


def routes(service: Service) -> APIRouter:
    """Endpoints of models."""
    router = APIRouter(tags=["models"])

    @router.get("/v1/models")
    @router.get("/models", include_in_schema=False)
    async def models() -> Response:
        """All models, and each adapter of one as a model `base:adapter`."""
        return JSON({"object": "list", "data": [*_all(service)]})

    @router.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        """One model."""
        found = service.named(unquote(name))
        suffix = "".join(f":{adapter}" for adapter in found.adapters)
        return JSON(_told(service, found.name, found.engine, suffix))

    return router


def _all(service: Service) -> list[dict[str, Any]]:
    told = []
    for name, engine in service.engines.items():
        told.append(_told(service, name, engine))
        told += [
            _told(service, name, engine, f":{adapter.name}")
            for adapter in engine.adapters()
        ]
    return told


def _told(
    service: Service, name: str, engine: AsyncEngine, suffix: str = ""
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
        "capabilities": [str(one) for one in known.operations],
        "meta": {
            "n_ctx_train": known.model.n_ctx_train,
            "n_embd": known.model.n_embd,
            "architecture": known.model.architecture,
        },
    }
