"""Wrong options are refused, by name and in words."""

import pickle
import re

import pytest
from pydantic import BaseModel, ValidationError

from pyllama_raw import (
    CacheConfig,
    ConfigError,
    ContextConfig,
    EngineConfig,
    LogConfig,
    ModelConfig,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.errors import InvalidRequest
from tests.support.hostile import Unhashable, Unreadable, nested

KINDS = (
    SamplingParams,
    EngineConfig,
    ModelConfig,
    ContextConfig,
    SchedulerConfig,
    CacheConfig,
    LogConfig,
)


@pytest.mark.parametrize(
    ("kind", "options", "words"),
    [
        (SamplingParams, {"max_tokens": 0}, "SamplingParams.max_tokens=0"),
        (SamplingParams, {"temperature": float("nan")}, "temperature"),
        (SamplingParams, {"top_p": 0}, "top_p"),
        (SamplingParams, {"stop": ("",)}, "stop"),
        (SamplingParams, {"stop": ("\ud800",)}, "unicode"),
        (SamplingParams, {"tempreature": 1}, "tempreature"),
        (SchedulerConfig, {"n_slots": 0}, "n_slots"),
        (SchedulerConfig, {"n_slots": 257}, "n_slots=257"),
        (ContextConfig, {"n_ubatch": 4096}, "n_ubatch=4096: give at most n_batch"),
        (ContextConfig, {"flash_attn": "off", "type_v": "q8_0"}, "flash attention"),
        (CacheConfig, {"directory": "/states", "max_bytes": 0}, "max_bytes"),
        (ModelConfig, {"split_mode": "diagonal"}, "split_mode"),
    ],
)
def test_wrong_options_are_refused_by_name(kind, options, words):
    """
    The error is a ConfigError and a ValueError that names field and value.
    """
    with pytest.raises(ConfigError, match=words) as caught:
        kind(**options)

    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize(
    ("kind", "name", "words"),
    [
        (EngineConfig, "n_ctx", "did you mean context.n_ctx?"),
        (EngineConfig, "n_slot", "did you mean scheduler.n_slots?"),
        (ContextConfig, "n_treads", "did you mean n_threads?"),
        (SamplingParams, "tempreature", "did you mean temperature?"),
        (SamplingParams, "n_ctx", "give a known option"),
        (SchedulerConfig, "colour", "give a known option"),
        (SamplingParams, "x" * 10**6, "give a known option"),
    ],
)
def test_an_unknown_name_is_answered_with_a_known_one(kind, name, words):
    """
    The whole tree is searched: its places, the other options, then what is spelt alike.
    """
    with pytest.raises(ConfigError, match=re.escape(words)) as caught:
        kind(**{name: 1})

    assert str(caught.value).endswith(words)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "name", ["self", "cls", "data", "values", "__init__", "__class__", "model_config"]
)
def test_names_that_python_uses_itself_are_unknown_options(kind, name):
    """
    A field of a stranger's JSON may have any name; the error tells which one is wrong.
    """
    with pytest.raises(ConfigError, match=f"^{kind.__name__}.{name}=1"):
        kind(**{name: 1})


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_any_slip_in_a_name_is_answered_with_one_error(kind):
    """
    Whichever letter is missing, a name is proposed, and no error of pydantic is chained.
    """
    slips = {
        name[:i] + name[i + 1 :] for name in kind.model_fields for i in range(len(name))
    }
    unanswered = []
    for slip in slips - set(kind.model_fields):
        with pytest.raises(ConfigError) as caught:
            kind(**{slip: 1})
        if "; did you mean " not in str(caught.value) and len(slip) > 3:
            unanswered.append(slip)
        assert (caught.value.__cause__, caught.value.__context__) == (None, None)

    assert unanswered == []


def test_every_slot_has_a_cell():
    """
    A context that is smaller than its slots are many is refused before a model is loaded.
    """
    with pytest.raises(
        ConfigError, match=r"context\.n_ctx=1: give at least n_slots \(8\)"
    ):
        EngineConfig(context=ContextConfig(n_ctx=1))

    slots = SchedulerConfig(n_slots=1)
    assert EngineConfig(context=ContextConfig(n_ctx=1), scheduler=slots)


def test_nobody_reads_the_error_of_pydantic():
    """
    A mistake has one traceback, and tells the whole place in one line.
    """
    with pytest.raises(ConfigError) as caught:
        EngineConfig(context={"n_ctx": 0}, scheduler={"n_slots": "many"})

    assert caught.value.__cause__ is None
    assert caught.value.__context__ is None
    assert str(caught.value) == (
        "EngineConfig.context.n_ctx=0: give at least 1; "
        "EngineConfig.scheduler.n_slots='many': give a whole number"
    )


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"deterministic": "slow"}, "deterministic='slow': give False, True or 'fast'"),
        (
            {"speculation": "lookup"},
            "speculation='lookup': give SpeculationConfig, or a mapping of its options",
        ),
        (
            {"speculation": {"draft": {"path": "a.gguf", "n_gpu_layers": "all"}}},
            "speculation.draft.n_gpu_layers='all': give a whole number",
        ),
    ],
)
def test_an_option_of_several_kinds_has_one_name(options, words):
    """
    The place of a mistake has names of options alone, and no branch of a union of types.
    """
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**options)

    assert f"EngineConfig.{words}" in str(caught.value).split("; ")


