"""What goes through the gate, counted for Prometheus; engines have metrics of their own."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pyllama_raw.serve.exchange import Exchange

METHODS = {"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"}


class Traffic(Collector):
    """
    Counts of requests by the template of their route, as those of keys or ids have no end.

    Thread: of the event loop, as whoever collects is.
    """

    def __init__(self) -> None:
        self.in_flight = 0
        self._n_requests = Counter[tuple[str, str, str]]()
        self._n_refused = Counter[str]()
        self._n_left = 0

    def ended(self, exchange: Exchange, route: str) -> None:
        """Take in one request; *route* is "" if there is none of its path."""
        method = exchange.method if exchange.method in METHODS else "other"
        self._n_requests[method, route, str(exchange.status)] += 1
        self._n_left += not exchange.is_whole
        if exchange.refused is not None:
            self._n_refused[exchange.refused] += 1

    def collect(self) -> Iterator[Metric]:
        """All of it."""
        name, text = "pyllama_raw:http_requests", "Requests that have ended"
        requests = CounterMetricFamily(name, text, labels=["method", "route", "status"])
        for labels, n in self._n_requests.items():
            requests.add_metric(labels, n)
        yield requests
        name, text = "pyllama_raw:http_refused", "Requests that did not come in"
        refused = CounterMetricFamily(name, text, labels=["reason"])
        for reason, n in self._n_refused.items():
            refused.add_metric([reason], n)
        yield refused
        name, text = "pyllama_raw:http_requests_in_flight", "Requests in work"
        yield GaugeMetricFamily(name, text, self.in_flight)
        name, text = "pyllama_raw:http_disconnects", "Clients that left before the end"
        yield CounterMetricFamily(name, text, self._n_left)
