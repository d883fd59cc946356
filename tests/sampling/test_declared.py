"""Sampling parameters of the model file: on request, below the user's own, checked."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from pyllama_raw import AsyncEngine, EngineConfig, SamplingParams, SchedulerConfig
from pyllama_raw.errors import RequestError, Unsupported
from pyllama_raw.options.sampling import FIELDS, PREFIX, STAGES, with_declared
from pyllama_raw.testing import FakeExecutor, fake_engine, fake_limits
from tests.support.tiny import RECIPES

DECLARED = {
    "sequence": "penalties;top_k;typ_p;adaptive_p;temperature",
    "top_k": "7",
    "top_p": "0.500000",
    "min_p": "0.25",
    "xtc_probability": "0.125",
    "xtc_threshold": "0.375",
    "temp": "0.6",
    "penalty_last_n": "-1",
    "penalty_repeat": "1.25",
    "mirostat": "2",
    "mirostat_tau": "3.5",
    "mirostat_eta": "0.2",
}
METADATA = {PREFIX + key: text for key, text in DECLARED.items()} | {
    "general.name": "x"
}


def test_everything_declared_is_used():
    """
    Each key of llama.h reaches its field, in llama.cpp's meaning.
    """
    found = with_declared(SamplingParams(from_model=True, seed=3), METADATA)

    assert set(DECLARED) == set(FIELDS)
    assert found == SamplingParams(
        from_model=True,
        seed=3,
        stages=("penalties", "top_k", "typical", "temperature"),
        top_k=7,
        top_p=0.5,
        min_p=0.25,
        xtc_probability=0.125,
        xtc_threshold=0.375,
        temperature=0.6,
        penalty_last_n=None,
        repeat_penalty=1.25,
        mirostat=2,
        mirostat_tau=3.5,
        mirostat_eta=0.2,
    )


def test_nothing_is_used_unasked():
    """
    Without from_model a request is what it was; without a declaration so, too.
    """
    params = SamplingParams(top_k=5)
    asking = SamplingParams(top_k=5, from_model=True)

    assert with_declared(params, METADATA) is params
    assert with_declared(asking, {"general.name": "x"}) == asking


def test_what_the_request_says_wins():
    """
    Also where it says what would be the default anyway, and where the file is wrong.
    """
    metadata = {PREFIX + "top_k": "nonsense", PREFIX + "temp": "0.6"}
    params = SamplingParams(from_model=True, top_k=40)

    found = with_declared(params, metadata)

    assert (found.top_k, found.temperature) == (40, 0.6)


def test_top_k_below_one_is_off():
    """
    As llama.cpp means it.
    """
    params = SamplingParams(from_model=True)

    assert with_declared(params, {PREFIX + "top_k": "-1"}).top_k == 0


@pytest.mark.parametrize(
    ("key", "text", "words"),
    [
        ("top_p", "7.5", "top_p=7.5"),
        ("temp", "warm", "temp='warm' is no number"),
        ("temp", "nan", "temperature"),
        ("top_k", "1e3", "is no number"),
        ("sequence", "top_k;greedy", "'greedy'"),
        ("sequence", "top_k;top_k", "each stage once"),
        ("penalty_last_n", "-2", "penalty_last_n"),
        ("mirostat", "3", "mirostat"),
        ("xtc_threshold", "", "xtc_threshold"),
    ],
)
def test_a_wrong_declaration_is_the_fault_of_the_file(key, text, words):
    """
    The request is refused in words that say so, and what to do.
    """
    with pytest.raises(Unsupported, match=words) as caught:
        with_declared(SamplingParams(from_model=True), {PREFIX + key: text})

    assert isinstance(caught.value, RequestError)
    assert "in the model file" in str(caught.value)
    assert "from_model" in str(caught.value)


@pytest.mark.anyio
async def test_requests_are_completed_by_the_engine():
    """
    What reaches the executor is the declared value; a wrong one ends its request only.
    """
    requests = []

    class Recording(FakeExecutor):
        def open(self, request):
            super().open(request)
            requests.append(request.sampling)

    metadata = {PREFIX + "temp": "0.625", PREFIX + "top_k": "x"}
    async with fake_engine(Recording(fake_limits()), metadata=metadata) as engine:
        with pytest.raises(Unsupported, match="in the model file"):
            await engine.complete("a", SamplingParams(from_model=True))
        await engine.complete("a", SamplingParams(from_model=True, top_k=9, seed=1))
        await engine.complete("a", SamplingParams(seed=1))

    assert [(p.temperature, p.top_k) for p in requests] == [(0.625, 9), (0.8, 40)]


@pytest.fixture(scope="module")
def declaring(tmp_path_factory) -> Path:
    """A model file that declares two parameters."""
    from scripts.tiny_models import gguf

    path = tmp_path_factory.mktemp("declaring") / "model.gguf"
    more = {PREFIX + "top_k": 1, PREFIX + "sequence": "top_k;temperature"}
    gguf.write(replace(RECIPES["llama"], more=more), path)
    return path


@pytest.mark.native
def test_the_keys_are_those_of_the_library():
    """
    All that llama.h knows, as it spells them.
    """
    from pyllama_raw.native.libllama import ffi, lib

    known = ffi.typeof("enum llama_model_meta_key").elements
    keys = {ffi.string(lib.llama_model_meta_key_str(key)).decode() for key in known}

    assert keys == {PREFIX + key for key in FIELDS}


@pytest.mark.native
@pytest.mark.anyio
async def test_a_real_file_decides(declaring: Path):
    """
    Its top_k of 1 is greedy: two seeds agree; on their own they do not.
    """
    config = EngineConfig(scheduler=SchedulerConfig(n_slots=1))

    async with AsyncEngine.open(declaring, config) as engine:

        async def tokens(**given: object) -> tuple[int, ...]:
            params = SamplingParams(max_tokens=12, **given)
            return (await engine.complete("Hello", params)).token_ids

        asked = [await tokens(seed=seed, from_model=True) for seed in (1, 2)]
        own = [await tokens(seed=seed) for seed in (1, 2)]

    assert asked[0] == asked[1]
    assert own[0] != own[1]


@pytest.mark.native
def test_info_shows_what_is_declared(declaring: Path, capsys):
    """
    As the file says it; of a wrong one also why it cannot be used.
    """
    from pyllama_raw.cli import main
    from pyllama_raw.cli.info import _sampling

    assert main(["info", str(declaring), "--json", "--n-ctx", "256"]) == 0
    facts = json.loads(capsys.readouterr().out)["model"]
    wrong = _sampling({PREFIX + "temp": "hot"})

    assert facts["sampling_top_k"] == "1"
    assert facts["sampling_sequence"] == "top_k;temperature"
    assert "sampling_error" not in facts
    assert wrong["sampling_temp"] == "hot"
    assert "'hot' is no number" in wrong["sampling_error"]


def test_the_flag_asks_for_it():
    """
    `--model-sampling` is from_model of every request.
    """
    from tests.cli.test_constraints import parse

    assert parse("--model-sampling", "--top-k", "3") == {"from_model": True, "top_k": 3}
    assert SamplingParams(**parse("--model-sampling")).stages == STAGES
