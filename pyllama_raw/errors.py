"""
The whole exception tree.

Three questions decide the class: whose fault is it, does the engine go on, what can be
done. The caller's fault is a `RequestError` or `ConfigError`, C's is a `NativeError`,
ours is an `assert`. The constructor builds the message; numbers are attributes.
Cancellation is no error: it is a `FinishReason`.
"""

from __future__ import annotations

from typing import Any


class PyllamaError(Exception):
    """Base of every error this package raises on purpose."""


class ConfigError(PyllamaError, ValueError):
    """Options are wrong; nothing has been run."""


class ModelNotFound(ConfigError):
    """The model a name stands for is not here and cannot be fetched."""

    def __init__(self, spec: str, message: str) -> None:
        self.spec = spec
        super().__init__(f"model {spec!r}: {message}")


class LibraryNotBuilt(PyllamaError, ImportError):
    """The native extension is missing or cannot be loaded."""


class RequestError(PyllamaError):
    """This request cannot be served; the engine goes on."""


class InvalidRequest(RequestError, ValueError):
    """A parameter of the request is out of range."""

    def __init__(self, name: str, value: object, allowed: str) -> None:
        self.name, self.value, self.allowed = name, value, allowed
        super().__init__(f"{name}={value!r} is not allowed: give {allowed}")


class PromptTooLong(RequestError):
    """The prompt leaves no room for one output token."""

    def __init__(self, n_prompt: int, n_ctx_slot: int) -> None:
        self.n_prompt, self.n_ctx_slot = n_prompt, n_ctx_slot
        super().__init__(
            f"the prompt has {n_prompt} tokens, at most {n_ctx_slot - 1} fit a slot of "
            f"{n_ctx_slot}: shorten it, or raise n_ctx or lower n_slots"
        )


class QueueFull(RequestError):
    """The waiting queue is at its limit; nothing was queued."""

    def __init__(self, knob: str, value: int, limit: int) -> None:
        self.knob, self.value, self.limit = knob, value, limit
        super().__init__(
            f"the waiting queue would hold {value}, {knob} allows {limit}: "
            f"try again later or raise {knob}"
        )


class BadGrammar(RequestError):
    """The grammar cannot be used; *position* is an index into its text, if known."""

    def __init__(self, reason: str, position: int | None) -> None:
        self.reason, self.position = reason, position
        where = "" if position is None else f" at {position}"
        super().__init__(f"grammar{where}: {reason}")


class BadSchema(RequestError):
    """A JSON schema, regular expression or Lark grammar cannot be used."""

    def __init__(self, name: str, reason: str) -> None:
        self.name, self.reason = name, reason
        super().__init__(f"{name}: {reason}")


class Unsupported(RequestError):
    """The model or context cannot do what was asked."""


class NativeError(PyllamaError):
    """libllama reported a failure."""

    def __init__(self, function: str, code: int | None, message: str) -> None:
        self.function, self.code = function, code
        shown = "" if code is None else f" returned {code}"
        super().__init__(f"{function}{shown}: {message}")


class ModelLoadFailed(NativeError):
    """The model file could not be loaded."""

    def __init__(self, path: str, message: str) -> None:
        self.path = path
        super().__init__("llama_model_load_from_file", None, f"{path}: {message}")


class QuantizeFailed(NativeError):
    """The model file could not be written in another type; nothing is left behind."""

    def __init__(self, path: str, code: int | None, message: str) -> None:
        self.path = path
        super().__init__("llama_model_quantize", code, f"{path}: {message}")


class ContextFailed(NativeError):
    """The context could not be created, most often for lack of memory."""


class NoKVSpace(NativeError):
    """Code 1: no room in the KV memory; memory is unchanged."""


class DecodeAborted(NativeError):
    """Code 2: stopped by the abort flag; some micro-batches were applied."""


class InvalidBatch(NativeError):
    """Code -1: the batch broke a rule of libllama; memory is unchanged."""


class DecodeFailed(NativeError):
    """A code below -1 or a C++ exception; the context must be rebuilt."""


class SamplingFailed(NativeError):
    """A sampler failed on one output row; other rows are fine."""


class SnapshotFailed(NativeError):
    """The state of a slot could not be copied; compute it again."""


class ClosedError(PyllamaError):
    """
    The object was used after close(), or closed before a request was done.

    *results* is what a request that was under way had generated, an entry an output.
    """

    code = "closed"

    def __init__(self, message: str, results: tuple[Any, ...] = ()) -> None:
        self.results = results
        super().__init__(message)


class EngineFault(PyllamaError):
    """An exception inside the engine ended this request only; __cause__ says which."""

    code = "engine_fault"
    is_retryable = True
    counts_as_circuit_failure = True


class EngineStalled(PyllamaError):
    """Nothing could be computed for the requests that were left; all of them ended."""

    code = "engine_stalled"
    is_retryable = True
    counts_as_circuit_failure = True

    def __init__(
        self,
        *,
        n_running: int,
        n_waiting: int,
        n_slots: int,
        n_cells_used: int,
        n_cells: int,
    ) -> None:
        self.n_running, self.n_waiting, self.n_slots = n_running, n_waiting, n_slots
        self.n_cells_used, self.n_cells = n_cells_used, n_cells
        super().__init__(
            f"no step can be planned with {n_running} running and {n_waiting} waiting "
            f"requests, {n_slots} slots, and {n_cells_used} of {n_cells} cells used: "
            "raise n_ctx, or send less at once"
        )


class EngineStopped(PyllamaError):
    """The engine thread has ended; __cause__ says why."""
