"""
The rule by which one of several engines gets a request; it sees inside none of them.

A router knows what was sent where and what has ended. A prefix is known by hashes of its
blocks, and is taken to be where it was last sent. The simulator and the routers of live
replicas share this file: it has no clock and no thread, and hashes are the same in all
processes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import Literal, NamedTuple, Protocol

RouterName = Literal["round_robin", "least_load", "prefix_affinity"]
MAX_KEYS = 2**18  # remembered; those longest unused are forgotten
TIERS = (0.7, 1.0)  # of KV pressure: open tokens over cells
OPEN_SHARE = 1 / 8  # of an open token, in tokens to compute: benchmarks/scaling.py
GRAIN = 64  # tokens to compute: engines that differ by fewer are about equal


class RoutedRequest(NamedTuple):
    """Facts that a router knows of a request."""

    n_tokens: int
    """Tokens of the prompt and the output, at most."""
    blocks: tuple[int, ...] = ()
    """Keys of its prefixes, as `prefixes` makes them."""
    session: str | None = None
    """Requests of one session belong together."""


class Replica(Protocol):
    """Facts that a router knows of an engine."""

    @property
    def name(self) -> str:
        """It stands for this engine as long as the engine lives."""

    @property
    def n_open_tokens(self) -> int:
        """Tokens of the requests that were sent to it and have not ended, at most."""

    @property
    def n_cells(self) -> int:
        """KV cells that it has."""


class Router(Protocol):
    """Chooses."""

    def rank(self, request: RoutedRequest, replicas: Sequence[Replica]) -> list[int]:
        """Indices of *replicas*, the best for *request* first."""

    def sent(self, request: RoutedRequest, name: str) -> None:
        """The replica *name* has got *request*."""


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._next = 0

    def rank(self, request: RoutedRequest, replicas: Sequence[Replica]) -> list[int]:  # noqa: ARG002
        n = len(replicas)
        return [(self._next + offset) % n for offset in range(n)]

    def sent(self, request: RoutedRequest, name: str) -> None:  # noqa: ARG002
        self._next += 1


class LeastLoad:
    """The engine that has the fewest open tokens."""

    def rank(self, request: RoutedRequest, replicas: Sequence[Replica]) -> list[int]:  # noqa: ARG002
        loads = [replica.n_open_tokens for replica in replicas]
        return sorted(range(len(replicas)), key=loads.__getitem__)

    def sent(self, request: RoutedRequest, name: str) -> None:
        """Loads come with the replicas."""


class PrefixAffinity:
    """
    The engine that has least to compute before the end of a request.

    That is what the engine does not know of the request's tokens, and a share of the tokens
    that are open there, as those are computed together. The home of a session knows all.
    Pressure on memory goes first, because a prefix is cheaper to compute again than room in
    a full engine is to wait for. Engines that are about equal so far are chosen between by
    what they know, and then by a hash of the beginning and the name: so unrelated prompts
    spread over engines that idle, and routers that know nothing of each other agree.
    """

    def __init__(self) -> None:
        self._sent = OrderedDict[int, set[str]]()  # names of replicas, by key

    def rank(self, request: RoutedRequest, replicas: Sequence[Replica]) -> list[int]:
        n_blocks, blocks = len(request.blocks), self._shared_blocks(request.blocks)
        if request.session:
            homes = self._sent.get(_key_of(request.session), ())
            blocks |= dict.fromkeys(homes, n_blocks + 1)  # more than any other
        start = _start(request)

        def key(index: int) -> tuple[int, int, int, int]:
            replica = replicas[index]
            n_open, n_known = replica.n_open_tokens, blocks.get(replica.name, 0)
            tier = sum(n_open >= limit * replica.n_cells for limit in TIERS)
            n_new = request.n_tokens * max(1 - n_known / max(n_blocks, 1), 0)
            n_to_do = int(n_new + n_open * OPEN_SHARE) // GRAIN
            return tier, n_to_do, -n_known, key_of(replica.name.encode(), start)

        return sorted(range(len(replicas)), key=key)

    def sent(self, request: RoutedRequest, name: str) -> None:
        keys = (
            *request.blocks,
            *([_key_of(request.session)] if request.session else ()),
        )
        for key in keys:
            self._sent.setdefault(key, set()).add(name)
            self._sent.move_to_end(key)
        while len(self._sent) > MAX_KEYS:
            self._sent.popitem(last=False)

    def _shared_blocks(self, blocks: Iterable[int]) -> dict[str, int]:
        """Blocks that each replica has of the prompt."""
        counts = dict[str, int]()
        for n_blocks, key in enumerate(blocks, 1):
            for name in self._sent.get(key, ()):
                counts[name] = n_blocks
        return counts


def prefixes(data: bytes, n_block_bytes: int, space: bytes = b"") -> tuple[int, ...]:
    """
    Keys of the prefixes of *data* that end with a block; all of it if it has none.

    Args:
        space: what else has to be equal for engines to share a prefix.
    """
    key = key_of(space, 0)
    keys = []
    for start in range(0, len(data) - n_block_bytes + 1, n_block_bytes):
        key = key_of(data[start : start + n_block_bytes], key)
        keys.append(key)
    return tuple(keys) or (key_of(data, key),)


def key_of(data: bytes, before: int) -> int:
    """64 bits, for *data* after what has the key *before*."""
    salt = before.to_bytes(8, "little")
    return int.from_bytes(blake2b(data, digest_size=8, key=salt).digest(), "little")


def _key_of(session: str) -> int:
    return key_of(session.encode("utf-8", "surrogatepass"), 1)


def _start(request: RoutedRequest) -> int:
    if request.session:
        return _key_of(request.session)
    return request.blocks[0] if request.blocks else 0


ROUTERS: dict[RouterName, type[Router]] = {
    "round_robin": RoundRobin,
    "least_load": LeastLoad,
    "prefix_affinity": PrefixAffinity,
}
