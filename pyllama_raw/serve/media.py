"""
Images and sounds of chats and raw prompts: the bytes that addresses, files and data in base64 stand for.

Rules:
1. Data is decoded here, so an engine gets bytes and each mistake has its place in the body.
   Of many parts each few let others go on.
2. Nothing is fetched, and no file is read, unless the service is told to.
3. Only public hosts are reached: addresses are looked at after a name is resolved, and the
   connection goes to what was looked at. So a service is no way into its own network.
4. Bytes and redirects are bounded, and so is the time of all fetches of a request.
5. A failure does not tell whether there is such a name inside, or which ports are open: one
   sentence stands for all that goes wrong before an answer.
"""

from __future__ import annotations

import os
from base64 import b64decode
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import SplitResult, unquote, urljoin, urlsplit

import h11
from anyio import (
    BrokenResourceError,
    CancelScope,
    EndOfStream,
    connect_tcp,
    current_time,
    getaddrinfo,
    to_thread,
)
from anyio.abc import ByteStream
from anyio.lowlevel import checkpoint

from pyllama_raw import AsyncEngine, Audio, Image
from pyllama_raw.errors import BadMedia
from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.failures import Failure, refused

REFUSAL = "refusal"  # a text in a field of its own; templates print texts only
TEXTS = ("text", REFUSAL)
MANY_PARTS = 64  # that are taken in one go: an event loop waits for it
MEDIA = {  # the engine's name of a part, and where its data is
    "image_url": ("image", "url"),
    "input_audio": ("audio", "data"),
}
# Stands in a raw prompt for each image and sound; llama-server reads the same variable.
MARKER = os.environ.get("LLAMA_MEDIA_MARKER") or "<__media__>"
SOUNDS = (
    b"fLaC",
    b"OggS",
    b"ID3",
)  # files of these begin so; WAVE and MP3 are told apart

MAX_REDIRECTS = 3
PORTS = {"http": 80, "https": 443}
UNREACHED = "no public host gives it"
# Hosts of IPv6 that everybody can reach have addresses of this network, but for some of it:
# protocols and Teredo, documentation, and 6to4, which gateways turn into any address of IPv4.
# Outside of it are loopback, site-local and unique local addresses, NAT64 and all forms of IPv4.
GLOBAL_6 = ip_network("2000::/3")
OTHERS_6 = ("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")
# Networks of IPv4 that are private, shared, of protocols, documentation, tests or nobody.
OTHERS_4 = (
    *("0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16"),
    *("172.16.0.0/12", "192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24"),
    *("192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16", "192.175.48.0/24"),
    *("198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3"),
)
OTHERS = [ip_network(network) for network in (*OTHERS_4, *OTHERS_6)]

Address = IPv4Address | IPv6Address
MayReach = Callable[[Address], bool]


class ChatMedium(NamedTuple):
    """A part of a message that is no text."""

    part: Any
    place: str  # in the body
    is_new: bool  # the user says it now


async def take_media(
    parts: Sequence[ChatMedium],
    stand_in: Callable[[object, Any], str],
    engine: AsyncEngine,
    config: ServeConfig,
) -> list[ChatMedium]:
    """
    Put bytes in place of addresses and of data in base64, and texts in place of refusals.

    A part of the history that is not known or cannot be read becomes a short text.

    Args:
        stand_in: makes the short text of the kind of a part, and the part.

    Returns:
        The parts that have bytes now.

    Raises:
        Failure: a part that cannot be read is in what the user says now.
    """
    media: list[ChatMedium] = []
    deadline = current_time() + config.fetch_s
    for n_parts, medium in enumerate(parts, 1):
        part, place, is_new = medium
        if n_parts % MANY_PARTS == 0:
            await checkpoint()
        # A refusal is a text.
        if part["type"] == REFUSAL and isinstance(text := part.get(REFUSAL), str):
            part.clear()
            part |= {"type": "text", "text": text}
            continue
        kind, _ = MEDIA.get(part["type"], ("", ""))
        try:
            with CancelScope(deadline=deadline) as scope:
                data = await _data(place, part, len(media), engine, config)
            if scope.cancelled_caught:
                raise refused(place, f"it is not here after {config.fetch_s} s")
        except Failure:
            # Clients send their history with each request, so that is never refused.
            if is_new:
                raise
            text = stand_in(kind or part["type"], part)
            part.clear()
            part |= {"type": "text", "text": text}
            continue
        part.clear()
        part |= {"type": kind, kind: data}
        media.append(medium)
    return media


async def _data(
    place: str, part: Any, n_taken: int, engine: AsyncEngine, config: ServeConfig
) -> bytes:
    """The bytes of an image or a sound, behind *n_taken* others. Raises Failure."""
    if part["type"] not in MEDIA:
        raise refused(place, f"give one of {', '.join((*TEXTS, *MEDIA))}")
    limits = engine.info.config.media
    max_bytes = limits.max_upload_bytes
    if limits.mmproj is None:
        raise refused(place, "the model takes texts only", "unsupported")
    if n_taken >= limits.max_parts:
        raise refused(place, f"{limits.max_parts} images and sounds are allowed")
    value, (_, name) = part.get(part["type"]), MEDIA[part["type"]]
    data = value.get(name) if isinstance(value, dict) else value
    if not isinstance(data, str):
        raise refused(place, f"a part of this type needs {part['type']}.{name}")
    if name == "url":
        scheme, _, address = data.partition(":")
        if scheme in ("http", "https") and config.fetch_media:
            return await fetch(data, place, max_bytes)
        if scheme == "file" and config.media_path is not None:
            folder = Path(config.media_path)
            read = partial(_local, place, address, folder, max_bytes)
            return await to_thread.run_sync(read)
        head, _, data = address.partition(",")
        if scheme != "data" or not head.endswith(";base64"):
            reason = "nothing else is read: give a data URL, data:image/png;base64,..."
            raise refused(place, reason, "unsupported")
    return await _decoded(place, data, max_bytes)


