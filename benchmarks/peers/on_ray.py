"""Our replicas on a Ray cluster of this machine, made for one `with` block."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pyllama_raw.serve.deployment import Deployment

from . import Url


@contextmanager
def ray_cluster() -> Iterator[Url]:
    """A cluster that serves nothing yet, at a free port; its end takes all processes along."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # 15: the server alone has none
    import ray
    from ray import serve

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    ray.init(
        num_cpus=2,
        include_dashboard=False,
        object_store_memory=100 * 2**20,
        logging_level="ERROR",
        log_to_driver=False,
    )
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        yield f"http://127.0.0.1:{port}"
    finally:
        serve.shutdown()
        ray.shutdown()


def run(deployment: Deployment, prefix: str = "/", **options: Any) -> None:
    """
    Serve *deployment* there, instead of what was served below *prefix* before.

    Args:
        options: of `cluster`.
    """
    from ray import serve

    from pyllama_raw.replicas.cluster import cluster

    application = cluster(deployment, n_cpus=0.5, **options)
    serve.run(application, name=prefix.strip("/") or "default", route_prefix=prefix)


def end(prefix: str) -> None:
    """Serve nothing below *prefix* any longer."""
    from ray import serve

    serve.delete(prefix.strip("/") or "default")
