"""
What the adapters that a request names make of it: its lots, and with whom it shares prefixes.

An aLoRA is at work from the last place on where the prompt has its invocation tokens; without
these it is left out. Rows before it are computed without it, and are in the caches of all who
do without it. Those behind are in the same caches, under a number in place of the last tokens
before it, because nobody else has what they see.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import replace
from hashlib import sha256
from typing import NamedTuple

from pyllama_raw.core.exact import N_FRESH
from pyllama_raw.core.namespace import Adapted, Namespace, Private
from pyllama_raw.core.request import TOKENS, Lot, Request
from pyllama_raw.core.spans import Span
from pyllama_raw.engine.span_keys import SpanKeys
from pyllama_raw.errors import InvalidRequest


class Chosen(NamedTuple):
    """An adapter that changes a request."""

    name: str
    number: int  # in the executor
    scale: float
    digest: str  # of its file
    invocation: tuple[int, ...]  # of an aLoRA


def adapted(request: Request, chosen: list[Chosen], keys: SpanKeys) -> Request:
    """
    *request*, computed with the adapters *chosen*.

    Raises:
        InvalidRequest: there are two aLoRAs, or one beside images.
    """
    invoked = [each for each in chosen if each.invocation]
    others = [each for each in chosen if not each.invocation]
    if len(invoked) > 1:
        given = ", ".join(each.name for each in invoked)
        raise InvalidRequest("adapters", given, "at most one aLoRA")
    start = _find_last(request.tokens, invoked[0].invocation) if invoked else None
    if not start:  # all rows are computed alike
        here = others if start is None else chosen
        namespace = _namespace(here, request.namespace)
        return replace(request, lot=_lot(here), namespace=namespace)
    if request.spans:
        allowed = "no aLoRA beside images and sounds"
        raise InvalidRequest("adapters", invoked[0].name, allowed)
    first = max(start - N_FRESH, 0)  # a single row would be computed in another way
    tokens = request.tokens[:]
    text = tokens[first:start]
    key = sha256(_digest(invoked) + text.tobytes()).digest()
    tokens[first:start] = array("i", [keys.number(key)]) * len(text)
    return replace(
        request,
        tokens=tokens,
        spans=(Span(first, start, len(text), key=key, text=tuple(text)),),
        lot=_lot(chosen),
        first_lot=_lot(others),
        namespace=_namespace(others, request.namespace),
    )


def _lot(chosen: list[Chosen]) -> Lot:
    if not chosen:
        return TOKENS
    names = ", ".join(f"{each.name}={each.scale:g}" for each in chosen)
    adapters = tuple(sorted((each.number, each.scale) for each in chosen))
    return Lot(f"tokens with {names}", adapters=adapters)


def _namespace(chosen: list[Chosen], namespace: Namespace) -> Namespace:
    """With whom requests with these adapters share prefixes."""
    if not chosen or isinstance(namespace, Private):
        return namespace
    assert not isinstance(namespace, Adapted)
    return Adapted(_digest(chosen).hex(), namespace)


def _digest(chosen: list[Chosen]) -> bytes:
    """Of what these adapters compute."""
    facts = sorted((each.digest, each.scale) for each in chosen)
    return sha256(json.dumps(facts).encode()).digest()


def _find_last(tokens: array[int], wanted: tuple[int, ...]) -> int | None:
    """Where the last run of *wanted* begins; None: there is none."""
    run, n = array("i", wanted), len(wanted)
    for at in range(len(tokens) - n, -1, -1):
        if tokens[at] == run[0] and tokens[at : at + n] == run:
            return at
    return None