async def raw_parts(
    text: str, data: Sequence[str], place: str, engine: AsyncEngine
) -> list[str | Image | Audio]:
    """
    The pieces of *text* around its markers, with images and sounds in their places.

    Args:
        data: in base64, in the order of the markers; the bytes tell an image from a sound.

    Raises:
        Failure: names *place*; there are not as many as markers, or one cannot be read.
    """
    limits = engine.info.config.media
    if limits.mmproj is None:
        raise refused(place, "the model takes texts only", "unsupported")
    pieces = text.split(MARKER)
    if len(pieces) - 1 != len(data):
        reason = (
            f"{len(data)} are here, and the text has {len(pieces) - 1} times {MARKER}"
        )
        raise refused(place, reason)
    if len(data) > limits.max_parts:
        raise refused(place, f"{limits.max_parts} images and sounds are allowed")
    parts: list[str | Image | Audio] = [pieces[0]]
    for index, (value, piece) in enumerate(zip(data, pieces[1:], strict=True)):
        at = f"{place}[{index}]"
        content = await _decoded(at, value, limits.max_upload_bytes)
        is_wave = content[:4] == b"RIFF" and content[8:12] == b"WAVE"
        is_mp3 = content[:1] == b"\xff" and content[1:2] >= b"\xe0"
        is_sound = is_wave or is_mp3 or content.startswith(SOUNDS)
        kind: type[Audio | Image] = Audio if is_sound else Image
        try:
            # To know how long an MP3 is, all of its frames are read.
            parts += [await to_thread.run_sync(kind, content), piece]
        except BadMedia as error:
            raise refused(at, error.reason, error.code) from error
    return [part for part in parts if part != ""]


async def _decoded(place: str, data: str, max_bytes: int) -> bytes:
    """The bytes of *data* in base64. Raises Failure."""
    if len(data) * 3 // 4 > max_bytes + 2:
        raise refused(place, f"at most {max_bytes} bytes are allowed")
    try:
        return await to_thread.run_sync(partial(b64decode, data, validate=True))
    except ValueError as error:
        raise refused(place, f"this is no base64: {error}") from error


def _local(place: str, name: str, folder: Path, max_bytes: int) -> bytes:
    """The file *name* in *folder*, or below. Raises Failure."""
    with suppress(OSError, ValueError, RuntimeError):  # what names can lead to
        root = folder.resolve()
        path = (root / unquote(name).lstrip("/")).resolve()
        if path.is_relative_to(root) and path.is_file():
            if path.stat().st_size > max_bytes:
                raise refused(place, f"at most {max_bytes} bytes are allowed")
            return path.read_bytes()
    raise refused(place, "there is no such file for requests", "no_such_file")


# -- addresses ---------------------------------------------------------------------------


def is_public(address: Address) -> bool:
    """Whether everybody can reach *address*."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if isinstance(address, IPv6Address) and address not in GLOBAL_6:
        return False
    return not any(address in network for network in OTHERS)


async def fetch(
    url: str, place: str, max_bytes: int, may_reach: MayReach = is_public
) -> bytes:
    """The content at *url*. Raises Failure, which names *place* as the field at fault."""
    reason = UNREACHED
    try:
        for _ in range(MAX_REDIRECTS + 1):
            answer, content = await _get(urlsplit(url), max_bytes, may_reach)
            if answer.status_code == 200:
                return content
            reason = f"the host answers {answer.status_code}"
            url = urljoin(url, dict(answer.headers)[b"location"].decode())
    except KeyError:
        pass
    except _Refused as error:
        reason = str(error)
    except (ValueError, OSError, h11.ProtocolError, BrokenResourceError):
        reason = UNREACHED
    raise refused(place, reason, "media_not_fetched")


class _Refused(Exception):
    """A mistake that tells nothing of a host."""


async def _get(
    at: SplitResult, max_bytes: int, may_reach: MayReach
) -> tuple[h11.Response, bytes]:
    """Raises _Refused, ValueError and what connections do."""
    target = (at.path or "/") + (f"?{at.query}" if at.query else "")
    host = at.netloc.rpartition("@")[2]
    headers = [("Host", host), ("Accept", "*/*"), ("Connection", "close")]
    request = h11.Request(method="GET", target=target, headers=headers)
    connection = h11.Connection(h11.CLIENT)
    answer, content = None, bytearray()
    async with await _connect(at, may_reach) as stream:
        await stream.send(connection.send(request) or b"")
        connection.send(h11.EndOfMessage())
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                connection.receive_data(await _received(stream))
            elif isinstance(event, h11.Response):
                answer = event
            elif isinstance(event, h11.Data):
                content += event.data
                if len(content) > max_bytes:
                    raise _Refused(f"it has more than {max_bytes} bytes")
    assert answer is not None
    return answer, bytes(content)


async def _received(stream: ByteStream) -> bytes:
    try:
        return await stream.receive()
    except EndOfStream:
        return b""


async def _connect(at: SplitResult, may_reach: MayReach) -> ByteStream:
    name, port = at.hostname, at.port or PORTS.get(at.scheme)
    if at.scheme not in PORTS or not name or not port:
        raise _Refused("addresses of http and https are fetched")
    entries = await getaddrinfo(name, port)
    addresses = [ip_address(str(entry[-1][0]).partition("%")[0]) for entry in entries]
    if not all(map(may_reach, addresses)):
        raise ValueError(UNREACHED)
    if at.scheme == "http":
        return await connect_tcp(addresses[0], port)
    return await connect_tcp(addresses[0], port, tls=True, tls_hostname=name)
