"""
Bodies: bytes within a size and a time, values within a number and a depth, then a model.

Rules:
1. A body is counted before it is parsed, because parsing makes up to a hundred times its bytes
   of it, and the parsers hold the interpreter until they are done.
2. A large body is parsed and checked in a worker thread, and so is all else that looks at each
   of its parts. Few are at a time, so their memory is that of a few.
3. The first mistake is told. Lists and mappings stop at theirs (`fail_fast`), so there are not
   many to choose from.
4. What large bodies have taken goes back to the system once no other one has come for a while.
   The allocator of C keeps it otherwise, for each thread that has parsed one.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import accumulate
from threading import Lock, Thread
from time import monotonic, sleep
from typing import Any, TypeVar

from anyio import CancelScope, CapacityLimiter, move_on_after, sleep_forever, to_thread
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.types import Message, Receive

from pyllama_raw.options.machine import trim
from pyllama_raw.serve.config import ServeConfig
from pyllama_raw.serve.exchange import current
from pyllama_raw.serve.failures import Failure, refused, words_of

CLOSE = {"connection": "close"}  # what is left of the body is not read
SMALL = 2**14  # bytes
LINGER_S, LINGER_BYTES = 1.0, 2**26  # for the rest of a body that is refused
MAX_BYTES, MAX_MEDIA_BYTES = 2**23, 100 * 2**20  # of a body, without and with media
MANY, LEAST_MANY = (
    4,
    2**28,
)  # largest bodies that may be read at a time; at least so many bytes
INLINE = 2**16  # bytes that are read in the event loop
N_PARSERS = 2
QUIET_S = 1.0  # behind the last large body
MAX_BRANCHES = 64  # mistakes of a union that are told
MAX_DEPTH = 100
DRAINING = "the service is about to end: ask another one"

BRACKETS = b"[]{}"
OTHERS = bytes(set(range(256)) - set(BRACKETS))
STEPS = {ord("["): 1, ord("{"): 1, ord("]"): -1, ord("}"): -1}

M = TypeVar("M", bound=BaseModel)
T = TypeVar("T")


class Bodies:
    """The bodies that are being read. Thread: that of the event loop."""

    def __init__(self, config: ServeConfig, *, has_media: bool = True) -> None:
        """
        Args:
            has_media: a model takes images or sounds, which come in base64.
        """
        usual = MAX_MEDIA_BYTES if has_media else MAX_BYTES
        self._max_bytes = config.max_body_bytes or usual
        self._max_values = config.max_body_values
        self._limit_s = config.body_s
        self._n_bytes = 0  # of all
        self._max_all = max(MANY * self._max_bytes, LEAST_MANY)
        self._scopes: set[CancelScope] = set()  # of those that are not whole
        self._drains = False
        self._parsers: CapacityLimiter | None = None
        self._trimmer = Trimmer(trim)

    def check(self, length: str) -> None:
        """Raise Failure if a body of the *length* that its header tells is too large."""
        if length.isdecimal() and int(length) > self._max_bytes:
            raise self._too_large(f"has {length} bytes")

    def drain(self) -> None:
        """Refuse the bodies that are not whole."""
        self._drains = True
        for scope in self._scopes:
            scope.cancel()

    async def read(self, receive: Receive) -> bytes | None:
        """
        The whole body; None: the client left.

        Raises:
            Failure: the body is too large or too slow, others fill the memory, or the service
                is about to end.
        """
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
                    if len(content) > self._max_bytes:
                        raise self._too_large("has more")
                    if not message.get("more_body", False):
                        return bytes(content)
                    if self._n_bytes > self._max_all:
                        reason = "other bodies take all the memory for them: try again"
                        raise _unread(503, "server_is_overloaded", reason)
        finally:
            self._scopes.discard(scope)
            self._n_bytes -= len(content)
        if self._drains:
            raise _unread(503, "server_is_draining", DRAINING)
        reason = f"the body did not come within {self._limit_s:g} s (body_s)"
        raise _unread(408, "body_timeout", reason)

    async def made(self, model: type[M], headers: Headers, body: bytes) -> M:
        """The *model* of a whole body. Raises Failure, which names the field at fault."""
        if not body:
            raise refused("body", "Field required")
        if not _is_json(headers.get("content-type")):
            message = "send it with the header `content-type: application/json`"
            raise refused("body", message)
        return await self.run(partial(_made, model, body, self._max_values), len(body))

    async def walk(self, function: Callable[[], T]) -> T:
        """
        What *function* makes of the body of the current request, in a worker if that is large.

        Args:
            function: looks at each part of the body, of which there may be `max_body_values`.
                It may read what the service shares, and change nothing of it.
        """
        exchange = current()
        return await self.run(function, 0 if exchange is None else exchange.n_read)

    async def run(self, function: Callable[[], T], n_bytes: int) -> T:
        """What *function* makes of a body of so many bytes."""
        if n_bytes <= INLINE:
            return function()
        self._trimmer.used()
        self._parsers = self._parsers or CapacityLimiter(N_PARSERS)
        return await to_thread.run_sync(function, limiter=self._parsers)

    def ended(self, n_bytes: int) -> None:
        """A body of so many bytes, and all that was made of it, is not needed any more."""
        if n_bytes > INLINE:
            self._trimmer.used()

    def _too_large(self, size: str) -> Failure:
        limit = f"at most {self._max_bytes} bytes are allowed (max_body_bytes)"
        return _unread(413, "body_too_large", f"the body {size}: {limit}")


def _unread(status: int, code: str, message: str) -> Failure:
    return Failure(status, code, message, headers=CLOSE)


def _is_json(kind: str | None) -> bool:
    """Whether a body of this content type is JSON; a page of another host cannot leave it out."""
    if not kind:
        return True
    main, _, sub = kind.partition(";")[0].strip().lower().partition("/")
    return main == "application" and (sub == "json" or sub.endswith("+json"))


def _made(model: type[M], body: bytes, max_values: int) -> M:
    check_values(body, max_values)
    try:
        values = json.loads(str(body, "utf-8-sig", "surrogatepass"))
    except (ValueError, RecursionError) as error:
        raise refused("body", f"JSON decode error: {error}") from None
    if not isinstance(values, dict):
        raise refused("body", "give an object of JSON")
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise _mistake(error, values) from None


def check_values(body: bytes, max_values: int) -> None:
    """
    Raise Failure if JSON has too many values, or is nested too deep.

    Values are counted by what stands before each of them: a comma or a bracket. What is no JSON
    is counted up to its first mistake at least, where the parser stops, too.
    """
    n_opened = body.count(b"[") + body.count(b"{")
    if n_opened <= MAX_DEPTH and n_opened + body.count(b",") <= max_values:
        return  # also if none of them stands within a text
    whole = body.replace(rb"\\", b"").replace(rb"\"", b"")
    if (
        whole.count(b'"') > 4 * max_values
    ):  # two texts for each value, its name and itself
        raise _too_many(max_values)
    outside = b"".join(whole.split(b'"')[::2])
    n_values = outside.count(b"[") + outside.count(b"{") + outside.count(b",")
    if n_values > max_values:
        raise _too_many(max_values)
    steps = map(STEPS.__getitem__, outside.translate(None, OTHERS))
    if max(accumulate(steps), default=0) > MAX_DEPTH:
        raise refused("body", f"it is nested too deep: at most {MAX_DEPTH} levels")


def _too_many(max_values: int) -> Failure:
    limit = f"at most {max_values} values are allowed (max_body_values)"
    return refused("body", f"it has too many values: {limit}", "too_many_values")


def _mistake(error: ValidationError, values: Any) -> Failure:
    """The deepest mistake, with the field as OpenAI writes it: `messages[0].content`."""
    mistakes = error.errors(
        include_url=False, include_context=False, include_input=False
    )
    first = max(mistakes, key=lambda mistake: len(mistake["loc"]))
    name = _place(first["loc"], values, is_missing=first["type"] == "missing")
    same = [  # a value that fits no branch of a union has a mistake for each
        one
        for one in mistakes[:MAX_BRANCHES]
        if one is first
        or _place(one["loc"], values, is_missing=one["type"] == "missing") == name
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


class Trimmer:
    """
    Calls *trim* in a thread of its own once no memory was used for *quiet_s*.

    There is a thread only until then.
    """

    def __init__(self, trim: Callable[[], object], quiet_s: float = QUIET_S) -> None:
        self._trim, self._quiet_s = trim, quiet_s
        self._lock = Lock()
        self._latest = 0.0
        self._thread: Thread | None = None

    def used(self) -> None:
        """Much memory was taken or given back just now. Thread: any."""
        with self._lock:
            self._latest = monotonic()
            if self._thread is None:
                thread = Thread(target=self._wait, name="trimmer", daemon=True)
                with suppress(RuntimeError):  # no thread can be started just now
                    thread.start()
                    self._thread = thread

    def _wait(self) -> None:
        while True:
            with self._lock:
                left_s = self._latest + self._quiet_s - monotonic()
                if left_s <= 0:
                    self._thread = None
                    break
            sleep(left_s)
        self._trim()


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
