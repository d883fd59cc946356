"""
Changes of a running service: its adapters and their scales, and what its slots keep.

Without llama-server's place to take, all of them need the key of an operator. In its place its own
are open to each client, as there. What llama-server has and this service has not is named here, too.
"""

from __future__ import annotations

import os
import re
from contextlib import suppress
from errno import EACCES, EDQUOT, ENOSPC, EPERM, EROFS
from pathlib import Path
from typing import Any, Literal

from anyio import Lock, move_on_after, sleep, to_thread
from fastapi import FastAPI
from pydantic import BaseModel, TypeAdapter, ValidationError
from starlette.requests import Request
from starlette.responses import Response

from pyllama_raw import AsyncEngine, PyllamaError
from pyllama_raw.errors import InvalidRequest
from pyllama_raw.results import Operation
from pyllama_raw.runners.errors import as_json
from pyllama_raw.serve.body import Body, Exact, LoraScale
from pyllama_raw.serve.facts import adapters_of
from pyllama_raw.serve.failures import JSON, Failure, refused
from pyllama_raw.serve.service import Service

COUNTS_S, LOOK_S = 1.0, 0.02  # for a request that was left to end
FILE_NAME = re.compile(r"[^\x00-\x20\x7f/\\:*?\"<>|.][^\x00-\x1f\x7f/\\:*?\"<>|]*")
MAX_NAME_BYTES = 255
OWN = "of-"  # begins the name of the folder of a key's own files
MAX_DIGITS = 9  # of the number of a slot
UNWRITABLE = (EACCES, EPERM, EROFS)  # faults of the folder, which no other name mends
SCALES = TypeAdapter(list[LoraScale])
NOT_HERE = (  # endpoints of llama-server that are not done here
    *("/v1/audio/transcriptions", "/audio/transcriptions", "/tools", "/cors-proxy"),
    *("/v1/chat/completions/control", "/v1/streams/lookup", "/v1/stream"),
)


class FileBody(BaseModel):
    """A file of a slot; other fields change nothing."""

    filename: str
    """Its name in the folder of such files."""


class AdapterBody(Body, Exact):
    """An adapter that is to be loaded."""

    name: str
    """The name that requests give."""
    path: str
    """A GGUF file on the machine of the service."""


def routes(app: FastAPI, service: Service) -> None:
    """Add the endpoints."""
    # A move holds a whole state in memory, and the next one has to see the file that it writes.
    turn = Lock()

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
    async def act(
        request: Request, slot: str, action: str = "", model: str | None = None
    ) -> Response:
        """Free what is kept for later requests, or move what a slot holds to a file and back."""
        if action in ("save", "restore"):
            # What is not in memory has no slots.
            await service.admit(request.state.exchange, model, Operation.GENERATE)
        engine = service.named(model).engine
        # Python reads no number of thousands of digits.
        is_number = slot.isdecimal() and len(slot) <= MAX_DIGITS
        if not is_number or int(slot) >= engine.info.n_slots:
            raise refused("id_slot", f"give one below {engine.info.n_slots}")
        if action in ("save", "restore"):
            async with turn:
                return JSON(await _moved(service, request, engine, int(slot), action))
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


def folder_of(base: Path, request: Request) -> Path:
    """
    The folder of files of slots that are those of who sends *request*.

    Keys that see all share one, as all do without keys. Another key has its own, so that it can
    neither read nor replace what others have saved.
    """
    key = request.state.exchange.key
    return base if key is None or key.sees_all else base / f"{OWN}{key.salt(None)}"


async def _moved(
    service: Service, request: Request, engine: AsyncEngine, slot: int, action: str
) -> dict[str, Any]:
    """Save or restore a slot; the answer is in llama-server's words. Raises Failure."""
    if service.config.slot_save_path is None:
        reason = "start the service with --slot-save-path"
        raise Failure(501, "unsupported", f"action={action}: {reason}", "action")
    base = Path(service.config.slot_save_path)
    folder = folder_of(base, request)
    content = (await request.receive())["body"]
    try:
        name = FileBody.model_validate_json(content).filename
    except ValidationError:
        raise refused("filename", "give the name of a file") from None
    is_name = FILE_NAME.fullmatch(name) and ".." not in name and name[-1] not in ". "
    if not is_name or len(os.fsencode(name)) > MAX_NAME_BYTES:
        raise refused("filename", "Invalid filename: give a name without a folder")
    path = folder / name
    try:
        if action == "save":
            await to_thread.run_sync(_check_folder, base, folder, engine)
            file = await engine.save_slot(slot, path)
        else:
            file = await engine.restore_slot(slot, path)
    except InvalidRequest as error:
        if action == "save" and isinstance(error.__cause__, OSError):
            _check_written(error.__cause__)
        param = {"slot": "id_slot", "path": "filename"}.get(error.name, error.name)
        raise refused(param, f"give {error.allowed}") from error
    verb, moved, took = {
        "save": ("n_saved", "n_written", "save_ms"),
        "restore": ("n_restored", "n_read", "restore_ms"),
    }[action]
    counts = {verb: file.n_tokens, moved: file.n_bytes}
    times = {took: round(file.seconds * 1000, 3)}
    return {"id_slot": slot, "filename": name, **counts, "timings": times}


def _check_folder(base: Path, folder: Path, engine: AsyncEngine) -> None:
    """Raise Failure if files of slots, of all keys, take as much as files of prefixes may."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        n_bytes = 0
        for place in (base, *base.glob(f"{OWN}*/")):
            for entry in os.scandir(place):
                # Another process may delete one meanwhile.
                with suppress(FileNotFoundError):
                    n_bytes += entry.stat().st_size if entry.is_file() else 0
    except OSError as error:
        raise _unusable(error) from error
    limit = engine.info.config.cache.max_disk_bytes
    if n_bytes >= limit:
        reason = f"files of slots take {n_bytes} bytes, and may take {limit} (max_disk_bytes)"
        raise Failure(507, "disk_full", f"{reason}: delete some")


def _check_written(error: OSError) -> None:
    """Raise Failure if a file was not written for a reason that is none of the client."""
    if error.errno in (ENOSPC, EDQUOT):
        reason = f"the file was not written ({error.strerror}): delete some"
        raise Failure(507, "disk_full", reason) from error
    if error.errno in UNWRITABLE:
        raise _unusable(error) from error


def _unusable(error: OSError) -> Failure:
    reason = f"the folder of slots cannot be used ({error.strerror})"
    return Failure(500, "internal_error", reason)


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
