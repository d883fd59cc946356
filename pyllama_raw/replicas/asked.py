"""Facts that a router reads in a request: the beginning of its prompt, its length, its session."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic_core import from_json, to_json

from pyllama_raw.routing import RoutedRequest, prefixes

BLOCK_BYTES = 256  # of a prompt as JSON: about 64 tokens
TOKEN_BYTES = 4  # about
MAX_BYTES = 2**18  # of a prompt that are looked at
N_OUTPUT = 256  # tokens, of a request that does not say
PROMPTS = ("messages", "prompt", "input", "documents")
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens", "n_predict")
# What stands before the prompt, or beside it.
SPACE = ("model", "cache_salt", "adapters", "tools", "system")


def asked_of(headers: Mapping[str, str], body: bytes) -> RoutedRequest:
    """The request of *headers* and *body*; one that is no JSON has no prompt."""
    try:
        found = from_json(body)
    except ValueError:
        found = None
    fields: dict[str, Any] = found if isinstance(found, dict) else {}
    session = headers.get("x-session-id") or fields.get("prompt_cache_key")
    data = b",".join(_parts(fields))
    space = to_json([fields.get(name) for name in SPACE])
    limits = (fields.get(name) for name in LIMITS)
    n_output = next((each for each in limits if isinstance(each, int)), N_OUTPUT)
    return RoutedRequest(
        len(data) // TOKEN_BYTES + max(n_output, 0),
        prefixes(data[:MAX_BYTES], BLOCK_BYTES, space) if data else (),
        session if isinstance(session, str) else None,
    )


def _parts(fields: Mapping[str, Any]) -> list[bytes]:
    """The prompt in pieces; a chat that goes on begins with the pieces that it had."""
    prompt: Any = next((fields[name] for name in PROMPTS if fields.get(name)), [])
    if isinstance(prompt, list):
        return [to_json(part) for part in prompt]
    return [to_json(prompt)[1:-1]]
