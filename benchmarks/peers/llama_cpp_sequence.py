"""
llama-cpp-python's `Llama`, one call after the other.

Run by its environment's Python, this file is a server with one thread, so that the same
client can measure it: calls wait in the listen queue. It speaks OpenAI's protocol.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any


@contextmanager
def llama_cpp_sequence(
    model: Path, *, n_slots: int, n_ctx: int, threads: int
) -> Iterator[Any]:
    """Start it; a single context of n_ctx / n_slots cells serves all slots in turn."""
    from . import HOST, find, free_port, serving
    from .llama_cpp_server import environment

    port = free_port()
    options = {
        "address": [HOST, port],
        "llama": {
            "model_path": str(model),
            "n_ctx": n_ctx // n_slots,
            "n_batch": 2048,
            "n_ubatch": 512,
            "n_threads": threads,
            "n_threads_batch": threads,
            "flash_attn": True,  # as "auto" decides for the others
            "verbose": False,
        },
    }
    command = [find("llama_cpp_python"), __file__, json.dumps(options)]
    with serving(command, port, env=environment()) as url:
        yield url


class Server(HTTPServer):
    """Keeps many callers waiting."""

    request_queue_size = 1024
    llama: Any


class Handler(BaseHTTPRequestHandler):
    """/v1/completions as a stream, and /health."""

    server: Server

    def do_GET(self) -> None:
        self._start("application/json")
        self.wfile.write(b"{}")

    def do_POST(self) -> None:
        size = int(self.headers["Content-Length"])
        body = json.loads(self.rfile.read(size))
        self._start("text/event-stream")
        try:
            self._generate(body)
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client left
        except ValueError as error:  # as for a prompt that does not fit
            self._send({"error": str(error)})

    def _generate(self, body: dict[str, Any]) -> None:
        llama = self.server.llama
        chunks = llama.create_completion(
            body["prompt"],
            max_tokens=body["max_tokens"],
            temperature=body["temperature"],
            logit_bias={int(k): v for k, v in body.get("logit_bias", {}).items()},
            stream=True,
        )
        for chunk in chunks:
            self._send(chunk)

    def _send(self, event: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _start(self, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Connection", "close")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing: a line for each call would only take time."""


def main(options: dict[str, Any]) -> None:
    """Serve until the process is ended."""
    from llama_cpp import Llama  # type: ignore[import-not-found]

    server = Server(tuple(options["address"]), Handler)
    server.llama = Llama(**options["llama"])
    server.serve_forever()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
