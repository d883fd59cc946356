"""
Images and sounds that a request names by an address.

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

from pyllama_raw.serve.failures import refused

MAX_REDIRECTS = 3
PORTS = {"http": 80, "https": 443}
# Addresses that gateways turn into any other one: NAT64, Teredo and 6to4.
WRAPPED = [ip_network(net) for net in ("64:ff9b::/32", "2001::/32", "2002::/16")]

Address = IPv4Address | IPv6Address
MayReach = Callable[[Address], bool]


def is_public(address: Address) -> bool:
    """Whether everybody can reach *address*."""
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if address.is_multicast or any(address in net for net in WRAPPED):
        return False
    return address.is_global


async def fetch(
    url: str, place: str, max_bytes: int, may_reach: MayReach = is_public
) -> bytes:
    """The content at *url*. Raises Failure, which names *place* as the field at fault."""
    reason = ""
    try:
        for _ in range(MAX_REDIRECTS + 1):
            answer, content = await _get(urlsplit(url), max_bytes, may_reach)
            if answer.status_code == 200:
                return content
            reason = f"the host answers {answer.status_code}"
            url = urljoin(url, dict(answer.headers)[b"location"].decode())
    except KeyError:
        pass
    except (ValueError, OSError, h11.ProtocolError, BrokenResourceError) as error:
        reason = str(error) or "the connection broke"
    raise refused(place, reason, "media_not_fetched")


async def _get(
    at: SplitResult, max_bytes: int, may_reach: MayReach
) -> tuple[h11.Response, bytes]:
    """Raises ValueError and what connections do."""
    target = (at.path or "/") + (f"?{at.query}" if at.query else "")
    host = at.netloc.rpartition("@")[2]
    headers = [("Host", host), ("Accept", "*/*"), ("Connection", "close")]
    asked = h11.Request(method="GET", target=target, headers=headers)
    connection = h11.Connection(h11.CLIENT)
    answer, content = None, bytearray()
    async with await _connect(at, may_reach) as stream:
        await stream.send(connection.send(asked) or b"")
        connection.send(h11.EndOfMessage())
        while not isinstance(event := connection.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA:
                connection.receive_data(await _received(stream))
            elif isinstance(event, h11.Response):
                answer = event
            elif isinstance(event, h11.Data):
                content += event.data
                if len(content) > max_bytes:
                    raise ValueError(f"more than {max_bytes} bytes")
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
        raise ValueError("addresses of http and https are fetched")
    found = await getaddrinfo(name, port)
    addresses = [ip_address(str(each[-1][0]).partition("%")[0]) for each in found]
    if not all(map(may_reach, addresses)):
        raise ValueError(f"{name} is no public host")
    if at.scheme == "http":
        return await connect_tcp(addresses[0], port)
    return await connect_tcp(addresses[0], port, tls=True, tls_hostname=name)
