"""
Bodies: bytes within a size and a time, values within a number and a depth, then a model.

Rules:
1. A body is counted before it is parsed, because parsing makes up to a hundred times its bytes
   of it, and the parsers hold the interpreter until they are done.
2. A large body is parsed and checked in a worker thread, and so is all else that looks at each
   of its parts. Few are at a time, so their memory is that of a few.
3. The first mistake is told. Lists and mappings stop at theirs (`fail_fast`), so there are not
   many to choose from.
4. What large bodies have taken goes back to the system when the last one of them is done with.
   The allocator of C keeps it otherwise, for each thread that has parsed one.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

from anyio import CancelScope, CapacityLimiter, move_on_after, sleep_forever, to_thread
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.types import Message, Receive

from pyllama_raw.options.machine import trim
from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.failures import Failure, refused, whole_characters, words_of
from pyllama_raw.serve.fields import Sorting

CLOSE = {"connection": "close"}  # what is left of the body is not read
SMALL = 2**14  # bytes
LINGER_S, LINGER_BYTES = 1.0, 2**26  # for the rest of a body that is refused
MAX_BYTES, MAX_MEDIA_BYTES = 2**23, 100 * 2**20  # of a body, without and with media
# Largest bodies that may be read at a time; at least so many bytes.
MANY, LEAST_MANY = 4, 2**28
INLINE = 2**16  # bytes that are read in the event loop
N_PARSERS = 2
MAX_BRANCHES = 64  # mistakes of a union that are told
MAX_DEPTH = 100
DRAINING = "the service is about to end: ask another one"

# Escapes, or bytes, of which two make a character; one alone is none.
HALVES = re.compile(rb"\\u[dD][89a-fA-F]|\xed[\xa0-\xbf]")

BRACKETS = b"[]{}"
OTHERS = bytes(set(range(256)) - set(BRACKETS))
STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


# -- bytes -------------------------------------------------------------------------------


class Bodies:
    """The bodies that are in work. Thread: that of the event loop."""

    def __init__(self, config: ServeConfig, *, has_media: bool = True) -> None:
        """
        Args:
            has_media: a model takes images or sounds, which come in base64.
        """
        usual = MAX_MEDIA_BYTES if has_media else MAX_BYTES
        self.max_bytes = config.max_body_bytes or usual
        self._max_values = config.max_body_values
        self._is_lenient = config.in_place_of is not None
        self._limit_s = config.body_s
        self._n_bytes = 0  # of all that are not whole
        self._max_all = max(MANY * self.max_bytes, LEAST_MANY)
        self._scopes: set[CancelScope] = set()  # of those that are not whole
        self._drains = False
        self._parsers: CapacityLimiter | None = None
        self._n_large = 0  # uses of large bodies

    def drain(self) -> None:
        """Refuse the bodies that are not whole."""
        self._drains = True
        for scope in self._scopes:
            scope.cancel()

    async def read(self, receive: Receive, length: str) -> bytes | None:
        """
        The whole body; None: the client left.

        Args:
            length: of the body, as its header tells.

        Raises:
            Failure: the body is too large or too slow, others fill the memory, or the service
                is about to end.
        """
        if length.isdecimal() and int(length) > self.max_bytes:
            raise self._too_large(f"has {length} bytes")
        content = bytearray()
        scope = move_on_after(self._limit_s)
        self._scopes.add(scope)
        try:
            with scope:
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    part = message.get("body", b"")
                    content += part
                    self._n_bytes += len(part)
                    # Nobody says how long a body in chunks is, so it is counted as it comes.
                    if len(content) > self.max_bytes:
                        raise self._too_large("has more")
                    if not message.get("more_body", False):
                        return bytes(content)
                    if self._n_bytes > self._max_all:
                        reason = "other bodies take all the memory for them: try again"
                        raise _unread(503, "server_is_overloaded", reason)
        finally:
            self._scopes.discard(scope)
            self._n_bytes -= len(content)
        # The scope was cancelled: by drain(), or because its time was over.
        if self._drains:
            raise _unread(503, "server_is_draining", DRAINING)
        reason = f"the body did not come within {self._limit_s:g} s (body_s)"
        raise _unread(408, "body_timeout", reason)

    @asynccontextmanager
    async def used(self, n_bytes: int) -> AsyncIterator[None]:
        """Around all use of a body of so many bytes, and of what is made of it."""
        if n_bytes <= INLINE:
            yield
            return
        self._n_large += 1
        try:
            yield
        finally:
            self._n_large -= 1
            if not self._n_large:
                with CancelScope(shield=True):  # its client may have left
                    await to_thread.run_sync(trim)

    async def run(self, function: Callable[[], T], n_bytes: int) -> T:
        """The result of *function* for a body of so many bytes, in a worker if these are many."""
        if n_bytes <= INLINE:
            return function()
        self._parsers = self._parsers or CapacityLimiter(N_PARSERS)
        async with self.used(n_bytes):
            return await to_thread.run_sync(function, limiter=self._parsers)

    async def parse(
        self, model: type[M], headers: Headers, body: bytes, ignored: list[str]
    ) -> M:
        """
        The *model* of a whole body.

        Args:
            ignored: gets the fields that change nothing here.

        Raises:
            Failure: names the field at fault.
        """
        if not body:
            raise refused("body", "Field required")
        coding = headers.get("content-encoding", "identity").strip().lower()
        if coding not in ("", "identity"):
            message = f"body: it is in {coding[:20]!r}: send it as it is, without content-encoding"
            raise Failure(415, "unsupported_encoding", message, "body")
        # A page of another host cannot leave the content type out, and cannot say JSON. curl says
        # another one, which llama-server does not look at.
        kind = headers.get("content-type")
        if kind and not self._is_lenient:
            main, _, sub = kind.partition(";")[0].strip().lower().partition("/")
            if main != "application" or not (sub == "json" or sub.endswith("+json")):
                message = "send it with the header `content-type: application/json`"
                raise refused("body", message)
        sorting = Sorting(ignored, self._is_lenient)
        read = partial(_model_of, model, body, self._max_values, sorting)
        return await self.run(read, len(body))

    def _too_large(self, size: str) -> Failure:
        limit = f"at most {self.max_bytes} bytes are allowed (max_body_bytes)"
        return _unread(413, "body_too_large", f"the body {size}: {limit}")


def _unread(status: int, code: str, message: str) -> Failure:
    return Failure(status, code, message, headers=CLOSE)


def is_small(headers: Headers) -> bool:
    """Whether a body comes with the head of its request, as far as the head tells."""
    length = headers.get("content-length", "")
    chunked = "transfer-encoding" in headers
    return not chunked and (not length or (length.isdecimal() and int(length) <= SMALL))


async def let_go(receive: Receive) -> None:
    """
    Pass over a body that nobody reads, for a while.

    A connection that is closed while its client still sends is reset, and an answer that is
    on its way may be lost.
    """
    n_bytes = 0
    with move_on_after(LINGER_S):
        while n_bytes < LINGER_BYTES:
            message = await receive()
            n_bytes += len(message.get("body", b""))
            if not message.get("more_body", False):
                return


def replayed(body: bytes) -> Receive:
    """
    A receive() that gives the *body* in one piece, and keeps nothing of it.

    The gate alone waits for the client to leave, and then cancels whoever waits here.
    """
    unread = [body]

    async def receive() -> Message:
        if not unread:
            await sleep_forever()
        return {"type": "http.request", "body": unread.pop(), "more_body": False}

    return receive


# -- values ------------------------------------------------------------------------------


def _model_of(model: type[M], body: bytes, max_values: int, sorting: Sorting) -> M:
    check_values(body, max_values)
    try:
        values = json.loads(str(body, "utf-8-sig", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise refused("body", f"JSON decode error: {error}") from None
    if not isinstance(values, dict):
        raise refused("body", "give an object of JSON")
    # A program that cuts a text may leave half of a character, and its history has that for ever.
    if HALVES.search(body):
        values = whole_characters(values)
    try:
        return model.model_validate(values, context=sorting)
    except ValidationError as error:
        raise _mistake(error, values) from None


def check_values(body: bytes, max_values: int) -> None:
    """
    Raise Failure if JSON has too many values, or is nested too deep.

    Values are counted by what stands before each of them: a comma or a bracket. What is no JSON
    is counted up to its first mistake at least, where the parser stops, too.
    """
    # Few signs are few values, also if none of them stands within a text.
    n_brackets = body.count(b"[") + body.count(b"{")
    if n_brackets <= MAX_DEPTH and n_brackets + body.count(b",") <= max_values:
        return
    limit = f"at most {max_values} values are allowed (max_body_values)"
    excess = refused("body", f"it has too many values: {limit}", "too_many_values")
    # Without escapes each quote begins or ends a text: two texts for a value, its name and itself.
    content = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if content.count(b'"') > 4 * max_values:
        raise excess
    # Only signs outside of texts count.
    outside = b"".join(content.split(b'"')[::2])
    n_values = outside.count(b"[") + outside.count(b"{") + outside.count(b",")
    if n_values > max_values:
        raise excess
    steps = map(STEPS.__getitem__, outside.translate(None, OTHERS))
    if max(accumulate(steps), default=0) > MAX_DEPTH:
        raise refused("body", f"it is nested too deep: at most {MAX_DEPTH} levels")


def _mistake(error: ValidationError, values: Any) -> Failure:
    """The deepest mistake, with the field as OpenAI writes it: `messages[0].content`."""
    mistakes = error.errors(
        include_url=False, include_context=False, include_input=False
    )
    first = max(mistakes, key=lambda mistake: len(mistake["loc"]))
    name = _place(first["loc"], values, is_missing=first["type"] == "missing")
    # A value that fits no branch of a union has a mistake for each.
    same = [
        mistake
        for mistake in mistakes[:MAX_BRANCHES]
        if mistake is first
        or _place(mistake["loc"], values, is_missing=mistake["type"] == "missing")
        == name
    ]
    return refused(name, words_of(same))


def _place(loc: Sequence[str | int], values: Any, *, is_missing: bool) -> str:
    """The field at *loc*, without pydantic's names for the branches of a union."""
    name, at = "", values
    for part in loc:
        if isinstance(at, dict) and (part in at or is_missing):
            name += f".{part}"
            at = at.get(part)
        elif isinstance(at, list) and isinstance(part, int):
            name += f"[{part}]"
            at = at[part] if part < len(at) else None  # one may be missing
    return name.removeprefix(".") or str(loc[-1] if loc else "body")
