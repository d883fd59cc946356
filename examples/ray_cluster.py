"""
Two replicas of a model on a Ray cluster, and the API of `pyllama-raw serve` in front of them.

    pip install 'pyllama_raw[ray]'
    python examples/ray_cluster.py --model model.gguf --port 8000
    curl -d '{"messages": [{"role": "user", "content": "Hello!"}]}' \\
        localhost:8000/v1/chat/completions

It joins the cluster that RAY_ADDRESS names, or makes one of this machine.
"""

from argparse import ArgumentParser

from ray import serve

from pyllama_raw import ContextConfig, EngineConfig
from pyllama_raw.replicas.cluster import cluster
from pyllama_raw.serve.deployment import Deployment


def main() -> None:
    """Answer until ^C."""
    parser = ArgumentParser(description="Replicas.")
    parser.add_argument("--model", help="a GGUF file; default: a small model")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--replicas", type=int, default=2)
    options = parser.parse_args()
    threads = 1  # of each replica: together as many as the machine has CPUs, at most
    config = EngineConfig(context=ContextConfig(n_threads=threads))
    deployment = Deployment(
        models={"assistant": options.model}, configs={"assistant": config}
    )
    serve.start(http_options={"host": "127.0.0.1", "port": options.port})
    # While requests wait, Ray adds replicas, up to two more.
    max_replicas = options.replicas + 2
    replicas = cluster(deployment, options.replicas, max_replicas, n_cpus=threads)
    serve.run(replicas, blocking=True)


if __name__ == "__main__":
    main()
