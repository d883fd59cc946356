"""
Routers: rules that choose one of several engines for a request, and see inside none.

It knows what it has sent and what has ended. A prefix is known by blocks of its tokens, and
is taken to be where it was last sent.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Literal, Protocol

from pyllama_raw.core.request import Request

RouterName = Literal["round_robin", "least_load", "prefix_affinity"]
BLOCK = 64  # tokens
MAX_BLOCKS = 2**18  # remembered; those longest unused are forgotten
TIERS = (0.7, 1.0)  # of KV pressure: within the first prefixes count most


class Replica(Protocol):
    """Facts that a router knows of an engine."""

    n_open: int
    """Requests sent to it that have not ended."""
    n_open_tokens: int
    """Prompt and output tokens of these, at most."""
    n_cells: int
    """KV cells that it has."""


class Router(Protocol):
    """Chooses."""

    def choose(self, request: Request, replicas: Sequence[Replica]) -> int:
        """The index of the replica that gets *request*."""


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._next = -1

    def choose(self, request: Request, replicas: Sequence[Replica]) -> int:  # noqa: ARG002
        self._next = (self._next + 1) % len(replicas)
        return self._next


class LeastLoad:
    """Chooses the engine that has the fewest open tokens."""

    def choose(self, request: Request, replicas: Sequence[Replica]) -> int:  # noqa: ARG002
        return min(
            range(len(replicas)), key=lambda index: replicas[index].n_open_tokens
        )


class PrefixAffinity:
    """
    The replica that has most of the prompt, unless its memory is under pressure.

    Pressure is open tokens over cells. The lowest tier of it that a replica is in goes
    first; within a tier the longest prefix, then the fewest open tokens.
    """

    def __init__(self) -> None:
        self._sent = OrderedDict[int, set[int]]()  # replicas, by the hash of a prefix

    def choose(self, request: Request, replicas: Sequence[Replica]) -> int:
        hashes = list(_hashes(request))
        n_known = [0] * len(replicas)
        for n_blocks, key in enumerate(hashes, 1):
            for index in self._sent.get(key, ()):
                n_known[index] = n_blocks

        def rank(index: int) -> tuple[int, int, int]:
            replica = replicas[index]
            pressure = replica.n_open_tokens / replica.n_cells
            tier = sum(pressure >= limit for limit in TIERS)
            return tier, -n_known[index], replica.n_open_tokens

        chosen = min(range(len(replicas)), key=rank)
        for key in hashes:
            self._sent.setdefault(key, set()).add(chosen)
            self._sent.move_to_end(key)
        while len(self._sent) > MAX_BLOCKS:
            self._sent.popitem(last=False)
        return chosen


def _hashes(request: Request) -> Iterable[int]:
    """Hashes of the prefixes that end with a block."""
    data = request.tokens.tobytes()
    n_bytes, key = BLOCK * request.tokens.itemsize, 0
    for start in range(0, len(data) - n_bytes + 1, n_bytes):
        key = hash((key, data[start : start + n_bytes]))
        yield key


ROUTERS: dict[RouterName, type[Router]] = {
    "round_robin": RoundRobin,
    "least_load": LeastLoad,
    "prefix_affinity": PrefixAffinity,
}
