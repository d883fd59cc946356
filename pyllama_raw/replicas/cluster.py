"""
The application of a cluster: a front, and replicas that Ray adds and takes away.

A replica is the engines of a deployment and the application over them, called by handle. The router
applies our rule to what this handle has sent and what has ended.

Rules of the front, which reads a request, calls by handle, and passes the answer on:
1. A request whose replica ends is asked again elsewhere, as long as its client has no token.
2. Later the client is told: an event in a stream.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from functools import partial
from typing import Any, NamedTuple

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import AutoscalingConfig, RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)
from ray.util.metrics import Gauge
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Message, Scope

from pyllama_raw import AsyncEngine, ConfigError, EngineConfig
from pyllama_raw.replicas.relay import Outbox, Progress, routed_request
from pyllama_raw.routing import ROUTERS, RoutedRequest, RouterName
from pyllama_raw.serve.answer import event
from pyllama_raw.serve.app import make_app
from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.deployment import Deployment, read
from pyllama_raw.serve.failures import Failure
from pyllama_raw.serve.reading import Bodies, check_values

N_CELLS = 2**14  # of a replica that has not told yet


class RankedReplica(NamedTuple):
    """A replica as the rule sees it."""

    name: str
    n_open_tokens: int
    n_cells: int


class RuleRouter(RequestRouter):
    """
    Ranks replicas by a rule of `pyllama_raw.routing`.

    The first argument of a call is an `RoutedRequest`; another call goes wherever there is room. Ray
    tries the replicas in the order of their rank, and passes over one that has no room.
    """

    def initialize_state(self, rule: RouterName = "prefix_affinity") -> None:
        """Ray calls this once with the deployment's `request_router_kwargs`."""
        self._rule = ROUTERS[rule]()
        self._open: dict[str, tuple[str, int]] = {}  # by request
        self._n_open = Counter[str]()  # tokens, by replica

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """All of them, each in a rank of its own."""
        request = None if pending_request is None else _routed(pending_request)
        if request is None or pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True
        replicas = [self._ranked(replica) for replica in candidate_replicas]
        ranks = self._rule.rank(request, replicas)
        return [[candidate_replicas[index]] for index in ranks]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        """The replica has taken the request."""
        request = _routed(pending_request)
        if request is not None:
            name = replica_id.unique_id
            request_id = pending_request.metadata.internal_request_id
            self._rule.sent(request, name)
            self._open[request_id] = name, request.n_tokens
            self._n_open[name] += request.n_tokens

    def on_request_completed(
        self, replica_id: ReplicaID, internal_request_id: str
    ) -> None:
        """The request has ended, or the replica refused it."""
        name, n_tokens = self._open.pop(internal_request_id, ("", 0))
        self._n_open[name] -= n_tokens
        if not self._n_open[name]:
            del self._n_open[name]

    def _ranked(self, replica: RunningReplica) -> RankedReplica:
        """Other handles send to it, too: the replica itself tells what it has, a bit later."""
        name, stats = replica.replica_id.unique_id, replica.routing_stats
        n_open = max(self._n_open[name], stats.get("n_open_tokens", 0))
        return RankedReplica(name, n_open, stats.get("n_cells", N_CELLS))


def _routed(pending: PendingRequest) -> RoutedRequest | None:
    args: Sequence[Any] = pending.args
    return args[0] if args and isinstance(args[0], RoutedRequest) else None


GAUGES = ("running", "waiting", "n_cells_used", "n_cells", "n_open_tokens")


