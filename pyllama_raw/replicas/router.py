"""The router of a Ray deployment: our rule, on what this handle has sent and what has ended."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from ray.serve.request_router import (
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from pyllama_raw.routing import ROUTERS, RoutedRequest, RouterName

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
