"""
The whole exception tree.

Three questions decide the class: whose fault is it, does the engine go on, what can be
done. The caller's fault is a `RequestError` or `ConfigError`, C's is a `NativeError`,
ours is an `assert`. The constructor builds the message; numbers are attributes.
Cancellation is no error: it is a `FinishReason`.

Errors travel: pickle and copy keep the message and every attribute. The cause stays behind,
because it may be anything. Four attributes of each class tell a service what to do:

- `code` is a word for logs and clients: the name of the class, in small letters. It never
  changes (tests/test_errors.py).
- `is_retryable`: the same call may succeed later on the same engine.
- `counts_as_circuit_failure`: the engine or the machine is at fault. What a caller did
  never counts, and a full queue is load, not a failure.
- `http_status`: what an HTTP service answers. 400 and 413 are the client's fault; 503 says
  that another time or another engine may do; 500 is a fault of ours or of the machine.
  The deadline of a stream is no error but `FinishReason.DEADLINE`: 504 if no token came
  before it.

docs/errors.md lists the classes with these attributes; a test compares it.
"""

from __future__ import annotations

import copyreg
import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from reprlib import Repr
from typing import Any, ClassVar, TypeVar

MAX_SHOWN = 160  # characters of a value in a message
MAX_REASON = 2000  # characters of somebody else's message in ours

_WORD_ENDS = re.compile("(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")


class PyllamaError(Exception):
    """Base of every error this package raises on purpose."""

    code: ClassVar[str] = "error"
    is_retryable: ClassVar[bool] = False
    counts_as_circuit_failure: ClassVar[bool] = False
    http_status: ClassVar[int] = 500
    prompt_index: int | None = None
    """Index of the prompt that the error is about, in a call that takes many."""

    def __init_subclass__(cls) -> None:
        if "code" not in vars(cls):
            cls.code = _WORD_ENDS.sub("_", cls.__name__).lower()

    def __reduce__(self) -> tuple[Any, ...]:
        # Without the constructor, which may take other arguments than the error keeps.
        return copyreg.__newobj__, (type(self), *self.args), self.__dict__  # type: ignore[attr-defined]


E = TypeVar("E", bound=PyllamaError)


def of_prompt(error: E, index: int) -> E:
    """A copy of *error* that says which of many prompts it is about."""
    copied = copy(error)  # other requests may have ended with the same object
    copied.args = (f"prompts[{index}]: {error}",)
    copied.prompt_index = index
    copied.__cause__ = error.__cause__
    return copied.with_traceback(error.__traceback__)


class ConfigError(PyllamaError, ValueError):
    """
    Options are wrong; nothing has been run.

    *mistakes* are (name with dots, value as text, what is allowed), where these are known.
    """

    code = "wrong_config"

    def __init__(
        self, message: str, mistakes: tuple[tuple[str, str, str], ...] = ()
    ) -> None:
        self.mistakes = mistakes
        super().__init__(message)


class ModelNotFound(ConfigError):
    """The model a name stands for is not here and cannot be fetched."""

    def __init__(self, spec: str, message: str) -> None:
        self.spec = spec
        super().__init__(f"model {shown(spec)}: {cut(message, MAX_REASON)}")


class LibraryNotBuilt(PyllamaError, ImportError):
    """The native extension is missing or cannot be loaded."""

    counts_as_circuit_failure = True


class LeaseRefused(PyllamaError):
    """A model has no slot on a device, or the device is short of memory; nothing was loaded."""

    http_status = 503
    is_retryable = True

    def __init__(self, device: str, reason: str) -> None:
        self.device, self.reason = device, cut(reason, MAX_REASON)
        super().__init__(f"device {device} {self.reason}")


class ModelTooLarge(PyllamaError):
    """A model takes more than all models together may, whatever gives way."""

    code = "model_too_large"
    http_status = 507

    def __init__(self, model: str, device: str, n_bytes: int, limit: int) -> None:
        self.model, self.device = cut(model, MAX_SHOWN), device
        self.n_bytes, self.limit = n_bytes, limit
        super().__init__(
            f"model {self.model} takes {n_bytes} of {device} and at most {limit} may be had: "
            "raise the budget, pin fewer models, or give it fewer cells (n_ctx)"
        )


