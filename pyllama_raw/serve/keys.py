"""
Keys of clients: from a file or the environment, never from a command line, which others see.

A line is a key, or the name of its owner and the key; `#` begins a comment. In the
environment commas stand between them. The key of the owner `admin` opens all, and alone opens
what changes the service. That of the owner `monitor` sees what the requests of all do; other keys
see their own only.

Keys are looked up by digests, whose hashes in a dict are keyed by a secret of this process, so
how long a comparison takes tells nothing about a key.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from pyllama_raw.errors import ConfigError
from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.failures import Failure

VARIABLE = "PYLLAMA_RAW_API_KEYS"
ADMIN, MONITOR = "admin", "monitor"  # owners whose keys have a right


class Key(NamedTuple):
    """The owner of a key, and the digest of the key that salts are derived from."""

    name: str
    digest: bytes

    @property
    def sees_all(self) -> bool:
        """Whether the key may be told of the requests of others."""
        return self.name in (ADMIN, MONITOR)

    def salt(self, given: str | None) -> str:
        """The cache_salt for a request that gives *given*: no other key has the same."""
        mixed = (given or "").encode("utf-8", "surrogatepass")
        return hashlib.blake2b(mixed, key=self.digest, digest_size=16).hexdigest()


class Keys:
    """The keys that are allowed; without any, all may come in."""

    def __init__(self, config: ServeConfig) -> None:
        """Raises ConfigError: the file or the variable has no key, or a line is none."""
        self._owners: dict[bytes, Key] = {}
        if config.api_keys_file is not None:
            path = Path(config.api_keys_file)
            try:
                self._add(path.read_text().splitlines(), str(path))
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"the keys in {path}: {error}") from error
        if (value := os.environ.get(VARIABLE)) is not None:
            self._add(value.split(","), VARIABLE)

    def __bool__(self) -> bool:
        """Whether there are keys."""
        return bool(self._owners)

    def check(self, given: Mapping[str, str], right: str | None = None) -> Key | None:
        """
        The key of a request; None: there are no keys.

        Args:
            given: its headers.
            right: the request needs it: ADMIN to change the service, MONITOR to see all of it.

        Raises:
            Failure: it may not come in.
        """
        key = self._find(given)
        if key is None and self._owners:
            headers = {"www-authenticate": "Bearer"}
            message = "a key is needed, as `Authorization: Bearer KEY` or `X-Api-Key`"
            raise Failure(401, "invalid_api_key", message, headers=headers)
        if right == ADMIN and (key is None or key.name != ADMIN):
            message = f"this needs a key of {ADMIN!r}, which a service may not have"
            raise Failure(403, "admin_key_needed", message)
        if right == MONITOR and key is not None and not key.sees_all:
            message = f"this tells of the requests of all: use a key of {MONITOR!r} or {ADMIN!r}"
            raise Failure(403, "monitor_key_needed", message)
        return key

    def _find(self, given: Mapping[str, str]) -> Key | None:
        kind, _, token = given.get("authorization", "").partition(" ")
        token = token if kind.lower() == "bearer" else ""
        found = (
            self._owners.get(_digest(key.strip().encode("latin-1")))
            for key in (token, given.get("x-api-key", ""))
        )
        return next(filter(None, found), None) if self._owners else None

    def _add(self, lines: list[str], where: str) -> None:
        n_before = len(self._owners)
        for number, line in enumerate(lines, 1):
            words = line.partition("#")[0].split()
            if len(words) > 2:
                raise ConfigError(f"line {number} of {where} is no key, nor NAME KEY")
            if words:
                name = words[0] if len(words) == 2 else f"key{number}"
                digest = _digest(words[-1].encode())
                self._owners[digest] = Key(name, digest)
        if len(self._owners) == n_before:
            raise ConfigError(f"{where} has no keys: give one, or leave {where} out")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
