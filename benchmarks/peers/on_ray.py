"""Our replicas on a Ray cluster of this machine, made for one `with` block."""

from __future__ import annotations

import ctypes
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psutil

from pyllama_raw.serve.deployment import Deployment

from . import Url

PR_SET_CHILD_SUBREAPER = 36


@contextmanager
def ray_cluster() -> Iterator[Url]:
    """
    A cluster that serves nothing yet, at a free port; its end takes all processes along.

    What its processes have computed then counts as ours: those that Ray leaves without a parent
    become children of this one.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
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
        children = psutil.Process().children(recursive=True)
        serve.shutdown()
        ray.shutdown()
        psutil.wait_procs(children, timeout=10)


def run(deployment: Deployment, **options: Any) -> None:
    """Serve *deployment* there, instead of what was served before; *options* of `cluster`."""
    from ray import serve

    from pyllama_raw.replicas.cluster import cluster

    serve.run(cluster(deployment, n_cpus=0.5, **options), route_prefix="/")
