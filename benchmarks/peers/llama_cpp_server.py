"""
llama-cpp-python's examples/server/server.py: continuous batching in Python.

It runs in an environment of its own and loads the libllama this package was built with.
It speaks OpenAI's protocol; it takes neither ignore_eos nor a request for usage.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import HOST, Url, find, free_port, serving


def environment() -> dict[str, str]:
    """Where its Python package finds libllama and libmtmd."""
    folder = find("llama_cpp_lib")
    return {"LLAMA_CPP_LIB_PATH": folder, "MTMD_CPP_LIB": folder}


@contextmanager
def llama_cpp_server(
    model: Path, *, n_slots: int, n_ctx: int, threads: int
) -> Iterator[Url]:
    """Start it with one pool of cells for all slots, and batches as large as ours."""
    port = free_port()
    config = {
        "server": {"host": HOST, "port": port},
        "model": {
            "path": str(model),
            "n_ctx": n_ctx,
            "n_seq_max": n_slots,
            "n_batch": 2048,
            "n_ubatch": 512,
            "threads": threads,
            "threads_batch": threads,
            "kv_unified": True,
        },
    }
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(config, file)
        file.flush()
        command = [find("llama_cpp_python"), find("llama_cpp_server")]
        command += ["--config-file", file.name]
        opening = serving(command, port, health="/healthz", env=environment())
        with opening as url:
            yield url
