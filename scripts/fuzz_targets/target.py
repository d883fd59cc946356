"""
What scripts/fuzz.py tries: a reader of bytes from outside, and bytes that it may get.

A target makes a function of bytes, in the process that will call it. Whatever the bytes are, the
function returns or raises one of the errors that the reader promises, within limits of CPU time and
memory. A target whose reader works in a process of its own, with such limits, may exceed them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Try = Callable[[bytes], None]
JSON_WORDS = (b"{", b"}", b"[", b"]", b",", b":", b'"', b"null", b"true", b"1e999", b"-0", b"\\u0000", b"\\ud800", b"NaN")  # fmt: skip


@dataclass(frozen=True, slots=True)
class Target:
    """One reader."""

    name: str
    make: Callable[[], Try]
    seeds: Callable[[], list[bytes]]
    allowed: tuple[type[Exception], ...]
    words: tuple[bytes, ...] = ()  # that the format has
    n_head: int = 0  # bytes in front that choose among readers
    max_cpu_s: float = 5.0  # of a case
    max_mib: int = 1024  # of addresses, beside those that there are before
    max_bytes: int = 2**13  # of a case
    may_exceed: bool = False
