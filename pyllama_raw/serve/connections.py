"""
Connections of the server: what a client may send before, between and after its requests.

uvicorn's protocol over httptools parses whatever comes. This one bounds it.

Rules:
1. A head has 64 KiB at most, and so has all else that is no body: lines between requests, what
   stands beside the length of a chunk, and trailers. Nobody collects more, so the parser, which
   adds part to part, has no large ones.
2. A head comes within head_s, as does the rest of a body whose answer is already sent. Bodies
   that are read have a limit of their own (serve/reading.py).
3. A client that has read nothing for send_s, while something is there for it, has left.
4. At the limit of connections a new one takes the place of one whose client owes something: of
   these the one that has been silent longest, then of the idle ones. If all are being answered,
   the new one is told so.
5. What comes behind a request waits until few answers are ahead of it.
6. A client of HTTP/1.0 gets an answer without chunks, which ends with the connection.
7. In the place of llama-server names of headers begin with large letters, as there, because some
   clients compare them letter by letter.
"""

from __future__ import annotations

from asyncio import Transport
from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

import httptools
from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from pyllama_raw.serve.failures import Failure

MAX_HEAD = 2**16  # bytes
SLICE = 2**12  # bytes that are parsed at once
MAX_AHEAD = 16  # requests of a connection that wait for their turn
LINGER_S, LINGER_BYTES = 1.0, 2**26  # for what comes behind a request that is refused

# Headers of a wish for another protocol, and of a body.
HOPS = (b"connection", b"upgrade", b"http2-settings")
FRAMES = {b"content-length", b"transfer-encoding"}
TUNNEL = b"CONNECT"

TOO_LARGE = Failure(
    431,
    "head_too_large",
    f"the head of the request is too large: at most {MAX_HEAD} bytes are allowed",
)
NO_HTTP = Failure(400, "invalid_request", "this is no request of HTTP/1.1")
TOO_MANY = Failure(
    503,
    "server_is_overloaded",
    "all connections are being answered (max_connections): try again, or elsewhere",
)


@dataclass(eq=False)
class Connections:
    """
    The connections of a server, in the order in which their clients have last sent something.

    Thread: that of the event loop.
    """

    head_s: float
    max_connections: int
    send_s: float = 60.0  # until the service is there, whose option it is
    has_titles: bool = False
    """Whether names of headers are written as in Content-Type."""
    all: dict[Connection, None] = field(default_factory=dict)
    owing: dict[Connection, None] = field(default_factory=dict)
    """Connections whose clients have not sent all of a request."""
    idle: dict[Connection, None] = field(default_factory=dict)
    """Connections that have been answered, and may be used again."""

    def make_room(self) -> bool:
        """Whether there is room for one more connection, of which one may have been made."""
        if len(self.all) < self.max_connections:
            return True
        silent = next(iter(self.owing), None) or next(iter(self.idle), None)
        if silent is None:
            return False
        silent.abort()
        return True

    def sweep(self, now: float) -> None:
        """Close what is over its time; to be called about once a second."""
        for connection in list(self.all):
            if connection.is_late(now, self.head_s, self.send_s):
                connection.abort()

    def note(self, connection: Connection) -> None:
        """Put *connection* at the end of those that are as it is now."""
        self.owing.pop(connection, None)
        self.idle.pop(connection, None)
        if connection.owes:
            self.owing[connection] = None
        elif not connection.is_answered:
            self.idle[connection] = None

    def leave(self, connection: Connection) -> None:
        """Forget *connection*; can be repeated."""
        for group in (self.all, self.owing, self.idle):
            group.pop(connection, None)


