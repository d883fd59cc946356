import copy
import inspect
import json
import pickle
from dataclasses import asdict, fields

import pytest

from pyllama_raw.api.results import Delta, EngineStats, Result, Score, Timings, Usage
from pyllama_raw.core.memory.cache import Ledger
from pyllama_raw.core.request import CacheTier, FinishReason, SamplerUse, TokenLogprobs
from pyllama_raw.core.stats import CacheStats, Eviction, Refusal
from pyllama_raw.errors import (
    MAX_REASON,
    AdapterLimit,
    AdapterLoadFailed,
    BadGrammar,
    BadSchema,
    ClosedError,
    ConfigError,
    DeadlineExceeded,
    DecodeFailed,
    EngineFault,
    EngineStalled,
    EngineStopped,
    InvalidRequest,
    LibraryNotBuilt,
    ModelLoadFailed,
    NativeError,
    PyllamaError,
    QueueFull,
    RequestError,
    Unsupported,
    WaitedTooLong,
)

MISTAKES = "tuple[tuple[str, str, str], ...]"
EXAMPLES = {
    "str": "a word",
    "int": 7,
    "bool": True,
    "float": 0.5,
    "int | None": None,
    "object": 0.5,
    "tuple[Any, ...]": (1, 2),
    MISTAKES: (("a.b", "1", "2"),),
}

TRAVELS = {
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),  # noqa: S301 - our own
    "pickle 2": lambda value: pickle.loads(pickle.dumps(value, 2)),  # noqa: S301
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


def tree(kind: type[PyllamaError] = PyllamaError) -> list[type[PyllamaError]]:
    below = [found for child in kind.__subclasses__() for found in tree(child)]
    ours = [found for found in below if found.__module__ == kind.__module__]
    return list(dict.fromkeys([kind, *ours]))  # some have two bases


def example(kind: type[PyllamaError]) -> PyllamaError:
    """An error of *kind*, with an argument of each type that its constructor names."""
    if not inspect.isfunction(kind.__init__):
        return kind("a message")
    names = list(inspect.signature(kind.__init__).parameters.values())[1:]
    values = {name.name: EXAMPLES[str(name.annotation)] for name in names}
    return kind(**values)


def facts(error: BaseException) -> tuple[object, ...]:
    return type(error), str(error), error.args, vars(error)


@pytest.mark.parametrize("travel", TRAVELS.values(), ids=TRAVELS)
@pytest.mark.parametrize("kind", tree(), ids=lambda kind: kind.__name__)
def test_every_error_travels_with_its_attributes(kind, travel):
    """
    Class, message, arguments, attributes and notes are equal after pickling and copying.
    """
    error = example(kind)
    error.add_note("on the way")
    error.__cause__ = OSError("stays behind")

    arrived = travel(error)

    assert facts(arrived) == facts(error)
    assert arrived.__cause__ is None


def test_each_class_has_a_code_of_its_own():
    """
    Codes are words that tell every two classes apart, and they stay as they are.
    """
    codes = {kind.__name__: kind.code for kind in tree()}

    assert codes == {
        "PyllamaError": "error",
        "ConfigError": "wrong_config",
        "ModelNotFound": "model_not_found",
        "LibraryNotBuilt": "library_not_built",
        "LeaseRefused": "lease_refused",
        "ModelTooLarge": "model_too_large",
        "ModelUnavailable": "model_unavailable",
        "RequestError": "request_refused",
        "InvalidRequest": "invalid_request",
        "InvalidSampling": "invalid_sampling",
        "PromptTooLong": "prompt_too_long",
        "TextTooLong": "text_too_long",
        "QueueFull": "queue_full",
        "WaitedTooLong": "waited_too_long",
        "OutputUnread": "output_unread",
        "DeadlineExceeded": "deadline_exceeded",
        "BadGrammar": "bad_grammar",
        "BadSchema": "bad_schema",
        "BadMedia": "bad_media",
        "AdapterNotFound": "adapter_not_found",
        "AdapterLimit": "adapter_limit",
        "Unsupported": "unsupported",
        "WrongUse": "wrong_use",
        "NativeError": "native_failure",
        "ModelLoadFailed": "model_load_failed",
        "ProjectorLoadFailed": "projector_load_failed",
        "AdapterLoadFailed": "adapter_load_failed",
        "QuantizeFailed": "quantize_failed",
        "ContextFailed": "context_failed",
        "NoKVSpace": "no_kv_space",
        "DecodeAborted": "decode_aborted",
        "InvalidBatch": "invalid_batch",
        "DecodeFailed": "decode_failed",
        "SamplingFailed": "sampling_failed",
        "EncodeFailed": "encode_failed",
        "EmbeddingFailed": "embedding_failed",
        "SnapshotFailed": "snapshot_failed",
        "ClosedError": "closed",
        "EngineFault": "engine_fault",
        "EngineStalled": "engine_stalled",
        "PolicyFailed": "policy_failed",
        "EngineStopped": "engine_stopped",
    }


def test_the_side_at_fault_decides_what_counts():
    """
    The machine's and the engine's faults count as failures; a caller's never do.
    """
    at_fault = (NativeError, EngineFault, EngineStalled, EngineStopped, LibraryNotBuilt)
    callers = (RequestError, ConfigError, ClosedError)

    assert [k for k in tree() if k.counts_as_circuit_failure] == [
        k for k in tree() if issubclass(k, at_fault)
    ]
    assert not any(
        k.counts_as_circuit_failure for k in tree() if issubclass(k, callers)
    )


