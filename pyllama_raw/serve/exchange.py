"""Requests and their answers, as the access log and the metrics of the gate tell of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic, time
from typing import Any
from weakref import finalize

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from pydantic_core import to_json

from pyllama_raw.errors import ConfigError
from pyllama_raw.results import Watcher
from pyllama_raw.serve.keys import Key

LEFT = 499  # the status of a client that left before it had one
METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}


@dataclass(slots=True, eq=False)
class Exchange:
    """What became of a request so far; the gate keeps it in the state of the scope."""

    request_id: str
    method: str
    path: str
    key: Key | None = None
    n_read: int = 0  # bytes of its body
    status: int = LEFT
    n_bytes: int = 0  # of the answer
    is_whole: bool = False  # all of it was sent
    refused: str | None = None  # the code of the error, if there was no room for it
    model: str | None = None
    n_prompt: int = 0
    n_cached: int = 0
    n_output: int = 0
    ignored: list[str] = field(default_factory=list)
    """Fields of the body that change nothing here; names of our own tables only."""
    began: float = field(default_factory=monotonic)

    @property
    def client(self) -> str:
        """The owner of the key; "" without keys."""
        return "" if self.key is None else self.key.name

    def line(self) -> dict[str, Any]:
        """The line of the access log; no text of a request is in it."""
        return {
            "time": round(time(), 3),
            "id": self.request_id,
            "method": self.method,
            "path": self.path,
            "status": self.status,
            "seconds": round(monotonic() - self.began, 6),
            "bytes": self.n_bytes,
            "left": not self.is_whole,
            "model": self.model,
            "prompt_tokens": self.n_prompt,
            "cached_tokens": self.n_cached,
            "output_tokens": self.n_output,
            "client": self.client or None,
        }


_current: ContextVar[Exchange | None] = ContextVar("exchange", default=None)


def current() -> Exchange | None:
    """The exchange that this code works for; None: the code of a program beside the service."""
    return _current.get()


@contextmanager
def working_for(exchange: Exchange) -> Iterator[None]:
    """Make *exchange* the current one, also in threads and tasks that begin in the block."""
    token = _current.set(exchange)
    try:
        yield
    finally:
        _current.reset(token)


class TextCounter(Watcher):
    """
    Counts tokens of texts that become vectors and ranks, also if their client leaves.

    A call for these has no handle that could be asked later. All of its texts count from when the
    engine has taken it on.

    Thread: that of the engine.
    """

    def came(self, requests: Sequence[Any], submitted: float) -> None:  # noqa: ARG002
        """Count the texts of *requests* for the exchange that they belong to."""
        exchange = current()
        if exchange is not None:
            texts = [request for request in requests if request.lot.makes_vectors]
            exchange.n_prompt += sum(request.n_prompt for request in texts)


class AccessLog:
    """A line of JSON for each request; "-" is the standard output."""

    def __init__(self, path: str) -> None:
        """Raises ConfigError if it cannot be written."""
        file = Path("/dev/stdout" if path == "-" else path)
        try:
            self._file = file.open("ab", buffering=0)
        except OSError as error:
            raise ConfigError(f"access_log {path!r}: {error}") from error
        finalize(self, self._file.close)  # an application may be dropped at any time

    def write(self, exchange: Exchange) -> None:
        """Write one line at once; a disk that is full loses lines and no requests."""
        with suppress(OSError):
            self._file.write(to_json(exchange.line()) + b"\n")


class Traffic:
    """
    Counts of requests by the template of their route, as those of keys or ids have no end.

    Thread: of the event loop, as whoever collects is.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self._n_requests = Counter[tuple[str, ...]]()
        self._n_refused = Counter[tuple[str, ...]]()
        self._n_left = 0
        # What was left out of chats, by kinds of KINDS in chats.py; a short text stands for it.
        self.left_out = Counter[str]()

    def ended(self, exchange: Exchange, route: str) -> None:
        """Take in one request; *route* is "" if there is none of its path."""
        method = exchange.method if exchange.method in METHODS else "other"
        self._n_requests[method, route, str(exchange.status)] += 1
        self._n_left += not exchange.is_whole
        if exchange.refused is not None:
            self._n_refused[exchange.refused,] += 1

    def collect(self) -> Iterator[Metric]:
        """All of it."""
        name, text = "pyllama_raw:http_requests", "Requests that have ended"
        yield _counted(name, text, ("method", "route", "status"), self._n_requests)
        name, text = "pyllama_raw:http_refused", "Requests that did not come in"
        yield _counted(name, text, ("reason",), self._n_refused)
        name, text = (
            "pyllama_raw:http_left_out",
            "Parts of chats that are not known here",
        )
        kinds: dict[tuple[str, ...], int] = {
            (kind,): n for kind, n in self.left_out.items()
        }
        yield _counted(name, text, ("kind",), kinds)
        name, text = "pyllama_raw:http_requests_in_flight", "Requests in work"
        yield GaugeMetricFamily(name, text, self.in_flight)
        name, text = "pyllama_raw:http_disconnects", "Clients that left before the end"
        yield CounterMetricFamily(name, text, self._n_left)


def _counted(
    name: str,
    text: str,
    labels: tuple[str, ...],
    counts: Mapping[tuple[str, ...], int],
) -> Metric:
    family = CounterMetricFamily(name, text, labels=labels)
    for values, n in counts.items():
        family.add_metric(values, n)
    return family
