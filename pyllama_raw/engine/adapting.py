"""The adapters that a request names: the lot of its rows, and the namespace of its prefixes."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from hashlib import sha256

from pyllama_raw.core.namespace import Adapted, Namespace, Private
from pyllama_raw.core.request import TOKENS, Lot, Request


@dataclass(slots=True, eq=False)
class KnownAdapter:
    """An adapter that is loaded, until it is freed."""

    name: str
    path: str
    n_bytes: int
    number: int  # in the executor
    digest: str  # of its file
    n_users: int = 0
    used: int = 0  # when, in the order of all uses
    is_named: bool = True  # new requests can have it


Chosen = list[tuple[KnownAdapter, float]]  # with the scale of each


def adapted(request: Request, chosen: Chosen) -> Request:
    """*request*, computed with the adapters *chosen*."""
    namespace = _namespace(chosen, request.namespace)
    return replace(request, lot=_lot(chosen), namespace=namespace)


def _lot(chosen: Chosen) -> Lot:
    if not chosen:
        return TOKENS
    names = ", ".join(f"{each.name}={scale:g}" for each, scale in chosen)
    adapters = tuple(sorted((each.number, scale) for each, scale in chosen))
    return Lot(f"tokens with {names}", adapters=adapters)


def _namespace(chosen: Chosen, namespace: Namespace) -> Namespace:
    """Namespace of the requests that share prefixes with one of these adapters."""
    if not chosen or isinstance(namespace, Private):
        return namespace
    assert not isinstance(namespace, Adapted)
    return Adapted(_digest(chosen).hex(), namespace)


def _digest(chosen: Chosen) -> bytes:
    """Digest of what these adapters compute."""
    facts = sorted((each.digest, scale) for each, scale in chosen)
    return sha256(json.dumps(facts).encode()).digest()
