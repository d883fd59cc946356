"""Each option reaches something."""

import ast
import inspect
from pathlib import Path

import pytest

import pyllama_raw
from pyllama_raw import (
    CacheConfig,
    ConfigError,
    ContextConfig,
    EmbeddingConfig,
    EngineConfig,
    LogConfig,
    MediaConfig,
    ModelConfig,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.core.scheduling.scheduler import Scheduler
from pyllama_raw.engine.layout import context_fields
from pyllama_raw.engine.requests import Admission
from pyllama_raw.lab.calls import OPTIONS as OF_CALLS
from pyllama_raw.native import params as native
from pyllama_raw.native.libllama import ffi
from pyllama_raw.options.config import LeaseConfig
from pyllama_raw.options.requests import ChatOptions, RequestOptions
from pyllama_raw.runners.remote import PYLLAMA
from pyllama_raw.serve.body import OPTIONS as OF_BODIES
from pyllama_raw.serve.config import ListenConfig, ServeConfig
from pyllama_raw.testing import FakeExecutor, fake_engine, fake_limits, letters

PACKAGE = Path(pyllama_raw.__file__).parent

# A value other than the default for each field, and the C field that shows it.
MODEL_FIELDS = {
    "n_gpu_layers": (3, "n_gpu_layers"),
    "devices": (("CPU",), "devices"),
    "split_mode": ("row", "split_mode"),
    "main_gpu": (2, "main_gpu"),
    "tensor_split": ((1.0,), "tensor_split"),
    "load_mode": ("none", "load_mode"),
    "lazy_mode": ("on", "lazy_mode"),
    "kv_overrides": ({"a.b": 3}, "kv_overrides"),
    "check_tensors": (True, "check_tensors"),
    "use_extra_bufts": (False, "use_extra_bufts"),
    "no_host": (True, "no_host"),
    "load_mtp": (True, "load_mtp"),
}
CONTEXT_FIELDS = {
    "n_ctx": (777, "n_ctx"),
    "n_batch": (1024, "n_batch"),
    "n_ubatch": (256, "n_ubatch"),
    "n_outputs_max": (64, "n_outputs_max"),
    "n_threads": (3, "n_threads"),
    "n_threads_batch": (5, "n_threads_batch"),
    "kv_unified": (False, "kv_unified"),
    "flash_attn": ("on", "flash_attn_type"),
    "type_k": ("q8_0", "type_k"),
    "type_v": ("q8_0", "type_v"),
    "swa_full": (False, "swa_full"),
    "offload_kqv": (False, "offload_kqv"),
    "op_offload": (False, "op_offload"),
    "rope_scaling": ("yarn", "rope_scaling_type"),
    "rope_freq_base": (1e4, "rope_freq_base"),
    "rope_freq_scale": (0.5, "rope_freq_scale"),
    "yarn_ext_factor": (1.0, "yarn_ext_factor"),
    "yarn_attn_factor": (2.0, "yarn_attn_factor"),
    "yarn_beta_fast": (16.0, "yarn_beta_fast"),
    "yarn_beta_slow": (4.0, "yarn_beta_slow"),
    "yarn_orig_ctx": (1024, "yarn_orig_ctx"),
}


def test_the_tables_name_every_field():
    """
    A new option needs a line that shows where it goes.
    """
    # tests/engine/test_lease.py shows what a lease does, tests/api/test_chat_templates.py the rest.
    elsewhere = {"lease", "chat_template", "template_process"}
    assert set(MODEL_FIELDS) | elsewhere == set(ModelConfig.model_fields)
    # tests/native/kernels shows that the last one reaches something.
    assert set(CONTEXT_FIELDS) | {"fast_kernels"} == set(ContextConfig.model_fields)


def names_read() -> set[str]:
    """The names of attributes that the package reads; a declaration is a name, not an attribute."""
    names: set[str] = set()
    for path in PACKAGE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
    return names


def test_no_option_is_dead():
    """
    Each option of the other classes is read somewhere behind its declaration.
    """
    classes = (
        *(CacheConfig, EmbeddingConfig, MediaConfig, LogConfig, LeaseConfig),
        *(EngineConfig, ServeConfig, ListenConfig),
    )
    fields = {
        f"{of.__name__}.{name}": name for of in classes for name in of.model_fields
    }
    read = names_read()

    assert {where for where, name in fields.items() if name not in read} == set()


@pytest.mark.native
@pytest.mark.parametrize("name", MODEL_FIELDS)
def test_model_options_reach_libllama(name):
    """
    Each field changes the C struct that the model is loaded with.
    """
    value, c_name = MODEL_FIELDS[name]

    def c_value(**options):
        fields = ModelConfig(**options).loading
        params, _keep_alive = native.model_params(fields, vocab_only=False)
        return str(getattr(params, c_name))

    assert c_value(**{name: value}) != c_value()


@pytest.mark.native
@pytest.mark.parametrize("name", CONTEXT_FIELDS)
def test_context_options_reach_libllama(name):
    """
    Each field changes the C struct that the context is made with.
    """
    value, c_name = CONTEXT_FIELDS[name]

    def c_value(**options):
        fields = context_fields(ContextConfig(**options), 8, 4096)
        del fields["fast_kernels"]
        return getattr(native.context_params(fields, n_seq_max=8), c_name)

    assert c_value(**{name: value}) != c_value(n_threads=1)


@pytest.mark.native
def test_a_context_has_the_defaults_of_the_options():
    """
    What a test or a benchmark leaves out is as users have it, but for what is chosen by
    the machine and the number of slots.
    """
    fields = ContextConfig().model_dump(exclude={"fast_kernels", "n_ctx", "n_threads"})

    given = native.context_params(fields, n_seq_max=8)
    left_out = native.context_params({}, n_seq_max=8)
    assert bytes(ffi.buffer(given)) == bytes(ffi.buffer(left_out))
    given, _ = native.model_params(ModelConfig().loading, vocab_only=False)
    left_out, _ = native.model_params({}, vocab_only=False)
    assert bytes(ffi.buffer(given)) == bytes(ffi.buffer(left_out))


def test_scheduler_options_are_those_of_the_scheduler():
    """
    Names and defaults of the configuration are those of the scheduler and of admission.
    """
    accepted = {
        name: parameter.default
        for owner in (Scheduler, Admission)
        for name, parameter in inspect.signature(owner).parameters.items()
        if parameter.default is not parameter.empty
    }

    of_parts = ("cache", "disk", "snapshot_cost", "snapshot_interval_tokens", "report")
    of_parts += ("texts", "speculates", "exact_drafts", "draft")
    for name in of_parts:
        del accepted[name]
    assert SchedulerConfig().model_dump(exclude={"n_slots"}) == accepted | {
        "policy": "fcfs"  # the scheduler takes an instance, or None for fcfs
    }


def test_deterministic_pins_the_context():
    """
    Split memory, no flash attention, no rings; everything else stays as given.
    """
    given = ContextConfig(n_ctx=512, flash_attn="auto", swa_full=False)
    config = EngineConfig(context=given, deterministic=True)

    pinned = {"kv_unified": False, "flash_attn": "off", "swa_full": True}
    assert config.resolved_context.model_dump() == given.model_dump() | pinned
    assert EngineConfig(context=given).resolved_context == given


def test_deterministic_and_fast_pins_whole_windows_only():
    """
    Kernels need no other memory; what they could not keep is refused.
    """
    given = ContextConfig(n_ctx=512, n_ubatch=2, swa_full=False)
    config = EngineConfig(context=given, deterministic="fast")

    pinned = given.model_dump() | {"swa_full": True}
    assert config.resolved_context.model_dump() == pinned
    assert config.resolved_model == config.model
    for part in (
        {"context": {"fast_kernels": False}},
        {"scheduler": {"context_full": "shift"}},
        {"deterministic": "slow"},
    ):
        with pytest.raises(ConfigError, match=next(iter(part))):
            EngineConfig(**{"deterministic": "fast"} | part)


@pytest.mark.parametrize(
    ("context", "scheduler", "name"),
    [
        ({"n_ubatch": 2}, {"n_slots": 1}, "n_ubatch"),
        ({"n_ubatch": 7}, {"n_slots": 8}, "n_ubatch"),
        ({}, {"token_budget": 2}, "token_budget"),
        ({"n_outputs_max": 2}, {}, "n_outputs_max"),
    ],
)
def test_deterministic_refuses_steps_of_a_token_or_two(context, scheduler, name):
    """
    Then a prompt could not be divided without a single token.
    """
    parts = {
        "context": ContextConfig(**context),
        "scheduler": SchedulerConfig(**scheduler),
    }

    EngineConfig(**parts)
    with pytest.raises(ConfigError, match=name):
        EngineConfig(**parts, deterministic=True)


def test_the_size_of_the_context_is_chosen_when_left_open():
    """
    2048 tokens a slot, or what the model was trained on; a given number stays.
    """
    assert context_fields(ContextConfig(), 4, 8192)["n_ctx"] == 4 * 2048
    assert context_fields(ContextConfig(), 4, 512)["n_ctx"] == 4 * 512
    assert context_fields(ContextConfig(n_ctx=300), 4, 512)["n_ctx"] == 300


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("options", "field", "expected"),
    [
        ({"max_tokens": 3}, "max_tokens", 3),
        ({"stop_token_ids": (5,)}, "stop_token_ids", frozenset({5, 257})),
        ({"ignore_eos": True}, "stop_token_ids", frozenset()),
    ],
)
async def test_sampling_options_reach_the_request(options, field, expected):
    """
    What ends a request is in the request.
    """
    requests = []

    class Recording(FakeExecutor):
        def open(self, request):
            super().open(request)
            requests.append(request)

    async with fake_engine(Recording(fake_limits())) as engine:
        await engine.complete("a", SamplingParams(**{"max_tokens": 1} | options))

    assert getattr(requests[0], field) == expected