def test_what_may_succeed_later_is_retryable():
    """
    Load and faults that pass are worth a second try; a wrong request never is.
    """
    retryable = [kind.__name__ for kind in tree() if kind.is_retryable]

    assert retryable == [
        "LeaseRefused",
        "ModelUnavailable",
        "QueueFull",
        "WaitedTooLong",
        "DeadlineExceeded",
        "AdapterLimit",
        "DecodeAborted",
        "DecodeFailed",
        "SnapshotFailed",
        "EngineFault",
        "EngineStalled",
    ]
    assert (QueueFull.is_retryable, QueueFull.counts_as_circuit_failure) == (
        True,
        False,
    )
    assert DecodeFailed("llama_decode", -3, "no").counts_as_circuit_failure


def test_each_class_has_a_status_by_whose_fault_it_is():
    """
    What is not the client's fault is no 4xx, and what may pass elsewhere is a 503.
    """
    statuses = {kind: kind.http_status for kind in tree() if kind.http_status != 500}

    assert {kind.__name__: status for kind, status in statuses.items()} == {
        "LeaseRefused": 503,
        "ModelTooLarge": 507,
        "ModelUnavailable": 503,
        "RequestError": 400,
        "InvalidRequest": 400,
        "InvalidSampling": 400,
        "PromptTooLong": 413,
        "TextTooLong": 413,
        "QueueFull": 503,
        "WaitedTooLong": 503,
        "OutputUnread": 400,
        "DeadlineExceeded": 504,
        "BadGrammar": 400,
        "BadSchema": 400,
        "BadMedia": 400,
        "AdapterNotFound": 404,
        "AdapterLimit": 503,
        "Unsupported": 400,
        "ClosedError": 503,
        "EngineStalled": 503,
        "EngineStopped": 503,
    }
    assert [k for k in tree() if k.http_status < 500] == [
        kind
        for kind in tree()
        if issubclass(kind, RequestError)
        and kind not in (QueueFull, WaitedTooLong, DeadlineExceeded, AdapterLimit)
    ]


def test_unsupported_names_operation_and_reason():
    """
    A program reads what could not be done, and why, without parsing the message.
    """
    error = Unsupported("chat messages", "the model has no chat template")

    assert vars(error) == {
        "operation": "chat messages",
        "reason": "the model has no chat template",
        "why": "the model has no chat template",
        "advice": "",
    }
    assert str(error) == "chat messages: the model has no chat template"


class Raises:
    def __repr__(self):
        raise RecursionError("no repr")


class Lies:
    def __repr__(self):
        return 7


class Long:
    def __repr__(self):
        return "x" * 10_000_000


def nested(depth: int) -> list[object]:
    value: list[object] = []
    for _ in range(depth):
        value = [value]
    return value


HOSTILE = {
    "text": "x" * 10_000_000,
    "list": list(range(1_000_000)),
    "int": 10**10_000,
    "nested": nested(100_000),
    "raises": Raises(),
    "lies": Lies(),
    "long": Long(),
    "inside": [Raises(), Lies(), Long()],
    "class": type("x" * 1000, (Raises,), {})(),
    "function": lambda: None,
    "generator": (n for n in ()),
}


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
def test_no_value_makes_a_long_message_or_an_error_that_stays(value):
    """
    Whatever was given, the message is short and the error can be pickled.
    """
    error = InvalidRequest("priority", value, "a whole number")

    assert len(str(error)) < 300
    assert facts(TRAVELS["pickle"](error)) == facts(error)


def test_a_short_value_is_kept_as_given():
    """
    Numbers, words and None are attributes a program can use.
    """
    given = [None, True, 7, 0.5, "high"]

    assert [InvalidRequest("x", value, "y").value for value in given] == given


@pytest.mark.parametrize(
    "error",
    [
        InvalidRequest("n" * 10**6, 1, "a" * 10**6),
        BadGrammar("x" * 10**6, None),
        BadSchema("regex", "x" * 10**6),
        Unsupported("chat messages", "x" * 10**6),
        AdapterLoadFailed("x" * 10**6, "no such file"),
        ModelLoadFailed("model.gguf", "x" * 10**6),
    ],
    ids=lambda error: type(error).__name__,
)
def test_strangers_words_are_bounded(error):
    """
    What a parser or a template said is cut, so that no message is a megabyte.
    """
    assert len(str(error)) < MAX_REASON + 300


def results() -> list[object]:
    timings = Timings(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, (0.7,))
    usage = Usage(3, 1, 2, CacheTier.HOST)
    row = TokenLogprobs(5, -0.5, ((5, -0.5), (6, -1.5)))
    use = SamplerUse("host", "a grammar")
    reason = FinishReason.STOP
    counts = {field.name: index for index, field in enumerate(fields(EngineStats))}
    stats = EngineStats(**(counts | {"finished": {"stop": 1}}))
    return [
        timings,
        usage,
        row,
        use,
        Delta("a", (5,), 1, (row,)),
        Result("a", (5,), reason, usage, timings, 9, 1, (row,), (row,), use),
        Score((4, 5), (row,)),
        stats,
        cache_stats(),
    ]


def cache_stats() -> CacheStats:
    ledger = Ledger(100, 10)
    ledger.evictions[Eviction.SPACE] += 2
    ledger.refusals[Refusal.TOO_BIG] += 1
    return ledger.stats()


@pytest.mark.parametrize("travel", TRAVELS.values(), ids=TRAVELS)
@pytest.mark.parametrize("value", results(), ids=lambda value: type(value).__name__)
def test_results_and_statistics_travel(value, travel):
    """
    What a caller gets back is equal after pickling and copying.
    """
    assert travel(value) == value


@pytest.mark.parametrize(
    "value", results()[-2:], ids=lambda value: type(value).__name__
)
def test_statistics_are_json(value):
    """
    asdict() of statistics can be written as JSON as it is.
    """
    written = json.loads(json.dumps(asdict(value)))

    assert written == asdict(value)