class ModelUnavailable(PyllamaError):
    """A model could not be loaded or woken, or was unloaded; it is tried again later."""

    code = "model_unavailable"
    http_status = 503
    is_retryable = True

    def __init__(self, model: str, reason: str, retry_after_s: float) -> None:
        self.model, self.reason = cut(model, MAX_SHOWN), cut(reason, MAX_REASON)
        self.retry_after_s = retry_after_s
        super().__init__(f"model {self.model}: {self.reason}")


class RequestError(PyllamaError):
    """This request cannot be served; the engine goes on."""

    code = "request_refused"
    http_status = 400


class InvalidRequest(RequestError, ValueError):
    """
    An argument or option of the request is not allowed.

    Attributes:
        value: what was given if it is None, a number or a short text; otherwise as the
            message shows it, so that the error can travel.
    """

    def __init__(self, name: str, value: object, allowed: str) -> None:
        text = shown(value)
        # Nobody can print an int of thousands of digits, whose text is <int>.
        is_plain = type(value) in PLAIN and len(text) < MAX_SHOWN and text[0] != "<"
        self.name, self.allowed = cut(name, MAX_SHOWN), cut(allowed, MAX_REASON)
        self.value = value if is_plain else text
        super().__init__(f"{self.name}={text} is not allowed: give {self.allowed}")


class InvalidSampling(InvalidRequest, ConfigError):
    """
    A sampling parameter is not allowed; *name* is the field of SamplingParams.

    It is a ConfigError, too, because parameters are made before any request.
    """

    def __init__(self, name: str, value: object, allowed: str) -> None:
        super().__init__(name, value, allowed)
        self.args = (f"SamplingParams.{self.args[0]}",)
        self.mistakes = ((self.name, shown(value), self.allowed),)


class PromptTooLong(RequestError):
    """The prompt leaves no room for one output token."""

    http_status = 413

    def __init__(
        self,
        n_prompt: int,
        n_ctx_slot: int,
        n_source: int = 0,
        *,
        is_part: bool = False,
    ) -> None:
        """
        Args:
            n_source: the most tokens that an encoder reads at once; 0: a slot takes them.
            is_part: the prompt was counted up to *n_prompt*, and may have more.
        """
        self.n_prompt, self.n_ctx_slot, self.n_source = n_prompt, n_ctx_slot, n_source
        self.is_part = is_part
        length = f"the prompt has {n_prompt} tokens{_or_more(is_part)}, at most"
        if n_source:
            super().__init__(
                f"{length} {n_source} are allowed, because an encoder reads all of it at "
                "once: shorten it, or raise n_ubatch"
            )
        else:
            super().__init__(
                f"{length} {n_ctx_slot - 1} fit a slot of {n_ctx_slot}: shorten it, or "
                "raise n_ctx or lower n_slots"
            )


class TextTooLong(RequestError):
    """A text of several has more tokens than are allowed; *name* says which."""

    http_status = 413

    def __init__(
        self,
        name: str,
        n_tokens: int,
        max_tokens: int,
        advice: str,
        *,
        is_part: bool = False,
    ) -> None:
        """*is_part*: the text was counted up to *n_tokens*, and may have more."""
        self.name, self.n_tokens, self.max_tokens = name, n_tokens, max_tokens
        self.is_part = is_part
        super().__init__(
            f"{name} has {n_tokens} tokens{_or_more(is_part)}, "
            f"at most {max_tokens} are allowed: {advice}"
        )


def _or_more(is_part: bool) -> str:
    return " or more" if is_part else ""


class QueueFull(RequestError):
    """The waiting queue is at its limit; nothing was queued."""

    http_status = 503
    is_retryable = True

    def __init__(self, knob: str, value: int, limit: int) -> None:
        self.knob, self.value, self.limit = knob, value, limit
        super().__init__(
            f"the waiting queue would hold {value}, {knob} allows {limit}: "
            f"try again later or raise {knob}"
        )


class WaitedTooLong(RequestError):
    """The request had no slot in the time that it would wait; nothing was computed."""

    http_status = 503
    is_retryable = True

    def __init__(self, knob: str, value: float, limit: float) -> None:
        self.knob, self.value, self.limit = knob, value, limit
        super().__init__(
            f"the request has waited {value:.3g} s for a slot, {knob} allows {limit:.3g}: "
            f"try again later or raise {knob}"
        )


