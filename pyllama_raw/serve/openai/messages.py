"""
Messages of a chat, and the images and sounds in them.

Rules:
1. Data is decoded here, so an engine gets bytes and each mistake has its place in the body.
2. Nothing is fetched unless the service is told to.
"""

from __future__ import annotations

from base64 import b64decode
from binascii import Error
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Required

from anyio import CancelScope, current_time, to_thread
from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from pyllama_raw import AsyncEngine
from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.failures import Failure
from pyllama_raw.serve.fetch import fetch

TEXTS = ("text", "refusal")
MEDIA = {"image_url": "image", "input_audio": "audio"}  # and their names in the engine


class ContentPart(TypedDict, total=False):
    """A part of a message: a text, an image or a sound."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    type: Required[str]
    text: str
    image_url: str | dict[str, Any]
    input_audio: dict[str, Any]


class ChatMessage(TypedDict, total=False):
    """A message; further fields reach the template."""

    __pydantic_config__ = ConfigDict(extra="allow")  # type: ignore[misc]

    role: Required[str]
    content: str | Annotated[list[ContentPart], Field(fail_fast=True)] | None


async def take_media(
    messages: Sequence[ChatMessage], engine: AsyncEngine, config: ServeConfig
) -> list[str]:
    """
    Put bytes in place of addresses and of data in base64; the places that have them.

    Raises:
        Failure: a part is not known, or cannot be read.
    """
    found = list(_media_of(messages))
    if not found:
        return []
    limits = engine.info.config.media
    if limits.mmproj is None:
        reason = "the model has no projector, so it takes texts only"
        raise Failure(400, "unsupported", reason, found[0][0])
    if len(found) > limits.max_parts:
        reason = f"{len(found)} images and sounds: {limits.max_parts} are allowed"
        raise _wrong(found[limits.max_parts][0], reason)
    deadline = current_time() + config.fetch_s
    for place, part in found:
        kind = MEDIA[part["type"]]
        with CancelScope(deadline=deadline) as scope:
            data = await _content(place, part, limits.max_upload_bytes, config)
        if scope.cancelled_caught:
            raise _wrong(place, f"not here after {config.fetch_s} s")
        part.clear()
        part |= {"type": kind, kind: data}
    return [place for place, _ in found]


def _media_of(messages: Sequence[ChatMessage]) -> Iterator[tuple[str, Any]]:
    """Parts that are images and sounds, each with its place. Raises Failure."""
    for i, message in enumerate(messages):
        content = message.get("content")
        for j, part in enumerate(content if isinstance(content, list) else ()):
            place = f"messages[{i}].content[{j}]"
            if part["type"] in MEDIA:
                yield place, part
            elif part["type"] not in TEXTS:
                allowed = f"parts of the types {', '.join((*TEXTS, *MEDIA))}"
                raise _wrong(place, f"{allowed} are taken, not {part['type'][:99]!r}")


async def _content(place: str, part: Any, most: int, config: ServeConfig) -> bytes:
    """The bytes of an image or a sound."""
    given = part.get(part["type"])
    name = "data" if part["type"] == "input_audio" else "url"
    data = given.get(name) if isinstance(given, dict) else given
    if not isinstance(data, str):
        raise _wrong(place, f"a part of this type needs {part['type']}.{name}")
    if name == "url":
        scheme, _, rest = data.partition(":")
        if scheme.lower() in ("http", "https"):
            if not config.fetch_media:
                reason = "nothing is fetched here: give a data URL"
                raise Failure(400, "unsupported", reason, place)
            return await fetch(data, place, most)
        head, comma, data = rest.partition(",")
        if scheme.lower() != "data" or not comma or not head.endswith(";base64"):
            raise _wrong(place, "give a data URL: data:image/png;base64,...")
    n_bytes = len(data) * 3 // 4
    if n_bytes > most + 2:
        raise _wrong(place, f"{n_bytes} bytes: at most {most} are allowed")
    try:
        return await to_thread.run_sync(_decode, data)
    except (Error, ValueError) as error:
        raise _wrong(place, f"this is no base64: {error}") from error


def _decode(data: str) -> bytes:
    return b64decode(data, validate=True)


def _wrong(place: str, reason: str) -> Failure:
    return Failure(400, "invalid_request", f"{place}: {reason}", place)
