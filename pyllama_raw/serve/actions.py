"""
Changes of a running service: its adapters and their scales, and what its slots keep.

Without llama-server's place to take, all of them need the key of an operator. In its place its own
are open to each client, as there. What llama-server has and this service has not is named here, too.
"""

from __future__ import annotations

from typing import Literal

from anyio import move_on_after, sleep
from fastapi import FastAPI
from pydantic import TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from pyllama_raw import PyllamaError
from pyllama_raw.runners.errors import as_json
from pyllama_raw.serve.body import Body, Exact, LoraScale
from pyllama_raw.serve.facts import adapters_of
from pyllama_raw.serve.failures import JSON, Failure, refused
from pyllama_raw.serve.service import Service

COUNTS_S, LOOK_S = 1.0, 0.02  # for a request that was left to end
SCALES = TypeAdapter(list[LoraScale])
NOT_HERE = (  # endpoints of llama-server that are not done here
    *("/v1/audio/transcriptions", "/audio/transcriptions", "/tools", "/cors-proxy"),
    *("/models", "/v1/chat/completions/control", "/v1/streams/lookup", "/v1/stream"),
)


class AdapterBody(Body, Exact):
    """An adapter that is to be loaded."""

    name: str
    """The name that requests give."""
    path: str
    """A GGUF file on the machine of the service."""


def routes(app: FastAPI, service: Service) -> None:
    """Add the endpoints."""

    @app.put("/lora-adapters", tags=["adapters"])
    async def load(body: AdapterBody) -> Response:
        """Load an adapter; one of that name gives way to it."""
        await service.named(body.model).engine.load_adapter(body.name, body.path)
        return JSON(adapters_of(service))

    @app.delete("/lora-adapters/{name}", tags=["adapters"])
    async def unload(name: str, model: str | None = None) -> Response:
        """Let no further request have the adapter."""
        await service.named(model).engine.unload_adapter(name)
        return JSON(adapters_of(service))

    @app.post("/lora-adapters", include_in_schema=False)
    async def scale(request: Request) -> Response:
        """Set the scales that adapters have in requests that name none; others are off."""
        scales = _scales((await request.receive())["body"])
        name, engine, _ = service.named(None)
        adapters = [info.name for info in engine.adapters()]
        if any(lora.id >= len(adapters) for lora in scales):
            reason = f"each id is that of an adapter, and there are {len(adapters)}"
            raise refused("id", reason)
        service.scales[name] = {adapters[lora.id]: lora.scale for lora in scales}
        return JSON({"success": True})

    @app.post("/slots/{slot}", include_in_schema=False)
    async def act(slot: str, action: str = "", model: str | None = None) -> Response:
        """Free what is kept for later requests. Slots have no files."""
        engine = service.named(model).engine
        if not slot.isdecimal() or int(slot) >= engine.info.n_slots:
            raise refused("id_slot", f"give one below {engine.info.n_slots}")
        if action in ("save", "restore"):
            reason = "slots have no files: --slot-save-path keeps prefixes by itself"
            raise Failure(501, "unsupported", f"action={action}: {reason}", "action")
        if action != "erase":
            raise refused("action", "give erase, save or restore")
        n_used = engine.stats().n_cells_used
        await engine.clear_cache()
        n_erased = n_used - sum(running.n_computed for running in await engine.slots())
        return JSON({"id_slot": int(slot), "n_erased": max(n_erased, 0)})

    if service.is_behind:
        _add_commands(app, service)
    if not service.is_llama:
        return

    @app.post("/props", include_in_schema=False)
    async def change() -> Response:
        """Change nothing, as llama-server does."""
        if "props" in service.config.closed:
            message = "no properties are changed here: start the service with --props"
            raise Failure(501, "unsupported", message)
        return JSON({"success": True})

    for path in NOT_HERE:
        app.add_api_route(
            path, _not_here, methods=["GET", "POST", "DELETE"], include_in_schema=False
        )


def _add_commands(app: FastAPI, service: Service) -> None:
    """Add what a service in front has a process do, and asks it."""

    @app.post("/process/{verb}", include_in_schema=False)
    async def command(verb: Literal["sleep", "wake"]) -> Response:
        """Have the engine sleep or go on."""
        [engine] = service.engines.values()
        try:
            await (engine.sleep(2) if verb == "sleep" else engine.wake())
        except PyllamaError as error:
            return JSON({"failure": as_json(error)}, 500)
        return JSON({})

    @app.get("/process/exchanges/{number}", include_in_schema=False)
    async def counts(number: str) -> Response:
        """Tokens of the prompt, cached and of the output of a request, once it has ended."""
        with move_on_after(COUNTS_S):
            while number not in service.ended_counts:  # noqa: ASYNC110 - its client may have left
                await sleep(LOOK_S)
        return JSON(service.ended_counts.pop(number, None))


async def _not_here(request: Request) -> Response:
    """Refuse what llama-server has and this service has not."""
    message = f"{request.url.path}: this is not done here"
    raise Failure(501, "unsupported", message)


def _scales(body: bytes) -> list[LoraScale]:
    """The scales in *body*. Raises Failure."""
    try:
        return SCALES.validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"give a list of objects with id and scale ({first['msg']})"
        raise refused("body", reason) from None
