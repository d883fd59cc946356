"""Namespaces: only requests whose namespaces are equal share cached prefixes."""

from __future__ import annotations

from typing import NamedTuple


class Private:
    """The namespace of a single request. No caller can name it, so no caller shares it."""

    __slots__ = ()  # equal to itself only


class Adapted(NamedTuple):
    """The namespace of requests with the same adapters at the same scales."""

    digest: str  # of these
    salt: str | None


# A salt; of one request; of all without a salt.
Namespace = str | Private | Adapted | None


def is_of(namespace: Namespace, salt: str | Private | None) -> bool:
    """Whether the callers that give *salt* use *namespace*; None: any callers."""
    if isinstance(namespace, Adapted):
        namespace = namespace.salt
    return salt is None or namespace == salt
