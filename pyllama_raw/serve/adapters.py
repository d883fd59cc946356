"""`/lora-adapters`: adapters that requests may name, loaded and unloaded while all runs."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter
from pydantic import BaseModel, ConfigDict
from starlette.responses import Response

from pyllama_raw.serve.json import JSON
from pyllama_raw.serve.service import Service


class AdapterBody(BaseModel):
    """An adapter that is to be loaded."""

    model_config = ConfigDict(
        extra="forbid", strict=True, use_attribute_docstrings=True
    )

    model: str | None = None
    """The model that it is for; left out: the first."""
    name: str
    """The name that requests give."""
    path: str
    """A GGUF file on the machine of the service."""


def routes(service: Service) -> APIRouter:
    """Endpoints of adapters; those that change something need the key of an operator."""
    router = APIRouter(tags=["adapters"])

    @router.get("/lora-adapters")
    async def adapters() -> Response:
        """All adapters that requests may name."""
        return JSON(_all(service))

    @router.put("/lora-adapters")
    async def load(body: AdapterBody) -> Response:
        """Load an adapter; one of that name gives way to it."""
        await service.named(body.model).engine.load_adapter(body.name, body.path)
        return JSON(_all(service))

    @router.delete("/lora-adapters/{name}")
    async def unload(name: str, model: str | None = None) -> Response:
        """Let no further request have the adapter."""
        await service.named(model).engine.unload_adapter(name)
        return JSON(_all(service))

    return router


def _all(service: Service) -> list[dict[str, Any]]:
    return [
        {
            "id": index,
            "model": model,
            "name": adapter.name,
            "path": adapter.path,
            "bytes": adapter.n_bytes,
            "requests": adapter.n_requests,
        }
        for model, engine in service.engines.items()
        for index, adapter in enumerate(engine.adapters())
    ]
