"""
Messages of a chat, and the images and sounds in them.

Rules:
1. Data is decoded here, so an engine gets bytes and each mistake has its place in the body.
   Of many parts each few let others go on.
2. Nothing is fetched unless the service is told to.
"""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Required
from urllib.parse import unquote

from anyio import CancelScope, current_time, to_thread
from anyio.lowlevel import checkpoint
from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from pyllama_raw import AsyncEngine
from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.failures import Failure, refused
from pyllama_raw.serve.fetch import fetch

REFUSAL = "refusal"  # a text in a field of its own; templates print texts only
TEXTS = ("text", REFUSAL)
MANY_PARTS = 64  # that are taken in one go: an event loop waits for it
MEDIA = {  # the engine's name of a part, and where its data is
    "image_url": ("image", "url"),
    "input_audio": ("audio", "data"),
}


class ContentPart(TypedDict, total=False):
    """A part of a message, with its content in a field that is named by the type."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    type: Required[str]


class ChatMessage(TypedDict, total=False):
    """A message; further fields reach the template."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    role: Required[str]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None


async def take_media(
    messages: Sequence[ChatMessage],
    places: Mapping[tuple[int, int], str],
    stand_in: Callable[[object, Any], str],
    engine: AsyncEngine,
    config: ServeConfig,
) -> tuple[list[str], list[dict[str, Any] | None]]:
    """
    Put bytes in place of addresses and of data in base64, and texts in place of refusals.

    A part of the history that is not known or cannot be read becomes a short text.

    Args:
        places: of parts in the body, by message and part; that in *messages* if it is not there.
        stand_in: makes the short text of the kind of a part, and the part.

    Returns:
        The places of what was taken, and for each its part, if it is of the history.

    Raises:
        Failure: such a part is in what the user says now.
    """
    taken: list[str] = []
    old: list[dict[str, Any] | None] = []
    deadline = current_time() + config.fetch_s
    for n_parts, (place, part, is_new) in enumerate(_parts_of(messages, places), 1):
        if n_parts % MANY_PARTS == 0:
            await checkpoint()
        if part["type"] == REFUSAL and isinstance(text := part.get(REFUSAL), str):
            part.clear()
            part |= {"type": "text", "text": text}
            continue
        kind, _ = MEDIA.get(part["type"], ("", ""))
        try:
            with CancelScope(deadline=deadline) as scope:
                data = await _data(place, part, len(taken), engine, config)
            if scope.cancelled_caught:
                raise refused(place, f"it is not here after {config.fetch_s} s")
        except Failure:
            if is_new:
                raise
            text = stand_in(kind or part["type"], part)
            part.clear()
            part |= {"type": "text", "text": text}
            continue
        part.clear()
        part |= {"type": kind, kind: data}
        taken.append(place)
        old.append(None if is_new else part)
    return taken, old


def _parts_of(
    messages: Sequence[ChatMessage], places: Mapping[tuple[int, int], str]
) -> Iterator[tuple[str, Any, bool]]:
    """Parts that are no text, each with its place, and whether the user says it now."""
    roles = [message["role"] for message in messages]
    n_old = len(roles) - roles[::-1].index("assistant") if "assistant" in roles else 0
    for i, message in enumerate(messages):
        content = message.get("content")
        is_new = i >= n_old and message["role"] == "user"
        for j, part in enumerate(content if isinstance(content, list) else ()):
            if part["type"] != "text":
                place = places.get((i, j), f"messages[{i}].content[{j}]")
                yield place, part, is_new


async def _data(
    place: str, part: Any, n_taken: int, engine: AsyncEngine, config: ServeConfig
) -> bytes:
    """The bytes of an image or a sound, behind *n_taken* others. Raises Failure."""
    if part["type"] not in MEDIA:
        raise refused(place, f"give one of {', '.join((*TEXTS, *MEDIA))}")
    limits = engine.info.config.media
    most = limits.max_upload_bytes
    if limits.mmproj is None:
        raise refused(place, "the model takes texts only", "unsupported")
    if n_taken >= limits.max_parts:
        raise refused(place, f"{limits.max_parts} images and sounds are allowed")
    given, (_, name) = part.get(part["type"]), MEDIA[part["type"]]
    data = given.get(name) if isinstance(given, dict) else given
    if not isinstance(data, str):
        raise refused(place, f"a part of this type needs {part['type']}.{name}")
    if name == "url":
        scheme, _, rest = data.partition(":")
        if scheme in ("http", "https") and config.fetch_media:
            return await fetch(data, place, most)
        if scheme == "file" and config.media_path is not None:
            named = partial(_local, place, rest, Path(config.media_path), most)
            return await to_thread.run_sync(named)
        head, _, data = rest.partition(",")
        if scheme != "data" or not head.endswith(";base64"):
            reason = "nothing else is read: give a data URL, data:image/png;base64,..."
            raise refused(place, reason, "unsupported")
    if len(data) * 3 // 4 > most + 2:
        raise refused(place, f"at most {most} bytes are allowed")
    try:
        return await to_thread.run_sync(partial(b64decode, data, validate=True))
    except ValueError as error:
        raise refused(place, f"this is no base64: {error}") from error


def _local(place: str, name: str, folder: Path, most: int) -> bytes:
    """The file *name* in *folder*, or below. Raises Failure."""
    with suppress(OSError, ValueError, RuntimeError):  # what names can lead to
        root = folder.resolve()
        path = (root / unquote(name).lstrip("/")).resolve()
        if path.is_relative_to(root) and path.is_file():
            if path.stat().st_size > most:
                raise refused(place, f"at most {most} bytes are allowed")
            return path.read_bytes()
    raise refused(place, "there is no such file for requests", "no_such_file")