class OutputUnread(RequestError):
    """Nobody reads an output that outgrows its slot, so the request was ended."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        super().__init__(
            f"{limit} events of the output were not read, and no more are kept: read them as "
            "they come, or give a max_tokens that fits the slot"
        )


class DeadlineExceeded(RequestError):
    """The deadline passed before there was a result, of a call that gives it as a whole."""

    http_status = 504
    is_retryable = True

    def __init__(
        self, n_done: int, n_wanted: int, progress: str = "tokens had a score"
    ) -> None:
        self.n_done, self.n_wanted = n_done, n_wanted
        super().__init__(
            f"deadline_s was over when {n_done} of {n_wanted} {progress}: "
            "give more time or less to do"
        )


class BadGrammar(RequestError):
    """The grammar cannot be used; *position* is an index into its text, if known."""

    def __init__(self, reason: str, position: int | None) -> None:
        self.reason, self.position = cut(reason, MAX_REASON), position
        where = "" if position is None else f" at {position}"
        super().__init__(f"grammar{where}: {self.reason}")


class BadSchema(RequestError):
    """A JSON schema, regular expression or Lark grammar cannot be used; *place* is in its text."""

    def __init__(
        self, name: str, reason: str, *, place: str = "", is_costly: bool = False
    ) -> None:
        self.name, self.reason, self.place = name, cut(reason, MAX_REASON), place
        self.is_costly = is_costly  # it was found out at a limit of time or memory
        where = f", at {place}" if place else ""
        super().__init__(f"{name}: {self.reason}{where}")


class BadMedia(RequestError):
    """An image or a sound cannot be used; *index* counts those of the prompt, if known."""

    def __init__(self, reason: str, index: int | None = None) -> None:
        self.reason, self.index = cut(reason, MAX_REASON), index
        where = "" if index is None else f" {index}"
        super().__init__(f"media{where}: {self.reason}")


class AdapterNotFound(RequestError):
    """There is no adapter of that name: it was not loaded, was unloaded, or gave way."""

    http_status = 404

    def __init__(self, name: str) -> None:
        self.name = cut(name, MAX_SHOWN)
        super().__init__(f"no adapter {self.name!r} is loaded: load it first")


class AdapterLimit(RequestError):
    """The adapters that requests use leave no room for another one; nothing was loaded."""

    http_status = 503
    is_retryable = True

    def __init__(self, n_bytes: int, limit: int) -> None:
        self.n_bytes, self.limit = n_bytes, limit
        super().__init__(
            f"the adapters would take {n_bytes} bytes, max_adapter_bytes allows {limit}: try "
            "again when requests have ended, or raise it"
        )


class Unsupported(RequestError):
    """
    The model or context cannot do *operation*; *reason* says why and what to do.

    Args:
        advice: what a program does about it, at the end of the reason. Who answers others by
            HTTP has other words; `why` is the reason without it.
    """

    def __init__(self, operation: str, reason: str, advice: str = "") -> None:
        self.why, self.advice = reason, advice
        sentence = f"{reason}: {advice}" if advice else reason
        self.operation, self.reason = operation, cut(sentence, MAX_REASON)
        super().__init__(f"{operation}: {self.reason}")


class WrongUse(PyllamaError, RuntimeError):
    """A program used an object as it cannot be used; the message says what to do instead."""


class NativeError(PyllamaError):
    """libllama reported a failure; *returned* is the number its function gave."""

    code = "native_failure"
    counts_as_circuit_failure = True

    def __init__(self, function: str, returned: int | None, message: str) -> None:
        self.function, self.returned = function, returned
        number = "" if returned is None else f" returned {returned}"
        super().__init__(f"{function}{number}: {message}")


def _of_file(path: str, message: str) -> str:
    return f"{cut(path, MAX_REASON)}: {cut(message, MAX_REASON)}"


class ModelLoadFailed(NativeError):
    """The model file could not be loaded."""

    def __init__(self, path: str, message: str) -> None:
        self.path = path
        super().__init__("llama_model_load_from_file", None, _of_file(path, message))


class ProjectorLoadFailed(NativeError):
    """The projector file could not be loaded, or does not belong to the model."""

    def __init__(self, path: str, message: str) -> None:
        self.path = path
        super().__init__("mtmd_init_from_file", None, _of_file(path, message))


class AdapterLoadFailed(NativeError):
    """The adapter file could not be loaded, or does not belong to the model."""

    def __init__(self, path: str, message: str) -> None:
        self.path = path
        super().__init__("llama_adapter_lora_init", None, _of_file(path, message))


class QuantizeFailed(NativeError):
    """The model file could not be written in another type; nothing is left behind."""

    def __init__(self, path: str, returned: int | None, message: str) -> None:
        self.path = path
        super().__init__("llama_model_quantize", returned, _of_file(path, message))


class ContextFailed(NativeError):
    """The context could not be created, most often for lack of memory."""


class NoKVSpace(NativeError):
    """Code 1: no room in the KV memory; memory is unchanged."""


class DecodeAborted(NativeError):
    """Code 2: stopped by the abort flag; some micro-batches were applied."""

    is_retryable = True


class InvalidBatch(NativeError):
    """Code -1: the batch broke a rule of libllama; memory is unchanged."""


class DecodeFailed(NativeError):
    """A code below -1 or a C++ exception; the context must be rebuilt."""

    is_retryable = True


class SamplingFailed(NativeError):
    """A sampler failed on one output row; other rows are fine."""


class EncodeFailed(NativeError):
    """An image or a sound could not be made rows of; others can."""


class EmbeddingFailed(NativeError):
    """A model made numbers of a text that are not all finite; *index* says which text."""

    def __init__(self, index: int | None = None) -> None:
        self.index = index
        where = "a text" if index is None else f"texts[{index}]"
        fault = f"what the model made of {where} is not all finite numbers"
        super().__init__("llama_decode", None, fault)


class SnapshotFailed(NativeError):
    """The state of a slot could not be copied; compute it again."""

    is_retryable = True


class ClosedError(PyllamaError):
    """
    The object was used after close(), or closed before a request was done.

    *results* is what a request that was under way had generated, an entry an output.
    """

    code = "closed"
    http_status = 503

    def __init__(self, message: str, results: tuple[Any, ...] = ()) -> None:
        self.results = results
        super().__init__(message)


class EngineFault(PyllamaError):
    """An exception inside the engine ended this request only; __cause__ says which."""

    is_retryable = True
    counts_as_circuit_failure = True


class EngineStalled(PyllamaError):
    """Nothing could be computed for the requests that were left; an engine has ended them."""

    http_status = 503
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


class PolicyFailed(PyllamaError):
    """A hook of a scheduling policy failed in a simulation; __cause__ says how."""

    def __init__(self, policy: str, hook: str, reason: str) -> None:
        self.policy, self.hook = cut(policy, MAX_SHOWN), hook
        self.reason = cut(reason, MAX_REASON)
        super().__init__(
            f"policy {self.policy}: {hook} {self.reason}. Mend it, or let the scheduler "
            "decide as fcfs where it fails (keep_going=True, --keep-going)"
        )


class EngineStopped(PyllamaError):
    """The engine thread has ended; __cause__ says why."""

    http_status = 503
    counts_as_circuit_failure = True


PLAIN = (type(None), bool, int, float, str)  # values that any process can unpickle


@contextmanager
def reading(name: str, value: object, allowed: str) -> Iterator[None]:
    """Turn what *value* raises, a stranger's object, into words of what is allowed."""
    try:
        yield
    except PyllamaError:
        raise
    except Exception as error:
        raise InvalidRequest(name, value, allowed) from error


def shown(value: object) -> str:
    """repr() of *value* for a message: bounded, and an answer whatever *value* does."""
    try:
        return cut(_REPR.repr(value), MAX_SHOWN)
    except Exception:  # noqa: BLE001 - the value is a stranger's
        return cut(f"<{type(value).__name__}>", MAX_SHOWN)


def first_of(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error in *group*, however deep: the one that a person is told."""
    error = group.exceptions[0]
    return first_of(error) if isinstance(error, BaseExceptionGroup) else error


def reason_of(error: Exception) -> str:
    """The words of *error*; those of an OSError are without its file, because the message names that."""
    return getattr(error, "strerror", None) or str(error)


def cut(text: str, n_most: int) -> str:
    """The first *n_most* characters; the last three are dots if some are missing."""
    return text if len(text) <= n_most else f"{text[: n_most - 3]}..."


_REPR = Repr()  # looks at the first items of a collection only
_REPR.maxlevel = 4
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = _REPR.maxset = 8
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = MAX_SHOWN