@pytest.mark.anyio
async def test_outputs_of_a_request_share_its_stop_strings():
    """
    They are in each request, as one table, in UTF-8.
    """
    requests = []

    class Recording(FakeExecutor):
        def open(self, request):
            super().open(request)
            requests.append(request)

    async with fake_engine(Recording(fake_limits())) as engine:
        await engine.complete_n("a", SamplingParams(max_tokens=1, n=2, stop=("é",)))

    first, second = requests
    assert first.stop is second.stop
    assert first.stop.strings == ("é".encode(),)


@pytest.mark.anyio
async def test_sampling_parameters_reach_the_executor():
    """
    How tokens are chosen is handed on as it was given.
    """
    requests = []

    class Recording(FakeExecutor):
        def open(self, request):
            super().open(request)
            requests.append(request)

    executor = Recording(fake_limits(), next_token=letters)
    params = SamplingParams(temperature=0.3, top_k=7, top_p=0.5, min_p=0.1, seed=9)
    async with fake_engine(executor) as engine:
        await engine.complete("a", params)

    assert requests[0].sampling == params


# Options of a request that a list leaves out, and why.
LEFT_OUT = {
    "bodies": {
        **dict.fromkeys(
            ChatOptions.__annotations__, "of chats, whose dialects read them"
        ),
        "cache_points": "positions of tokens, which clients do not count",
        "slot": "llama.cpp's `id_slot` says it, where slots have files",
    },
    "our client of services": {
        "reply": "a service takes replies apart by itself",
        "chat_template": "the template is the service's",
        "cache_points": "no field of a body",
        "slot": "the same",
    },
    "calls of a benchmark": {
        **dict.fromkeys(ChatOptions.__annotations__, "calls have prompts and no chats"),
        "max_wait_s": "a call that is late counts as late",
        "adapters": "one model is measured",
        "speculation": "an engine is measured as it is set",
        "cache_salt": "calls share prefixes",
        "slot": "slots are chosen as they are by default",
        "cache_points": "a target may be another server",
    },
}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("bodies", OF_BODIES),
        ("our client of services", PYLLAMA.options),
        ("calls of a benchmark", OF_CALLS),
    ],
)
def test_each_option_of_a_request_is_in_a_list_or_left_out_of_it(name, options):
    """
    A new option reaches who asks over HTTP, by our client or in a benchmark, or there is a reason.
    """
    assert {*options} | LEFT_OUT[name].keys() == {*RequestOptions.__annotations__}
    assert not {*options} & LEFT_OUT[name].keys()
