"""Images by address: from public hosts, and not too much of them."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_address

import anyio
import pytest
from anyio.abc import SocketAttribute, SocketStream

from pyllama_raw.serve.failures import Failure
from pyllama_raw.serve.media import UNREACHED, fetch, is_public
from tests.serve.support import LIMIT_S
from tests.support.loops import anyio_backend

__all__ = ["anyio_backend"]
pytestmark = pytest.mark.anyio

PLACE = "messages[0].content[0]"
OK = b"HTTP/1.1 200 OK\r\n"


@asynccontextmanager
async def answering(*answers: bytes) -> AsyncIterator[str]:
    """The address of a host that gives *answers* in turn, the last one for ever."""
    left = list(answers)

    async def answer(stream: SocketStream) -> None:
        async with stream:
            await stream.receive()
            await stream.send(left.pop(0) if len(left) > 1 else left[0])

    listener = await anyio.create_tcp_listener(local_host="127.0.0.1")
    async with listener, anyio.create_task_group() as group:
        port = listener.extra(SocketAttribute.local_port)  # noqa: S610 - no Django
        group.start_soon(listener.serve, answer)
        yield f"http://127.0.0.1:{port}/a.png?b"
        group.cancel_scope.cancel()


def anywhere(_: object) -> bool:
    return True


@pytest.mark.parametrize(
    "answers",
    [
        [OK + b"Content-Length: 4\r\n\r\nPNG!"],
        [OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nPN\r\n2\r\nG!\r\n0\r\n\r\n"],
        [OK + b"\r\nPNG!"],
        [b"HTTP/1.1 302 Found\r\nLocation: /b\r\n\r\n", OK + b"\r\nPNG!"],
    ],
)
async def test_what_a_host_gives_is_fetched(answers):
    """
    However its length is told, and where a redirect leads.
    """
    with anyio.fail_after(LIMIT_S):
        async with answering(*answers) as url:
            content = await fetch(url, PLACE, 4, anywhere)

    assert content == b"PNG!"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (OK + b"\r\nPNG!!", "more than 4 bytes"),
        (b"HTTP/1.1 404 Not Found\r\n\r\n", "the host answers 404"),
        (b"HTTP/1.1 302 Found\r\nLocation: ?\r\n\r\n", "the host answers 302"),
        (
            b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n",
            "addresses of http and https are fetched",
        ),
        (OK + b"Content-Length: 4\r\n\r\nPN", UNREACHED),
        (b"SSH-2.0\r\n\r\n", UNREACHED),
    ],
)
async def test_what_cannot_be_had_is_told(answer, reason):
    """
    As a mistake of the field that names the address.
    """
    with anyio.fail_after(LIMIT_S):
        async with answering(answer) as url:
            with pytest.raises(Failure, match=reason) as caught:
                await fetch(url, PLACE, 4, anywhere)

    assert (caught.value.status, caught.value.param) == (400, PLACE)


async def test_hosts_of_ones_own_network_are_not_reached():
    """
    The connection is refused before it is made.
    """
    with anyio.fail_after(LIMIT_S):
        async with answering(OK + b"\r\nPNG!") as url:
            with pytest.raises(Failure, match=UNREACHED):
                await fetch(url, PLACE, 4)


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("93.184.216.34", True),
        ("2606:2800:220:1:248:1893:25c8:1946", True),
        ("127.0.0.1", False),
        ("10.1.2.3", False),
        ("169.254.169.254", False),
        ("100.64.0.1", False),
        ("0.0.0.1", False),
        ("224.0.0.1", False),
        ("::1", False),
        ("::ffff:10.1.2.3", False),
        ("::ffff:93.184.216.34", True),
        ("fe80::1", False),
        ("fd00::1", False),
        ("64:ff9b::7f00:1", False),
        ("2002:7f00:1::", False),
        ("255.255.255.255", False),
        ("192.0.0.9", False),
        ("192.88.99.1", False),
        ("198.19.0.1", False),
        ("203.0.113.7", False),
        ("240.0.0.1", False),
        ("8.8.8.8", True),
        ("2a00:1450:4001::1", True),
        ("fec0::1", False),
        ("feff::1", False),
        ("::10.1.2.3", False),
        ("::93.184.216.34", False),
        ("::ffff:0:10.1.2.3", False),
        ("::ffff:0:93.184.216.34", False),
        ("64:ff9b:1::1", False),
        ("100::1", False),
        ("2001:0:1::1", False),
        ("2001:20::1", False),
        ("2001:db8::1", False),
        ("3fff::1", False),
        ("5f00::1", False),
        ("ff0e::1", False),
        ("::", False),
    ],
)
def test_public_addresses_are_told_from_others(address, expected):
    """
    In every form that leads to a network of one's own.
    """
    assert is_public(ip_address(address)) is expected
