"""
Records of what became of requests.

A record has no text. `hash_ids` says which blocks of prompts are equal, so that the sharing
of prefixes can be replayed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cached_property
from hashlib import blake2b
from types import MappingProxyType
from typing import NamedTuple

from pyllama_raw.core.namespace import Private
from pyllama_raw.core.request import Finished, Request, Value
from pyllama_raw.engine.records import RecordLog

BLOCK = 16  # tokens of a hash_id
ID_BYTES = 6  # every JSON reader keeps so many exactly
# As policy_data: a request that only warms an engine up. Logs have it, and what is fitted or
# replayed leaves it out.
WARM_UP: Mapping[str, Value] = MappingProxyType({"warm_up": True})


def warms_up(policy_data: Mapping[str, Value] | None) -> bool:
    """Whether the request that has *policy_data* does not count."""
    return policy_data is not None and policy_data.get("warm_up") is True


class RequestRecord(NamedTuple):
    """One request that has ended. Moments are on the engine clock, in seconds."""

    request_id: int
    submitted_s: float
    admitted_s: float | None  # got its first slot; None: never
    first_token_s: float | None
    finished_s: float
    why: str  # the finish reason, or the code of the error
    n_prompt: int
    n_output: int
    n_cached: int  # prompt tokens that were not computed
    cache_tier: str | None  # where these came from
    n_preempted: int
    max_tokens: int  # 0: texts become vectors
    priority: int
    deadline_s: float | None  # from its submission
    client: str | None
    policy_data: Mapping[str, Value] | None
    block: int  # prompt tokens of each of hash_ids but the last, which may have fewer
    # Equal ones: equal prompts from the start to here. Texts that become vectors have none.
    hash_ids: tuple[int, ...]

    @property
    def warms_up(self) -> bool:
        """Whether it only warmed the engine up, as its policy_data says."""
        return warms_up(self.policy_data)


def block_ids(request: Request, key: bytes) -> tuple[int, ...]:
    """
    A number for each block of the prompt of *request*.

    Two prompts have equal numbers as far as their blocks are equal from the start, and the
    same callers may use them. A *key* that is drawn once keeps texts from being guessed.
    """
    namespace = request.namespace
    owner = request.request_id if isinstance(namespace, Private) else namespace
    hashed = blake2b(f"{owner!r}\0".encode(), key=key, digest_size=ID_BYTES)
    data, n_bytes = request.tokens.tobytes(), request.tokens.itemsize * BLOCK
    found = []
    for start in range(0, len(data), n_bytes):
        hashed.update(data[start : start + n_bytes])
        found.append(int.from_bytes(hashed.digest()))
    return tuple(found)


class RequestLog(RecordLog[RequestRecord]):
    """The last requests of one driver that have ended."""

    @cached_property
    def _key(self) -> bytes:
        return os.urandom(16)

    def ended(self, request: Request, end: Finished) -> None:
        """Make a record."""
        times, deadline = end.timings, request.deadline
        data = request.policy_data
        shares = not request.lot.makes_vectors and request.source is None
        record = RequestRecord(
            request_id=end.request_id,
            submitted_s=times.submitted,
            admitted_s=times.admitted,
            first_token_s=times.first_token,
            finished_s=times.finished,
            why=why(end),
            n_prompt=end.n_prompt,
            n_output=end.n_output,
            n_cached=end.n_cached,
            cache_tier=None if end.cache_tier is None else str(end.cache_tier),
            n_preempted=end.n_preempted,
            max_tokens=request.max_tokens,
            priority=request.priority,
            deadline_s=None if deadline is None else deadline - times.submitted,
            client=request.client,
            policy_data=None if data is None else dict(data),
            block=BLOCK,
            hash_ids=block_ids(request, self._key) if shares else (),
        )
        self.keep(record)


def why(end: Finished) -> str:
    """The finish reason, or the code of the error."""
    if end.error is not None:
        return end.error.code
    assert end.reason is not None
    return str(end.reason)
