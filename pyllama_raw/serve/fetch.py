"""
Images and sounds that a request names by an address.

Rules:
1. Only public hosts are reached: addresses are looked at after a name is resolved, and the
   connection goes to what was looked at. So a service is no way into its own network.
2. Bytes and redirects are bounded here; the caller bounds the time.
3. A failure does not tell whether there is such a name inside, or which ports are open: one
   sentence stands for all that goes wrong before an answer.
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
    found = await getaddrinfo(name, port)
    addresses = [ip_address(str(each[-1][0]).partition("%")[0]) for each in found]
    if not all(map(may_reach, addresses)):
        raise ValueError(UNREACHED)
    if at.scheme == "http":
        return await connect_tcp(addresses[0], port)
    return await connect_tcp(addresses[0], port, tls=True, tls_hostname=name)
