"""
The sockets of a service, and what it answers while it has no engine yet.

Rules:
1. A service listens before it loads, because who starts it asks until it is ready: a connection
   that is refused looks like a process that has ended.
2. While it loads, each answer is llama-server's 503, which balancers and programs that start
   servers know. `/livez` is 200, because a process that loads must not be restarted, and the page
   is there.
3. A Unix socket that nobody listens at is left of a process that was killed, and gives way. One
   that is ours is gone when the service ends.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterable, Sequence
from contextlib import suppress
from http import HTTPStatus
from pathlib import Path

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from pyllama_raw.serve import page
from pyllama_raw.serve.config import ListenConfig
from pyllama_raw.serve.failures import JSON

SOCK = ".sock"  # the end of a host that is a Unix socket
EVERYBODY = 0o666  # may connect to a Unix socket
FEW = 128  # connections that wait until the server says how many may
LOADING = {
    "error": {"message": "Loading model", "type": "unavailable_error", "code": 503}
}


class LoadingApp:
    """The application of a service, once there is one."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        if self.app is not None or scope["type"] != "http":
            await (self.app or Response())(scope, receive, send)
            return
        path, method = scope["path"], scope["method"]
        answer: Response = JSON(
            LOADING, HTTPStatus.SERVICE_UNAVAILABLE, {"retry-after": "1"}
        )
        if method in ("GET", "HEAD") and path == "/":
            answer = page.answer()
        elif path == "/livez":
            answer = JSON({"status": "ok"})
        if method == "HEAD":
            answer.body = b""
        await answer(scope, receive, send)


# -- sockets -----------------------------------------------------------------------------


def hosts_of(listen: ListenConfig) -> list[str]:
    """The addresses and paths at which to listen."""
    if listen.uds is not None:
        return [listen.uds]
    return [host.strip() for host in listen.host.split(",") if host.strip()]


def bound(listen: ListenConfig) -> list[socket.socket]:
    """
    Sockets that listen, of which the caller gives all to serve(), or closes all.

    Raises:
        OSError: names the address that cannot be had.
    """
    sockets: list[socket.socket] = []
    port = listen.port
    try:
        for host in hosts_of(listen):
            if listen.uds is not None or host.endswith(SOCK):
                sockets.append(_unix(host))
                continue
            try:
                kind = socket.SOCK_STREAM
                places = socket.getaddrinfo(
                    host, port, type=kind, flags=socket.AI_PASSIVE
                )
            except OSError as error:
                raise OSError(f"cannot listen at {host}: {error}") from None
            for family, _, _, _, address in dict.fromkeys(places):
                sockets.append(_tcp(family, (address[0], port, *address[2:]), listen))
                port = port or sockets[-1].getsockname()[1]
    except BaseException:
        release(sockets, files_of(sockets))
        raise
    return sockets


def _tcp(
    family: socket.AddressFamily, address: Sequence[object], listen: ListenConfig
) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        if os.name == "posix":
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if listen.reuse_port:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:  # 0.0.0.0 may be an address of its own
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(tuple(address))
        listener.listen(FEW)
    except OSError as error:
        listener.close()
        where = f"{address[0]}:{address[1]}"
        raise OSError(f"cannot listen at {where}: {error.strerror}") from None
    return listener


def _unix(path: str) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_dead(path):
            Path(path).unlink()
        listener.bind(path)
        Path(path).chmod(EVERYBODY)
        listener.listen(FEW)
    except OSError as error:
        listener.close()
        reason = error.strerror or error
        raise OSError(f"cannot listen at {path}: {reason}") from None
    return listener


def _is_dead(path: str) -> bool:
    """Whether *path* is a socket that nobody listens at."""
    try:
        if not stat.S_ISSOCK(Path(path).stat().st_mode):
            return False
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.connect(path)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def files_of(sockets: Iterable[socket.socket]) -> list[str]:
    """The files of those of *sockets* that have one; to be asked while they are open."""
    return [s.getsockname() for s in sockets if s.family == socket.AF_UNIX]


def release(sockets: Iterable[socket.socket], files: Iterable[str]) -> None:
    """Close *sockets*, and take away their *files*; can be repeated."""
    for listener in sockets:
        listener.close()
    for file in files:
        with suppress(OSError):
            Path(file).unlink()


def address_of(listener: socket.socket, host: str | None = None) -> str:
    """The address at which clients find *listener*, by its *host* if they know that."""
    if listener.family == socket.AF_UNIX:
        return str(listener.getsockname())
    name, port = listener.getsockname()[:2]
    name = host or name
    return f"http://{f'[{name}]' if ':' in name else name}:{port}"
