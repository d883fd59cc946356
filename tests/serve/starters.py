"""
Programs that start llama-server, as far as the server sees them.

Each is what its source does: the command line, how it waits until the server is ready, and how it
ends the server. A server is a command: ours, or that of llama.cpp.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import httpx

from tests.support.limits import LIMIT_S

OURS = [sys.executable, "-m", "pyllama_raw.cli.llama_server"]
LISTENS = re.compile(
    r"http server listening|server (is )?listening on|starting the main loop"
)
MEMORY = re.compile(r"(\S+)\s+(model|KV|compute) buffer size\s*=\s*([\d.]+) MiB")


def theirs() -> list[str] | None:
    """The command of the pinned llama-server; None: nobody has built it here."""
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    peers = base / "pyllama_raw" / "peers"
    programs = sorted(peers.glob("llama.cpp-*/own/**/llama-server"))
    return [str(programs[-1])] if programs else None


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass
class Server:
    """A process that a program has started, with the lines of its log so far."""

    process: subprocess.Popen[str]
    url: str
    path: str | None = None
    lines: list[str] = field(default_factory=list)

    def client(self, timeout_s: float = LIMIT_S) -> httpx.Client:
        """
        A client with a new connection for each request.

        A server may close a connection that rests while a request is on its way to it, as
        llama-server does after 5 s.
        """
        limits = httpx.Limits(max_keepalive_connections=0)
        transport = httpx.HTTPTransport(uds=self.path, limits=limits)
        return httpx.Client(base_url=self.url, timeout=timeout_s, transport=transport)

    def health(self, timeout_s: float) -> int | None:
        """The status of /health on a new connection; None: none within the time."""
        if self.path is not None:
            with socket.socket(socket.AF_UNIX) as probe:
                if probe.connect_ex(self.path):
                    return None
        try:
            with self.client(timeout_s) as client:
                return client.get("/health").status_code
        except httpx.TransportError:
            return None


@contextmanager
def started(
    command: list[str], arguments: list[str], **options: Any
) -> Iterator[Server]:
    """The server of *command*, whose log is read as it comes; killed if it has not ended."""
    path = next((a for a in arguments if a.endswith(".sock")), None)
    port = arguments[arguments.index("--port") + 1] if "--port" in arguments else "0"
    process = subprocess.Popen(
        [*command, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )
    server = Server(process, f"http://127.0.0.1:{port}", path)

    def read() -> None:
        assert process.stderr is not None
        server.lines.extend(iter(process.stderr.readline, ""))

    reader = Thread(target=read, daemon=True)
    reader.start()
    try:
        yield server
    finally:
        process.kill()
        process.wait(LIMIT_S)
        reader.join(LIMIT_S)
        assert process.stderr is not None
        process.stderr.close()


def polling(every_s: float, timeout_s: float) -> Callable[[Server], None]:
    """Ask for /health until it is 200; refused connections and times are tolerated."""

    def wait(server: Server) -> None:
        end = time.monotonic() + LIMIT_S
        while server.health(timeout_s) != 200:
            assert server.process.poll() is None, server.lines
            assert time.monotonic() < end, server.lines
            time.sleep(every_s)

    return wait


def by_models(server: Server) -> None:
    """Ask for the models until they are told."""
    polling(0.25, 1.0)(server)
    with server.client() as client:
        assert client.get("/v1/models").status_code == 200


def by_line(server: Server) -> None:
    """Look for a line of the log."""
    end = time.monotonic() + LIMIT_S
    while not any(LISTENS.search(line) for line in list(server.lines)):
        assert server.process.poll() is None, server.lines
        assert time.monotonic() < end, server.lines
        time.sleep(0.05)


def kill(server: Server) -> int:
    """End the server at once, and wait."""
    server.process.kill()
    return server.process.wait(LIMIT_S)


def ended_by(number: signal.Signals, limit_s: float) -> Callable[[Server], int]:
    """Tell the server to end, which it has to within *limit_s*."""

    def end(server: Server) -> int:
        server.process.send_signal(number)
        return server.process.wait(limit_s)

    return end


@dataclass(frozen=True)
class Starter:
    """A program."""

    arguments: Callable[[str, int, Path], list[str]]  # of a model, a port and a folder
    wait: Callable[[Server], None]
    end: Callable[[Server], int]
    options: dict[str, Any] = field(default_factory=dict)  # of the process


def _ollama(model: str, port: int, _: Path) -> list[str]:
    flags = "--host 127.0.0.1 --no-webui --offline -c 1024 -np 2 --log-verbosity 4"
    rest_of = "--no-log-prefix --no-log-timestamps --flash-attn auto"
    return ["--model", model, "--port", str(port), *flags.split(), *rest_of.split()]


def _swap(model: str, port: int, _: Path) -> list[str]:
    return ["--port", str(port), "-m", model, "-c", "1024"]


def _docker(model: str, _: int, folder: Path) -> list[str]:
    flags = ["-ngl", "999", "--metrics", "--model", model, "--jinja"]
    return [*flags, "--host", str(folder / "inference.sock"), "--ctx-size", "1024"]


def _ramalama(model: str, port: int, _: Path) -> list[str]:
    head = ["--host", "0.0.0.0", "--port", str(port), "--model", model]  # noqa: S104
    return [
        *head,
        *[
            "--no-warmup",
            "--alias",
            "tiny",
            "--temp",
            "0.8",
            "--threads",
            "2",
            "-c",
            "1024",
        ],
    ]


def _lemonade(model: str, port: int, _: Path) -> list[str]:
    flags = ["-m", model, "--ctx-size", "1024", "--port", str(port), "--jinja"]
    return [*flags, "--metrics"]


def _jan(model: str, port: int, _: Path) -> list[str]:
    flags = f"--no-webui --jinja -m {model} -a tiny --port {port} -ngl 100 --fit off"
    return [*flags.split(), "-c", "1024"]


def _gpustack(model: str, port: int, _: Path) -> list[str]:
    head = ["-m", model, "--host", "0.0.0.0", "--port", str(port)]  # noqa: S104
    return [*head, "--alias", "tiny", "-c", "1024"]


STARTERS = {
    "ollama": Starter(_ollama, polling(0.25, 0.2), kill),
    "llama-swap": Starter(
        _swap,
        polling(1.0, 1.0),
        ended_by(signal.SIGTERM, 10.0),
        {"start_new_session": True},
    ),
    "docker": Starter(_docker, polling(0.5, 5.0), ended_by(signal.SIGINT, LIMIT_S)),
    "ramalama": Starter(_ramalama, by_models, ended_by(signal.SIGTERM, 10.0)),
    "lemonade": Starter(_lemonade, polling(0.1, 1.0), ended_by(signal.SIGTERM, 5.0)),
    "jan": Starter(_jan, by_line, ended_by(signal.SIGTERM, 5.0)),
    "gpustack": Starter(_gpustack, by_models, ended_by(signal.SIGTERM, 10.0)),
}