class Connection(HttpToolsProtocol):
    """One connection."""

    group: ClassVar[Connections]  # of the server; see of()

    @classmethod
    def of(cls, connections: Connections) -> type[Connection]:
        """The class for uvicorn, which makes its protocols itself."""
        return type(cls.__name__, (cls,), {"group": connections})

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._unparsed = b""
        self._running: RequestResponseCycle | None = None  # the request in work
        self._n_quiet = (
            0  # bytes that were parsed since a head was whole, or a part of a body
        )
        self._n_head = 0  # bytes of the names and values of a head
        self._is_quiet = True
        self._in_head, self._in_message = True, False
        self._is_refused = False  # nothing more is parsed
        self._is_upgrade = False  # of a request with a body, whose head is parsed again
        self._n_let_go = 0
        self._since: float | None = None  # when the client began to owe something
        self._unread = 0  # bytes that the client has not read, at the latest look
        self._unread_since: float | None = None

    # -- what the group asks ------------------------------------------------------------

    @property
    def is_answered(self) -> bool:
        """Whether a request is in work."""
        return bool(self.cycle) and not self.cycle.response_complete

    @property
    def owes(self) -> bool:
        """Whether the client has to send the rest of a request."""
        if self.is_answered:
            return bool(self.cycle.more_body) and not self.cycle.response_started
        return self._since is not None

    def is_late(self, now: float, head_s: float, send_s: float) -> bool:
        """Whether the client has let a limit pass."""
        unread = self.transport.get_write_buffer_size()
        if not unread or self._unread_since is None or unread < self._unread:
            self._unread_since = now if unread else None
        self._unread = unread
        if self._unread_since is not None and now - self._unread_since >= send_s:
            return True
        if self.is_answered or self._since is None:
            return False
        return now - self._since >= head_s

    def abort(self) -> None:
        """Close at once, with what is unsent."""
        self.group.leave(self)
        self._end_work()
        self.transport.abort()

    def _end_work(self) -> None:
        """Tell the request in work that its client has left; uvicorn tells the latest one."""
        self.pipeline.clear()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    # -- the transport ------------------------------------------------------------------

    def connection_made(self, transport: Transport) -> None:  # type: ignore[override]
        """Take a place among the connections."""
        if self.group.has_titles:
            transport = cast("Transport", TitledTransport(transport))
        super().connection_made(transport)
        if self.group.make_room():
            self._since = self.loop.time()
            self.group.all[self] = None
            self.group.note(self)
        else:
            self._refuse(TOO_MANY)
            self.transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Leave."""
        self.group.leave(self)
        self._end_work()
        self._unparsed, self._is_refused = b"", True
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what comes, as far as it is its turn."""
        if self._is_refused:
            self._n_let_go += len(data)
            if self._n_let_go > LINGER_BYTES:
                self.abort()
            return
        self._unset_keepalive_if_required()
        if self._since is None and not self.is_answered:
            self._since = self.loop.time()
        self._unparsed = self._unparsed + data if self._unparsed else data
        self._parse()
        if self._unparsed:
            self.flow.pause_reading()
        self.group.note(self)

    def on_response_complete(self) -> None:
        """Go on with what came behind the request."""
        self._running = self.pipeline[-1][0] if self.pipeline else None
        super().on_response_complete()
        if self.transport.is_closing():
            self._is_refused = True
            return
        self._parse()
        if self._unparsed:
            self.flow.pause_reading()
        if self.is_answered:
            self._unset_keepalive_if_required()
        else:
            owes = self._in_message or bool(self._unparsed)
            self._since = self.loop.time() if owes else None
        self.group.note(self)

    def _parse(self) -> None:
        data, at = memoryview(self._unparsed), 0
        while (
            at < len(data) and len(self.pipeline) < MAX_AHEAD and not self._is_refused
        ):
            part = data[at : at + SLICE]
            at += len(part)
            self._is_quiet = True
            try:
                self.parser.feed_data(part)
            # The request is answered as any other.
            except httptools.HttpParserUpgrade as upgrade:
                if self._is_upgrade:
                    at += upgrade.args[0] - len(part)
                    self._parse_head_again()
                else:
                    self._end()
            except httptools.HttpParserError:
                self._refuse(NO_HTTP)
            self._n_quiet = self._n_quiet + len(part) if self._is_quiet else 0
            if max(self._n_quiet, self._n_head) > MAX_HEAD:
                self._refuse(TOO_LARGE)
        self._unparsed = b"" if self._is_refused else bytes(data[at:])

    def _parse_head_again(self) -> None:
        """
        Parse the head without the wish for another protocol, which nobody has to grant.

        Clients of Java have it by default, and httptools takes no body behind it.
        """
        version = self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (self.parser.get_method(), self.url, version)]
        lines += [
            b"%b: %b" % header for header in self.headers if header[0] not in HOPS
        ]
        self._is_upgrade = False
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self.parser.feed_data(b"\r\n".join([*lines, b"", b""]))

    def _refuse(self, failure: Failure) -> None:
        """Answer *failure* if it is its turn, and parse no more."""
        if self._is_refused:
            return
        self._end()
        if self.is_answered:
            if not self.cycle.more_body:
                return  # the connection ends with the answers that are on their way
            if self.pipeline or self.cycle.response_started:
                self.abort()  # the body is wrong, and an answer is already being sent
                return
            self.cycle.disconnected = True  # it waits for a body that does not come
            self.cycle.message_event.set()
        answer = failure.answer("/")
        headers = [*self.server_state.default_headers, *answer.raw_headers]
        lines = [b"%b: %b\r\n" % pair for pair in [*headers, (b"connection", b"close")]]
        head = STATUS_LINE[failure.status] + b"".join(lines) + b"\r\n"
        self.transport.write(head + bytes(answer.body))
        self.loop.call_later(LINGER_S, self.transport.close)

    def _end(self) -> None:
        """Parse no more: the connection ends with the request that is being answered."""
        self._is_refused = True
        if self.cycle is not None:
            self.cycle.keep_alive = False

    # -- the parser ---------------------------------------------------------------------

    def on_message_begin(self) -> None:
        """A head begins."""
        super().on_message_begin()
        self._in_head = self._in_message = True
        self._n_head = 0

    def on_url(self, url: bytes) -> None:
        """Count a part of the address."""
        self._n_head += len(url)
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header; a trailer is let go by, because the request has been read."""
        if self._in_head:
            self._n_head += len(name) + len(value) + 4  # a colon, a blank and the end
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """A request is there, unless its head is too large."""
        self._in_head = self._is_quiet = False
        if self._n_head > MAX_HEAD:
            self._refuse(TOO_LARGE)
        names = {name for name, _ in self.headers}
        # A tunnel is no wish that the head could do without.
        is_wish = self.parser.should_upgrade() and self.parser.get_method() != TUNNEL
        if is_wish and names & FRAMES and not self._is_refused:
            self._is_upgrade = True
            return
        if not self._is_refused:
            self._since = None
            super().on_headers_complete()
            if self.scope["http_version"] == "1.0":
                self.cycle.__class__ = UnframedCycle
            if self.pipeline:  # goes on to read, or nobody sees that the client leaves
                self.flow.resume_reading()
            else:
                self._running = self.cycle

    def on_body(self, body: bytes) -> None:
        """Take a part of a body."""
        self._is_quiet = False
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """A request is whole, unless its body comes behind a head that is parsed again."""
        if self._is_upgrade:
            return
        self._is_quiet, self._in_message = False, False
        if not self._is_refused:
            super().on_message_complete()


class UnframedCycle(RequestResponseCycle):
    """A request of HTTP/1.0, which knows no chunks: an answer of no known length ends with the connection."""

    _has_length = True

    async def send(self, message: Any) -> None:
        """Send a message of ASGI."""
        if message["type"] == "http.response.start":
            names = {name.lower() for name, _ in message.get("headers", ())}
            self._has_length = b"content-length" in names
            if not self._has_length:
                self.chunked_encoding = False
        elif not self._has_length:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class TitledTransport:
    """A transport that writes names of headers with large letters."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Write a part of an answer; a head begins with the version, and is whole."""
        if data.startswith(b"HTTP/1.1 "):
            head, end, body = data.partition(b"\r\n\r\n")
            first, *lines = head.split(b"\r\n")
            pairs = [line.partition(b": ") for line in lines]
            titled = [name.title() + colon + value for name, colon, value in pairs]
            data = b"\r\n".join([first, *titled]) + end + body
        self._transport.write(data)


def usable(descriptors: int, n_used: int) -> int:
    """Connections that a process may have, of so many *descriptors*; others need some, too."""
    n_free = max(descriptors - n_used, 2)
    return n_free - min(max(n_free // 4, 16), n_free - 1)


def backlog_of(descriptors: int, max_connections: int) -> int:
    """Connections that may be accepted at once, before the first of them is counted."""
    return max(min((descriptors - max_connections) // 2, 2048), 1)
