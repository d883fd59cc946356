"""One replica: the engines of a deployment and the application over them, called by handle."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any

from ray import serve
from ray.util.metrics import Gauge
from starlette.types import Message, Scope

from pyllama_raw import AsyncEngine
from pyllama_raw.replicas.relay import Outbox
from pyllama_raw.routing import RoutedRequest
from pyllama_raw.serve.app import make_app
from pyllama_raw.serve.deployment import Deployment

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
