"""
Errors of runners beside those of engines, and errors as JSON.

A runner raises the errors of `pyllama_raw.errors`, and these where something between a program
and its model is at fault. `is_retryable` and `counts_as_circuit_failure` steer retries and
breakers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pyllama_raw.errors import (
    MAX_REASON,
    PLAIN,
    PyllamaError,
    RequestError,
    cut,
)


class Backpressure(RequestError):
    """A limit that this program has set keeps the request from being sent."""

    code = "backpressure"
    http_status = 429

    def __init__(self, reason: str, retry_after_s: float | None = None) -> None:
        self.reason, self.retry_after_s = cut(reason, MAX_REASON), retry_after_s
        super().__init__(f"{self.reason}: send less at once, or raise the limit")


class QueueTimeout(RequestError):
    """The request waited for its turn as long as it may; it was not sent."""

    code = "queue_timeout"
    http_status = 503

    def __init__(self, waited_s: float) -> None:
        self.waited_s = waited_s
        super().__init__(
            f"the request waited {waited_s:g} s for its turn: raise queue_timeout_s or "
            "max_concurrency"
        )


class RateLimited(RequestError):
    """The remote service takes no more requests for a while."""

    code = "rate_limited"
    http_status = 429
    is_retryable = True

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        self.retry_after_s = retry_after_s
        super().__init__(cut(message, MAX_REASON))


class RunnerFault(PyllamaError):
    """The service, the process or the way to it has failed; another try may succeed."""

    code = "runner_fault"
    http_status = 502
    is_retryable = True
    counts_as_circuit_failure = True


class ServerError(RunnerFault):
    """The remote service has failed: an answer 5xx, or an error within a stream."""

    code = "server_error"

    def __init__(
        self, status: int, message: str, retry_after_s: float | None = None
    ) -> None:
        self.status, self.retry_after_s = status, retry_after_s
        super().__init__(f"the server answered {status}: {cut(message, MAX_REASON)}")


class RunnerTimeout(RunnerFault):
    """The time that *phase* may take is over: connect, first_token, between_tokens or total."""

    code = "timeout"
    http_status = 504

    def __init__(self, phase: str, limit_s: float) -> None:
        self.phase, self.limit_s = phase, limit_s
        super().__init__(
            f"{phase} took longer than {limit_s:g} s: raise Timeouts.{phase}_s, or look "
            "what keeps the runner"
        )


class NetworkError(RunnerFault):
    """The connection could not be made, or broke; *is_sent*: the service may have the request."""

    code = "network_error"

    def __init__(self, message: str, *, is_sent: bool = True) -> None:
        self.is_sent = is_sent
        super().__init__(cut(message, MAX_REASON))


class RunnerDied(RunnerFault):
    """The process of a runner has ended; requests that it had are lost."""

    code = "runner_died"

    def __init__(self, returned: int | None, stderr: str = "") -> None:
        self.returned, self.stderr = returned, stderr[-MAX_REASON:]
        message = f"the runner's process ended with code {returned}"
        super().__init__(message + _wrote(self.stderr))


class NotReady(RunnerFault):
    """A server that was started takes no requests in the time that it may take."""

    code = "not_ready"
    http_status = 503

    def __init__(self, name: str, limit_s: float, stderr: str) -> None:
        self.name, self.limit_s, self.stderr = name, limit_s, stderr
        super().__init__(
            f"{name} failed to become ready within {limit_s:g} seconds: raise start_s, or "
            f"look what keeps it{_wrote(stderr)}"
        )


class CircuitOpen(PyllamaError):
    """The runner has failed too often; nothing is sent until *retry_at* of the clock."""

    code = "circuit_open"
    http_status = 503

    def __init__(self, opened_at: float, retry_at: float) -> None:
        self.opened_at, self.retry_at = opened_at, retry_at
        super().__init__(
            f"the runner failed too often and rests for {retry_at - opened_at:g} s: try "
            "another one, or later"
        )


class AuthFailed(RequestError):
    """The remote service knows no such key; `RemoteRunner.rebuild` takes another one."""

    code = "auth_failed"
    http_status = 401


class RemoteRefused(RequestError):
    """The remote service refuses the request: an answer 4xx."""

    code = "remote_refused"

    def __init__(
        self, status: int, message: str, reason: str | None, param: str | None
    ) -> None:
        self.status, self.reason, self.param = status, reason, param
        super().__init__(f"the server answered {status}: {cut(message, MAX_REASON)}")


class ContentFiltered(RequestError):
    """The remote service withholds the output because of its content."""

    code = "content_filtered"


class UnexpectedAnswer(PyllamaError):
    """The remote service answered what its API does not have."""

    code = "unexpected_answer"
    http_status = 502


def as_json(error: PyllamaError) -> dict[str, Any]:
    """*error* as plain values: `kind` is its code, then come its message and attributes."""
    plain = {n: v for n, v in vars(error).items() if type(v) in PLAIN}
    return {"kind": error.code, "message": str(error)} | plain


def from_json(value: Mapping[str, Any]) -> PyllamaError:
    """The error that as_json() told; one of an unknown kind is a PyllamaError."""
    fields = dict(value)
    kinds = {kind.code: kind for kind in _tree(PyllamaError)}
    kind = kinds.get(fields.pop("kind"), PyllamaError)
    error = kind.__new__(kind)
    error.args = (fields.pop("message"),)
    vars(error).update(fields)
    return error


def _wrote(stderr: str) -> str:
    return f"; the last it wrote: {stderr}" if stderr else ""


def _tree(kind: type[PyllamaError]) -> Iterator[type[PyllamaError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from _tree(child)