class EngineReplica:
    """Ray makes one of these in each process of the deployment."""

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, deployment: Deployment, batch_s: float
    ) -> None:
        """
        Open the engines; Ray sends requests when they are ready.

        Args:
            batch_s: parts of an answer that come within so many seconds go together.
        """
        self._stack, self._batch_s = AsyncExitStack(), batch_s
        self._engines = {
            name: await self._stack.enter_async_context(
                AsyncEngine.open(path, deployment.configs.get(name))
            )
            for name, path in deployment.models.items()
        }
        self._stall_s = deployment.service.stall_s
        self._app = make_app(self._engines, deployment.service)
        self._n_open_tokens = 0
        self._gauges = {
            name: Gauge(f"pyllama_raw_{name}", tag_keys=("replica",)) for name in GAUGES
        }

    async def answer(
        self, routed: RoutedRequest, scope: Scope, body: bytes
    ) -> AsyncIterator[list[Message]]:
        """
        Answer of the application, in batches.

        Args:
            routed: what the router chose by.
        """
        self._n_open_tokens += routed.n_tokens
        try:
            async for batch in Outbox(body, self._batch_s).run(self._app, scope):
                yield batch
        finally:
            self._n_open_tokens -= routed.n_tokens

    def check_health(self) -> None:
        """Ray replaces a replica that raises here thrice."""
        for name, engine in self._engines.items():
            state = engine.health(self._stall_s).state
            if state in ("stalled", "dead"):
                raise RuntimeError(f"the engine of {name} is {state}: {engine.error}")

    def record_routing_stats(self) -> dict[str, int]:
        """Facts that routers learn of this replica; Ray asks every second or so."""
        stats = [engine.stats() for engine in self._engines.values()]
        values = {
            name: sum(int(getattr(engine, name)) for engine in stats)
            for name in GAUGES[:-1]
        }
        values["n_open_tokens"] = self._n_open_tokens
        replica = serve.get_replica_context().replica_id.unique_id
        for name, value in values.items():
            self._gauges[name].set(value, {"replica": replica})
        return values

    async def aclose(self) -> None:
        """Close the engines."""
        await self._stack.aclose()

    __del__: Any = aclose  # Ray awaits it before the process ends


TRIES = 3
WIRE = (  # what a replica is told of a request
    *("type", "http_version", "method", "scheme", "path", "raw_path", "root_path"),
    *("query_string", "headers", "client", "server"),
)


class Front:
    """Ray calls it with each request; it has no engine."""

    def __init__(self, replicas: Any, config: ServeConfig) -> None:
        self._replicas = replicas.options(stream=True)
        self._bodies, self._max_values = Bodies(config), config.max_body_values

    async def __call__(self, request: Request) -> Response:
        """The answer of a replica."""
        try:
            length = request.headers.get("content-length", "0")
            body = await self._bodies.read(request.receive, length)
            if body is None:
                return Response()  # to nobody
            messages = self._messages(request, body)
            return await _response(messages)
        except Failure as failure:
            return failure.answer(request.url.path)

    async def _messages(self, request: Request, body: bytes) -> AsyncIterator[Message]:
        """Parts of one answer. Raises Failure if there is none."""
        read = partial(_counted, request.headers, body, self._max_values)
        routed, progress = await self._bodies.run(read, len(body)), Progress()
        scope: Scope = {n: request.scope[n] for n in WIRE if n in request.scope}
        for _ in range(TRIES):
            try:
                async for message in self._ask(routed, scope, body):
                    if progress.goes_on_with(message):
                        yield message
            except RayActorError:
                if progress.has_token:
                    break
            else:
                return
        failure = Failure(503, "replica_ended", "the replica of this answer has ended")
        if not progress.has_begun:
            raise failure
        yield {"type": "http.response.body", "body": event(failure.body())}

    async def _ask(
        self, routed: RoutedRequest, scope: Scope, body: bytes
    ) -> AsyncIterator[Message]:
        """Answer of one replica. Raises RayActorError if the replica ends."""
        batches = self._replicas.answer.remote(routed, scope, body)
        try:
            async for batch in batches:
                for message in batch:
                    yield message
        except (BackPressureError, DeploymentUnavailableError) as error:
            raise Failure(503, "server_is_overloaded", str(error)) from error
        finally:
            batches.cancel()


def _counted(headers: Headers, body: bytes, max_values: int) -> RoutedRequest:
    """The request of a body that has not too many values. Raises Failure."""
    check_values(body, max_values)
    return routed_request(headers, body)


async def _response(messages: AsyncIterator[Message]) -> Response:
    start = await anext(messages)
    response = StreamingResponse(_bodies(messages), start["status"])
    response.raw_headers = list(start["headers"])
    return response


async def _bodies(messages: AsyncIterator[Message]) -> AsyncIterator[bytes]:
    async with aclosing(messages):  # type: ignore[type-var]
        async for message in messages:
            if message.get("body"):
                yield message["body"]


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
