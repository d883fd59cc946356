"""The adapters that a request names: the lot of its rows, and the namespace of its prefixes."""

from __future__ import annotations

import json
from dataclasses import replace
from hashlib import sha256
from typing import NamedTuple

from pyllama_raw.core.namespace import Adapted, Namespace, Private
from pyllama_raw.core.request import TOKENS, Lot, Request


class Chosen(NamedTuple):
    """An adapter that changes a request."""

    name: str
    number: int  # in the executor
    scale: float
    digest: str  # of its file


def adapted(request: Request, chosen: list[Chosen]) -> Request:
    """*request*, computed with the adapters *chosen*."""
    namespace = _namespace(chosen, request.namespace)
    return replace(request, lot=_lot(chosen), namespace=namespace)


def _lot(chosen: list[Chosen]) -> Lot:
    if not chosen:
        return TOKENS
    names = ", ".join(f"{each.name}={each.scale:g}" for each in chosen)
    adapters = tuple(sorted((each.number, each.scale) for each in chosen))
    return Lot(f"tokens with {names}", adapters=adapters)


def _namespace(chosen: list[Chosen], namespace: Namespace) -> Namespace:
    """Namespace of the requests that share prefixes with one of these adapters."""
    if not chosen or isinstance(namespace, Private):
        return namespace
    assert not isinstance(namespace, Adapted)
    return Adapted(_digest(chosen).hex(), namespace)


def _digest(chosen: list[Chosen]) -> bytes:
    """Digest of what these adapters compute."""
    facts = sorted((each.digest, each.scale) for each in chosen)
    return sha256(json.dumps(facts).encode()).digest()