def test_one_wrong_item_of_a_list_is_told():
    """
    A million of them would be as many errors, of a thousand bytes each.
    """
    with pytest.raises(ConfigError) as caught:
        EngineConfig(model={"devices": [1, 2]})

    assert caught.value.mistakes == (("model.devices[0]", "1", "text"),)


@pytest.mark.parametrize(
    ("options", "name", "value", "allowed"),
    [
        ({"max_tokens": 0}, "max_tokens", 0, "at least 1"),
        ({"temperature": "hot"}, "temperature", "hot", "a number"),
        ({"top_p": float("inf")}, "top_p", float("inf"), "a finite number"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", 9, "at most max_tokens (3)"),
        ({"logit_bias": {5: 1e9}}, "logit_bias[5]", 1e9, "at most 1000000"),
        ({"stop": 5}, "stop", 5, "a list"),
        ({"stop": ["a", 5]}, "stop[1]", 5, "text"),
        ({"mirostat": 3}, "mirostat", 3, "0, 1 or 2"),
        ({"ignore_eos": "maybe"}, "ignore_eos", "maybe", "True or False"),
        ({"json_schema": "{}"}, "json_schema", "{}", "a mapping"),
        ({"grammar": "a", "regex": "b"}, "regex", "b", "at most one of grammar, regex"),
        ({"grammar_triggers": [5.5]}, "grammar_triggers[0]", 5.5, "text"),
    ],
)
def test_a_wrong_sampling_value_is_the_fault_of_the_request(
    options, name, value, allowed
):
    """
    It is an InvalidRequest with name, value and what is allowed, and still a ConfigError.
    """
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(**options)

    error = caught.value
    assert isinstance(error, ConfigError)
    assert (error.name, error.value, error.allowed) == (name, value, allowed)
    assert (
        str(error) == f"SamplingParams.{name}={value!r} is not allowed: give {allowed}"
    )


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (SamplingParams, "max_tokens", 10**6000),
        (SamplingParams, "temperature", Unreadable()),
        (SamplingParams, "max_tokens", Unreadable()),
        (SamplingParams, "stop", Unreadable()),
        (SamplingParams, "stop", nested(100_000)),
        (SamplingParams, "stop", [5] * 1000),
        (SamplingParams, "stop", "x" * 10**6),
        (SamplingParams, "logit_bias", Unhashable(a=1)),
        (SamplingParams, "logit_bias", {1: Unreadable()}),
        (ModelConfig, "kv_overrides", {"a": nested(100_000)}),
        (CacheConfig, "directory", Unreadable()),
        (EngineConfig, "context", Unreadable()),
        (EngineConfig, "context", SchedulerConfig()),
        (ContextConfig, "n_ctx", float("nan")),
    ],
    ids=range(14),
)
def test_no_value_raises_but_what_is_declared(kind, name, value):
    """
    Whatever stands in the place of an option, the error is a short ConfigError.
    """
    with pytest.raises(ConfigError) as caught:
        kind(**{name: value})

    assert len(str(caught.value)) < 2000


def test_a_copy_is_checked_like_new_options():
    """
    model_copy takes no value, name or pair of values that a constructor refuses.
    """
    params = SamplingParams(max_tokens=5)
    refused = [{"max_tokens": 0}, {"max_tokenz": 5}, {"min_tokens": 9}]

    for update in refused:
        with pytest.raises(InvalidRequest):
            params.model_copy(update=update)
    with pytest.raises(ConfigError, match="n_slots"):
        EngineConfig().model_copy(update={"scheduler": {"n_slots": 0}})
    copied = params.model_copy(update={"seed": 7}, deep=True)
    assert copied == SamplingParams(max_tokens=5, seed=7)
    assert copied.model_fields_set == {"max_tokens", "seed"}
    assert params.model_copy() == params


def test_options_inside_another_model_tell_their_place():
    """
    A web framework that reads a body with SamplingParams in it shows which field is wrong.
    """

    class Body(BaseModel):
        sampling: SamplingParams

    with pytest.raises(ValidationError) as caught:
        Body.model_validate({"sampling": {"temperature": "hot"}})

    assert [item["loc"] for item in caught.value.errors()] == [
        ("sampling", "temperature")
    ]


@pytest.mark.parametrize("kind", [SamplingParams, EngineConfig])
def test_options_travel(kind):
    """
    Options are equal after pickling, and know which of them were set.
    """
    options = kind()

    arrived = pickle.loads(pickle.dumps(options))  # noqa: S301 - our own

    assert arrived == options
    assert arrived.model_fields_set == options.model_fields_set
