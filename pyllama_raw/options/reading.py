"""Reading objects of strangers, which may raise whatever they like."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyllama_raw.errors import InvalidRequest, PyllamaError


@contextmanager
def reading(name: str, value: object, allowed: str) -> Iterator[None]:
    """Turn what *value* raises while it is looked at into words of what is allowed."""
    try:
        yield
    except PyllamaError:
        raise
    except Exception as error:
        raise InvalidRequest(name, value, allowed) from error
