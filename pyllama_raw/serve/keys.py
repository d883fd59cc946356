"""
Keys of clients, and how much each may ask for in a minute.

They come from a file or the environment, never from a command line, which others see.

A line is a key, or the name of its owner and the key; `#` at its beginning or behind a blank begins
a comment. In the environment commas stand between them. The key of the owner `admin` opens all, and alone opens
what changes the service. That of the owner `monitor` sees what the requests of all do; other keys
see their own only.

Keys are looked up by digests, whose hashes in a dict are keyed by a secret of this process, so
how long a comparison takes tells nothing about a key.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from math import ceil
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from pyllama_raw.errors import ConfigError, reason_of
from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.failures import Failure

VARIABLE = "PYLLAMA_RAW_API_KEYS"
COMMENT = re.compile(r"(?:^|\s)#")  # a key may have a # in it
BEARER = re.compile(r"bearer\s+", re.IGNORECASE)
SENDER_HEADER = "x-pyllama-sender"  # says for whom a service in front asks
ADMIN, MONITOR = "admin", "monitor"  # owners whose keys have a right


class Key(NamedTuple):
    """The owner of a key, and the digest of the key that salts are derived from."""

    name: str
    digest: bytes

    @property
    def sees_all(self) -> bool:
        """Whether the key may be told of the requests of others."""
        return self.name in (ADMIN, MONITOR)

    def salt(self, salt: str | None) -> str:
        """The cache_salt for a request with *salt*: no other key has the same."""
        mixed = (salt or "").encode("utf-8", "surrogatepass")
        return hashlib.blake2b(mixed, key=self.digest, digest_size=16).hexdigest()


class Keys:
    """The keys that are allowed; without any, all may come in."""

    def __init__(self, config: ServeConfig, *, is_behind: bool = False) -> None:
        """
        Args:
            is_behind: the one key is that of a service in front, which has checked keys.

        Raises:
            ConfigError: the file or the variable has no key, or a line is none.
        """
        self._is_behind = is_behind
        self._owners: dict[bytes, Key] = {}
        if config.api_keys_file is not None:
            path = Path(config.api_keys_file)
            try:
                self._add(path.read_text().splitlines(), str(path))
            except (OSError, UnicodeDecodeError) as error:
                reason = reason_of(error)
                raise ConfigError(f"the keys in {path}: {reason}") from error
        if (value := os.environ.get(VARIABLE)) is not None:
            self._add(value.split(","), VARIABLE)

    def __bool__(self) -> bool:
        """Whether there are keys."""
        return bool(self._owners)

    def check(self, headers: Mapping[str, str], right: str | None) -> Key | None:
        """
        The key of a request by its *headers*; None: there are no keys.

        Args:
            right: the request needs it: ADMIN to change the service, MONITOR to see all of it.

        Raises:
            Failure: it may not come in.
        """
        key = None
        # Either header may have the key; a wrong one does not hide a right one.
        if self._owners:
            # The word in front may be left out, or stand in the other header, as at llama-server.
            values = headers.get("authorization", ""), headers.get("x-api-key", "")
            tokens = (BEARER.sub("", value.strip(), 1) for value in values)
            owners = (
                self._owners.get(_digest(token.encode("latin-1"))) for token in tokens
            )
            key = next(filter(None, owners), None)
        if key is None and self._owners:
            scheme = {"www-authenticate": "Bearer"}
            message = "a key is needed, as `Authorization: Bearer KEY` or `X-Api-Key`"
            raise Failure(401, "invalid_api_key", message, headers=scheme)
        if self._is_behind:
            return _sender(headers)[1]
        if right == ADMIN and (key is None or key.name != ADMIN):
            message = f"this needs a key of {ADMIN!r}, which a service may not have"
            raise Failure(403, "admin_key_needed", message)
        if right == MONITOR and key is not None and not key.sees_all:
            message = f"this tells of the requests of all: use a key of {MONITOR!r} or {ADMIN!r}"
            raise Failure(403, "monitor_key_needed", message)
        return key

    def _add(self, lines: list[str], where: str) -> None:
        n_before = len(self._owners)
        for number, line in enumerate(lines, 1):
            # A key alone is named by its line.
            words = COMMENT.split(line)[0].split()
            if len(words) > 2:
                raise ConfigError(f"line {number} of {where} is no key, nor NAME KEY")
            if words:
                name = words[0] if len(words) == 2 else f"key{number}"
                digest = _digest(words[-1].encode())
                self._owners[digest] = Key(name, digest)
        if len(self._owners) == n_before:
            raise ConfigError(f"{where} has no keys: give one, or leave {where} out")


def number_of(headers: Mapping[str, str]) -> str:
    """The number that a service in front has given a request."""
    return _sender(headers)[0]


def _sender(headers: Mapping[str, str]) -> tuple[str, Key | None]:
    """The number of a request, and the key of its sender, as a service in front says."""
    number, facts = json.loads(headers.get(SENDER_HEADER, '["", null]'))
    return number, None if facts is None else Key(facts[0], bytes.fromhex(facts[1]))


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class Bucket:
    """A budget that fills evenly, up to that of a minute; it can be overdrawn."""

    def __init__(self, per_minute: int, now: float) -> None:
        self._per_minute, self._level, self._at = per_minute, float(per_minute), now

    def wait_s(self, n: float, now: float) -> float:
        """Seconds until there are *n*; 0: there are."""
        filled = self._level + (now - self._at) * self._per_minute / 60
        self._level, self._at = min(filled, float(self._per_minute)), now
        return max(n - self._level, 0.0) * 60 / self._per_minute

    def take(self, n: int) -> None:
        """Use *n*, whether they are there or not."""
        self._level -= n


class Rates:
    """The budgets of each key; without keys all clients share them."""

    def __init__(self, config: ServeConfig) -> None:
        limits = {
            "requests": config.requests_per_minute,
            "tokens": config.tokens_per_minute,
        }
        self._limits = {budget: limit for budget, limit in limits.items() if limit}
        self._buckets: dict[tuple[str, str], Bucket] = {}  # by budget and key

    def enter(self, name: str) -> None:
        """Count a request of the key *name*. Raises Failure if it has to wait."""
        # Nothing is taken of one budget if the other one is empty.
        for budget in self._limits:
            if wait_s := self._bucket(budget, name).wait_s(1, monotonic()):
                headers = {"retry-after": str(ceil(wait_s))}
                message = f"too many {budget} in a minute: try again in {wait_s:.1f} s"
                raise Failure(429, "rate_limit_exceeded", message, headers=headers)
        self.charge("requests", name, 1)

    def charge(self, budget: str, name: str, n: int) -> None:
        """Take *n*; tokens are known when an answer has ended."""
        if budget in self._limits:
            self._bucket(budget, name).take(n)

    def _bucket(self, budget: str, name: str) -> Bucket:
        new = Bucket(self._limits[budget], monotonic())
        return self._buckets.setdefault((budget, name), new)
