"""
The server of xllamacpp, a Python package around llama.cpp's own.

It lives in an environment of its own: run by that environment's Python, this file is the
server process. It speaks llama-server's protocol.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def xllamacpp_server(
    model: Path, *, n_slots: int, n_ctx: int, threads: int
) -> Iterator[Any]:
    """Start it with one pool of cells for all slots, as our engine has it."""
    from . import HOST, find, free_port, serving

    port = free_port()
    options = {
        "model": str(model),
        "host": HOST,
        "port": port,
        "n_slots": n_slots,
        "n_ctx": n_ctx,
        "threads": threads,
    }
    command = [find("xllamacpp_python"), __file__, json.dumps(options)]
    with serving(command, port) as url:
        yield url


def main(options: dict[str, Any]) -> None:
    """Serve until the process is ended."""
    import threading

    import xllamacpp  # type: ignore[import-not-found]

    params = xllamacpp.CommonParams()
    params.model.path = options["model"]
    params.hostname, params.port = options["host"], options["port"]
    params.n_parallel, params.n_ctx = options["n_slots"], options["n_ctx"]
    params.kv_unified = True
    params.cpuparams.n_threads = options["threads"]
    params.cpuparams_batch.n_threads = options["threads"]
    server = xllamacpp.Server(params)
    threading.Event().wait()
    del server  # lives until here


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
