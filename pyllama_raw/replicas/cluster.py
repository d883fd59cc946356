"""The application of a cluster: a front, and replicas that Ray adds and takes away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray import serve
from ray.serve.config import AutoscalingConfig, RequestRouterConfig

from pyllama_raw import ConfigError, EngineConfig
from pyllama_raw.replicas.engine import EngineReplica
from pyllama_raw.replicas.front import Front
from pyllama_raw.replicas.router import RuleRouter
from pyllama_raw.routing import ROUTERS, RouterName
from pyllama_raw.serve.deployment import Deployment, read

KINDS: dict[str, Callable[[Any], Any]] = {  # of what is given as text
    "n_replicas": int,
    "max_replicas": int,
    "router": str,
    "n_cpus": float,
    "batch_s": float,
}
STATS_S = 1.0  # between what replicas tell to routers


def cluster(
    deployment: Deployment,
    n_replicas: int = 1,
    max_replicas: int | None = None,
    *,
    router: RouterName = "prefix_affinity",
    n_cpus: float = 1.0,
    batch_s: float = 0.02,
) -> serve.Application:
    """
    Application that `serve.run` takes.

    Args:
        deployment: the models and options of each replica; where it listens is Ray's.
        n_replicas: at least so many.
        max_replicas: Ray adds replicas up to so many while requests wait. None: it adds none.
        router: names the rule by which a replica gets a request.
        n_cpus: of each replica, as Ray counts them; threads are in the engine's config.
        batch_s: parts of an answer that come within so many seconds go together.

    Raises:
        ConfigError: there is no such rule.
    """
    if router not in ROUTERS:
        names = ", ".join(map(repr, ROUTERS))
        raise ConfigError(f"router={router!r} is no rule: give one of {names}")
    places, slots = _places(deployment)
    how_many: dict[str, Any] = {"num_replicas": n_replicas}
    if max_replicas is not None:
        scaling = AutoscalingConfig(
            min_replicas=n_replicas,
            max_replicas=max_replicas,
            target_ongoing_requests=slots,
        )
        how_many = {"autoscaling_config": scaling}
    replicas = serve.deployment(
        EngineReplica,
        name="engines",
        max_ongoing_requests=places,
        ray_actor_options={"num_cpus": n_cpus},
        graceful_shutdown_timeout_s=deployment.service.drain_s,
        request_router_config=RequestRouterConfig(
            request_router_class=RuleRouter,
            request_router_kwargs={"rule": router},
            request_routing_stats_period_s=STATS_S,
        ),
        **how_many,
    ).bind(deployment, batch_s)
    front = serve.deployment(
        Front,
        name="front",
        max_ongoing_requests=places * max(max_replicas or 0, n_replicas),
        ray_actor_options={"num_cpus": 0},
    )
    return front.bind(replicas, deployment.service)


def application(options: dict[str, Any]) -> serve.Application:
    """
    Application for the command of Ray, and for a RayService of Kubernetes:

        serve run pyllama_raw.replicas.cluster:application config=service.toml n_replicas=2

    Args:
        options: `config` is a file as `pyllama-raw serve --config` reads it, the rest are
            arguments of `cluster`, as texts or values.

    Raises:
        ConfigError: names what is wrong.
    """
    file = options.get("config")
    unknown = sorted({*options} - {"config", *KINDS})
    if unknown or not file:
        allowed = ", ".join(("config", *KINDS))
        mistake = f"{unknown[0]!r} is unknown" if unknown else "config is missing"
        raise ConfigError(
            f"{mistake}: give config=FILE, and of {allowed} what you want"
        )
    try:
        values = {n: KINDS[n](value) for n, value in options.items() if n != "config"}
    except ValueError as error:
        raise ConfigError(f"options of replicas: {error}") from error
    return cluster(Deployment.of(read(file)), **values)


def _places(deployment: Deployment) -> tuple[int, int]:
    """Requests that a replica has room for, and those of them that run."""
    configs = [deployment.configs.get(name) for name in deployment.models]
    schedulers = [(config or EngineConfig()).scheduler for config in configs]
    slots = sum(scheduler.n_slots for scheduler in schedulers)
    return slots + sum(scheduler.max_waiting for scheduler in schedulers), slots
