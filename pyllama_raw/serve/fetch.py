"""
Images that a request names by an address.

Rules:
1. Only public hosts are reached: addresses are looked at after a name is resolved, and the
   connection goes to what was looked at. So a service is no way into its own network.
2. Bytes and redirects are bounded here; the caller bounds the time.
"""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from urllib.parse import SplitResult, urljoin, urlsplit

import h11
from anyio import BrokenResourceError, EndOfStream, connect_tcp, getaddrinfo
from anyio.abc import ByteStream

from pyllama_raw.serve.failures import Failure

MAX_REDIRECTS = 3
PORTS = {"http": 80, "https": 443}
# Addresses that gateways turn into any other one: NAT64, Teredo and 6to4.
WRAPPED = [ip_network(net) for net in ("64:ff9b::/32", "2001::/32", "2002::/16")]

Address = IPv4Address | IPv6Address


def is_public(address: Address) -> bool:
    """Whether everybody can reach *address*."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_multicast or any(address in net for net in WRAPPED):
        return False
    return address.is_global


async def fetch(
    url: str,
    place: str,
    max_bytes: int,
    may_reach: Callable[[Address], bool] = is_public,
) -> bytes:
    """
    What is at *url*.

    Args:
        place: the field that names it.

    Raises:
        Failure: it cannot be had.
    """
    try:
        for _ in range(MAX_REDIRECTS + 1):
            found = await _get(url, max_bytes, may_reach)
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        reason = f"more than {MAX_REDIRECTS} redirects"
    except (ValueError, OSError, h11.ProtocolError) as error:
        reason = str(error)
    except BrokenResourceError:
        reason = "the connection broke"
    raise Failure(400, "media_not_fetched", f"{place}: {reason}", place)


async def _get(
    url: str, max_bytes: int, may_reach: Callable[[Address], bool]
) -> bytes | str:
    """The content, or where it is instead. Raises ValueError and what connections do."""
    at = urlsplit(url)
    if at.scheme not in PORTS or not at.hostname:
        raise ValueError("addresses of http and https are fetched")
    async with await _connect(at, at.hostname, may_reach) as stream:
        connection = h11.Connection(h11.CLIENT)
        await stream.send(connection.send(_request(at)) or b"")
        await stream.send(connection.send(h11.EndOfMessage()) or b"")
        content = bytearray()
        while True:
            match await _next(connection, stream):
                case h11.Response() as answer:
                    if location := dict(answer.headers).get(b"location"):
                        return location.decode()
                    _check(answer)
                case h11.Data(data=data):
                    content += data
                    if len(content) > max_bytes:
                        raise ValueError(f"more than {max_bytes} bytes")
                case h11.EndOfMessage():
                    return bytes(content)


def _check(answer: h11.Response) -> None:
    if answer.status_code != 200:
        raise ValueError(f"the host answers {answer.status_code}")


async def _connect(
    at: SplitResult, name: str, may_reach: Callable[[Address], bool]
) -> ByteStream:
    port = at.port or PORTS[at.scheme]
    found = await getaddrinfo(name, port)
    addresses = [ip_address(str(each[-1][0]).partition("%")[0]) for each in found]
    if not all(map(may_reach, addresses)):
        raise ValueError(f"{name} is no public host")
    if at.scheme == "http":
        return await connect_tcp(addresses[0], port)
    return await connect_tcp(addresses[0], port, tls=True, tls_hostname=name)


async def _next(connection: h11.Connection, stream: ByteStream) -> object:
    while (event := connection.next_event()) is h11.NEED_DATA:
        try:
            connection.receive_data(await stream.receive())
        except EndOfStream:
            connection.receive_data(b"")
    return event


def _request(at: SplitResult) -> h11.Request:
    target = (at.path or "/") + (f"?{at.query}" if at.query else "")
    host = at.netloc.rpartition("@")[2]
    headers = [("Host", host), ("Accept", "*/*"), ("Connection", "close")]
    return h11.Request(method="GET", target=target, headers=headers)
