"""
Keys of clients: from a file or the environment, never from a command line, which others see.

A line is a key, or the name of its owner and the key; `#` begins a comment. In the
environment commas stand between them. The key of the owner `admin` opens all, and alone opens
what changes the service.

Keys are looked up by digests that are keyed by a secret of this process, so how long a
comparison takes tells nothing about a key.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from pyllama_raw.errors import ConfigError
from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.failures import Failure

VARIABLE = "PYLLAMA_RAW_API_KEYS"
ADMIN = "admin"


class Key(NamedTuple):
    """The owner of a key, and what its salts are derived from."""

    name: str
    seed: bytes

    def salt(self, given: str | None) -> str:
        """The cache_salt for a request that gives *given*: no other key has the same."""
        mixed = (given or "").encode("utf-8", "surrogatepass")
        return hashlib.blake2b(mixed, key=self.seed, digest_size=16).hexdigest()


class Keys:
    """The keys that are allowed; without any, all may come in."""

    def __init__(self, keys: Mapping[str, str]) -> None:
        """
        Args:
            keys: owners by their keys.
        """
        self._secret = secrets.token_bytes(32)
        self._owners = {
            self._digest(key.encode()): Key(name, hashlib.sha256(key.encode()).digest())
            for key, name in keys.items()
        }
        self.has_admin = ADMIN in keys.values()

    @classmethod
    def of(cls, config: ServeConfig) -> Keys:
        """
        Those of the file and of the environment.

        Raises:
            ConfigError: there is no such file, or it has no key, or a line is none.
        """
        keys: dict[str, str] = {}
        if config.api_keys_file is not None:
            path = Path(config.api_keys_file)
            try:
                lines = path.read_text().splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(
                    f"the keys in {path} cannot be read: {error}"
                ) from error
            keys |= _read(lines, str(path))
        if (value := os.environ.get(VARIABLE)) is not None:
            keys |= _read(value.split(","), VARIABLE)
        return cls(keys)

    def __len__(self) -> int:
        return len(self._owners)

    def check(self, given: Mapping[str, str], *, changes: bool) -> Key | None:
        """
        The key of a request; None: there are no keys.

        Args:
            given: its headers.
            changes: the request changes the service.

        Raises:
            Failure: it may not come in.
        """
        key = self._find(given)
        if key is None and self._owners:
            headers = {"www-authenticate": "Bearer"}
            message = "a key is needed, as `Authorization: Bearer KEY` or `X-Api-Key`"
            raise Failure(401, "invalid_api_key", message, headers=headers)
        if changes and (key is None or key.name != ADMIN):
            message = f"this needs the key of {ADMIN!r}" + (
                "" if self.has_admin else ", and the service was started without one"
            )
            raise Failure(403, "admin_key_needed", message)
        return key

    def _find(self, given: Mapping[str, str]) -> Key | None:
        if not self._owners:
            return None
        kind, _, token = given.get("authorization", "").partition(" ")
        token = token if kind.lower() == "bearer" else ""
        found = (
            self._owners.get(self._digest(key.strip().encode("latin-1")))
            for key in (token, given.get("x-api-key", ""))
        )
        return next(filter(None, found), None)

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret).digest()


def _read(lines: list[str], where: str) -> dict[str, str]:
    keys = dict(_pairs(lines, where))
    if not keys:
        raise ConfigError(f"{where} has no key: give one, or leave {where} out")
    return keys


def _pairs(lines: list[str], where: str) -> Iterator[tuple[str, str]]:
    """Keys with the names of their owners."""
    for number, line in enumerate(lines, 1):
        words = line.partition("#")[0].split()
        if len(words) > 2:
            raise ConfigError(f"line {number} of {where} is no key, nor NAME KEY")
        if words:
            yield words[-1], words[0] if len(words) == 2 else f"key{number}"
