"""A draft model beside a real one: outputs are those of the first, whatever the second does."""

import shutil
from collections import Counter

import gguf
import numpy as np
import pytest

from pyllama_raw import (
    ConfigError,
    ContextConfig,
    Engine,
    EngineConfig,
    SamplingParams,
    SchedulerConfig,
    SpeculationConfig,
    estimate_memory,
)
from pyllama_raw.core.costs import CostHistory
from pyllama_raw.core.scheduling import speculation
from pyllama_raw.core.scheduling.speculation import DraftModel
from pyllama_raw.engine.draft_executor import DraftExecutor
from pyllama_raw.errors import DecodeFailed, ModelNotFound, NoKVSpace
from pyllama_raw.native.libllama import lib
from pyllama_raw.native.model import quantize
from pyllama_raw.options.config import DraftConfig
from scripts.large_models import wider_model
from tests.native.support import unlike_before
from tests.native.test_speculation import GREEDY, preempted, prompts_of
from tests.support.last_digits import (
    STEADY,
    needs_attention,
    needs_steady_digits,
    steady_attention,
)
from tests.support.near_ties import parting
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

CHI_999 = 45.3  # of 20 degrees of freedom: one in a thousand is larger


@pytest.fixture(autouse=True)
def free_drafts(monkeypatch):
    """Drafts cost nothing, so there are some in every step that may have them."""
    monkeypatch.setattr(
        CostHistory, "decode_seconds", lambda _, n_most: [1.0] * (n_most + 1)
    )
    monkeypatch.setattr(DraftModel, "seconds", lambda *_: 1e-3)


@pytest.fixture(scope="module")
def smaller(tmp_path_factory):
    """A tiny model of few bits, which is right about another one at times."""
    path = tmp_path_factory.mktemp("draft") / "llama.gguf"
    quantize(tiny_model("llama"), path, "q4_0")
    return path


def opened(path, draft=None, *, n_slots=4, **fields):
    parts = {
        "context": ContextConfig(n_ctx=4096, n_threads=1, **steady_attention()),
        "scheduler": SchedulerConfig(n_slots=n_slots),
        "speculation": {"draft": draft} if draft else {},
    }
    return Engine.open(path, config=EngineConfig(**parts | fields))


def both(path, draft, prompts, params, **fields):
    """Results without a draft model, and with it."""
    results = []
    for second in (None, draft):
        with opened(path, second, **fields) as engine:
            results.append(engine.complete_many(prompts, params))
            stats = engine.stats()
    assert stats.drafted_tokens >= stats.accepted_tokens > 0
    assert stats.accepted_tokens == sum(r.usage.accepted_tokens for r in results[1])
    return results


@pytest.mark.parametrize(
    "name", ["llama", pytest.param("default", marks=needs_steady_digits)]
)
def test_greedy_outputs_are_those_without(name, model_path, smaller):
    """
    Up to near ties; log-probabilities are the first model's, within 1e-3.
    """
    path = model_path if name == "default" else tiny_model("llama")
    draft = model_path if name == "default" else smaller
    n_prompts = 6 if name == "default" else 32
    fields = STEADY if name == "default" else {}
    plain, drafted = both(path, draft, prompts_of(n_prompts), GREEDY, **fields)

    for reference, other in zip(plain, drafted, strict=True):
        assert parting(reference.logprobs, other.token_ids) is None
        for score, again in zip(reference.logprobs, other.logprobs, strict=True):
            if score.token_id != again.token_id:
                break
            assert again.logprob == pytest.approx(score.logprob, abs=1e-3)


def test_a_model_that_is_wider_says_the_same(tmp_path):
    """
    That of scripts/large_models.py, before it is quantized: so the smaller one drafts for it.
    """
    small = tiny_model("llama")
    wide = wider_model(small, 3, tmp_path, "f16")
    _, drafted = both(wide, small, prompts_of(8), GREEDY)
    with opened(small) as engine:
        originals = engine.complete_many(prompts_of(8), GREEDY)

    for original, other in zip(originals, drafted, strict=True):
        place = parting(original.logprobs, other.token_ids)
        assert place is None or place[1] < 0.02  # its weights have 16 bits
    drafts = sum(result.usage.drafted_tokens for result in drafted)
    assert sum(result.usage.accepted_tokens for result in drafted) > 0.8 * drafts
    assert wide.stat().st_size > 3 * small.stat().st_size


@needs_attention
@pytest.mark.usefixtures("at_best_level")
def test_fast_and_deterministic_outputs_are_bit_for_bit_those_without(smaller):
    """
    Drawn ones, too: each token takes one draw of the first model's row.
    """
    params = SamplingParams(
        seed=3, max_tokens=48, ignore_eos=True, temperature=0.4, logprobs=2
    )
    plain, drafted = both(smaller, smaller, prompts_of(8), params, deterministic="fast")

    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    assert [r.logprobs for r in drafted] == [r.logprobs for r in plain]


def test_draws_have_the_distribution_of_the_first_model(smaller):
    """
    The second and third token of 1,024 outputs, with and without: chi-squared of two samples.
    """
    (prompt,) = prompts_of(1)
    samples = []
    for draft, first_seed in ((None, 0), (smaller, 10_000)):
        counts = Counter()
        with opened(tiny_model("llama"), draft, n_slots=16) as engine:
            for seed in range(first_seed, first_seed + 1024, 64):
                params = SamplingParams(
                    max_tokens=5, top_k=3, temperature=0.5, seed=seed, n=64
                )
                results = engine.complete_n(prompt, params)
                counts.update(tuple(r.token_ids[1:3]) for r in results)
            n_accepted = engine.stats().accepted_tokens
        samples.append(counts)

    plain, drafted = samples
    common = [key for key, n in (plain + drafted).items() if n >= 20]
    chi = sum(
        (plain[key] - drafted[key]) ** 2 / (plain[key] + drafted[key]) for key in common
    )
    assert n_accepted > 100
    assert len(common) <= 20
    assert chi < CHI_999


@needs_steady_digits
def test_constraints_stops_and_several_outputs(model_path):
    """
    Each output has drafts of its own, which follow its constraint; a request may refuse all.
    """
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 12}},
        "required": ["name"],
        "additionalProperties": False,
    }
    (prompt,) = prompts_of(1)
    of_schema = SamplingParams(temperature=0, max_tokens=40, json_schema=schema)
    of_many = SamplingParams(
        temperature=0.6, seed=1, max_tokens=40, n=3, ignore_eos=True
    )
    results = []
    for draft in (None, model_path):
        with opened(model_path, draft, **STEADY) as engine:
            (json,) = engine.complete_many([prompt], of_schema)
            outputs = engine.complete_n(prompt, of_many)
            stop = outputs[0].text[20:24]
            stopped = of_many.model_copy(update={"stop": (stop,), "n": 1})
            (end,) = engine.complete_many([prompt], stopped)
            before = engine.stats().drafted_tokens
            engine.complete(prompt, stopped, speculation=False)
            after = engine.stats().drafted_tokens
            with engine.generate(prompt, of_many.model_copy(update={"n": 1})) as stream:
                text = "".join(delta.text for delta in stream)
        assert before == after
        results.append((json, outputs, end, text))

    plain, drafted = results
    assert drafted[0].text == plain[0].text
    assert [r.text for r in drafted[1]] == [r.text for r in plain[1]]
    assert sum(r.usage.accepted_tokens for r in drafted[1]) > 0
    assert drafted[2].text == plain[2].text == plain[1][0].text.split(stop)[0]
    assert drafted[2].usage.accepted_tokens < drafted[2].usage.completion_tokens
    assert drafted[3] == plain[3]


def test_who_leaves_and_who_is_preempted(smaller):
    """
    Whatever became of the one before in a slot of the draft model, the next output is right.
    """
    path, prompts = tiny_model("llama"), prompts_of(6)
    params = GREEDY.model_copy(update={"max_tokens": 300})
    with opened(path) as engine:
        plain = engine.complete_many(prompts, params)
    scheduler = SchedulerConfig(n_slots=1, preempt="priority")
    with opened(path, smaller, scheduler=scheduler) as engine:
        results = preempted(engine, prompts, params)
        stats = engine.stats()

    assert stats.preempted > 0
    assert stats.accepted_tokens > 0
    expected = [*plain[-1:], *plain[:-1], *plain[::2]]
    for reference, other in zip(expected, results, strict=True):
        assert parting(reference.logprobs, other.token_ids) is None


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_frees_the_draft_model_too(level, smaller):
    """
    Afterwards it has a context again, and slots are filled anew.
    """
    path, prompts = tiny_model("llama"), prompts_of(4)
    with opened(path, smaller) as engine:
        before = engine.complete_many(prompts, GREEDY)
        engine.sleep(level)
        engine.wake()
        after = engine.complete_many(prompts, GREEDY)
        n_accepted = [
            sum(r.usage.accepted_tokens for r in rs) for rs in (before, after)
        ]

    assert min(n_accepted) > 0
    for reference, other in zip(before, after, strict=True):
        assert parting(reference.logprobs, other.token_ids) is None


def test_texts_of_idle_slots_make_room(smaller, caplog):
    """
    The draft model has the cells of the first one, and forgets what was used longest ago; outputs
    that share a long prompt do not fit it all, and are drafted as far as they do.
    """
    path, prompts = tiny_model("llama"), prompts_of(6, n_tokens=600)
    context = ContextConfig(n_ctx=2048, n_threads=1)
    params = SamplingParams(temperature=0.5, seed=1, max_tokens=60, ignore_eos=True)
    with opened(path, smaller, context=context, n_slots=8) as engine:
        n_accepted = [
            engine.complete(prompt, params).usage.accepted_tokens for prompt in prompts
        ]
        outputs = engine.complete_n(prompts[0], params.model_copy(update={"n": 8}))
        stats = engine.stats()

    assert min(n_accepted) > 0
    assert sum(result.usage.accepted_tokens for result in outputs) > 0
    assert stats.failed == 0
    assert "the draft model failed" not in caplog.text


@pytest.mark.parametrize("error", [DecodeFailed, NoKVSpace])
def test_a_draft_model_that_fails_fails_no_request(error, smaller, monkeypatch, caplog):
    """
    Its context is made anew or emptied, the log says so, and outputs go on.
    """
    path, prompts = tiny_model("llama"), prompts_of(4)
    with opened(path) as engine:
        plain = engine.complete_many(prompts, GREEDY)
    run, n_calls = DraftExecutor._run, []

    def failing(executor, works, context):
        n_calls.append(len(works))
        if len(n_calls) in (2, 3):
            raise error("llama_decode", -3, "as told")
        return run(executor, works, context)

    monkeypatch.setattr(DraftExecutor, "_run", failing)
    monkeypatch.setattr(speculation, "PAUSE", 1)
    with opened(path, smaller) as engine:
        drafted = engine.complete_many(prompts, GREEDY)
        stats = engine.stats()

    assert len(n_calls) > 3
    assert stats.failed == 0
    assert stats.accepted_tokens > 0
    assert "the draft model failed, requests go on without" in caplog.text
    for reference, other in zip(plain, drafted, strict=True):
        assert parting(reference.logprobs, other.token_ids) is None


def test_a_draft_model_with_infinite_logits_fails_no_request(smaller, tmp_path):
    """
    Its drafts have no probability that is a number, and are as good as wrong.
    """
    path, (prompt,) = tmp_path / "infinite.gguf", prompts_of(1)
    shutil.copy(tiny_model("llama"), path)
    path.chmod(0o600)
    tensors = gguf.GGUFReader(path, "r+").tensors
    output = next(tensor for tensor in tensors if tensor.name == "output.weight")
    output.data[:8, :1] = np.inf
    output.data.flush()
    with opened(smaller) as engine:
        plain = engine.complete(prompt, GREEDY)
    with opened(smaller, path) as engine:
        drafted = engine.complete(prompt, GREEDY)
        stats = engine.stats()

    assert drafted.token_ids == plain.token_ids
    assert (stats.failed, stats.failed_steps) == (0, 0)
    assert stats.drafted_tokens > 0


@pytest.mark.parametrize("code", [1, 2, -1, -3])
def test_decodes_that_fail_lose_nothing(code, smaller):
    """
    Of either model: no space, an abort, a refused batch and a lost context.
    """
    path, prompts = tiny_model("llama"), prompts_of(3)
    with opened(path) as engine:
        plain = engine.complete_many(prompts, GREEDY)
    with opened(path, smaller) as engine:
        results = []
        for n_until in (3, 4, 5, 6, 9, 12):
            lib.plr_fail_decode(code, n_until, -1)
            results.append(engine.complete_many(prompts, GREEDY))
        lib.plr_fail_decode(0, 0, -1)
        stats = engine.stats()

    assert (stats.failed, stats.accepted_tokens > 0) == (0, True)
    for of_try in results:
        for reference, other in zip(plain, of_try, strict=True):
            assert parting(reference.logprobs, other.token_ids) is None


@pytest.mark.parametrize(
    ("draft", "reason"),
    [
        (lambda: tiny_model("mamba"), "its memory cannot forget tokens"),
        (lambda: tiny_model("t5"), "it reads prompts with an encoder"),
        (lambda: tiny_model("bert"), "'bert' is an encoder: give a model with the"),
        pytest.param(
            lambda: tiny_model("llada"),
            "'llada' is a diffusion model: give a model",
            marks=unlike_before("has no llada with biases"),
        ),
        (
            lambda: DraftConfig(
                path=tiny_model("llama"),
                kv_overrides={"tokenizer.ggml.eos_token_id": 5},
            ),
            "its vocabulary has eos=5, not",
        ),
    ],
)
def test_a_model_that_makes_no_drafts_is_refused_by_name(draft, reason):
    """
    When the engine opens, with what is wrong; nothing is left behind.
    """
    with pytest.raises(ConfigError, match=reason):
        opened(tiny_model("llama"), draft())
    with pytest.raises(ModelNotFound):
        opened(tiny_model("llama"), "/nowhere/draft.gguf")


def test_another_vocabulary_is_refused_with_its_difference(model_path):
    """
    The size of it, or the first token that is another one.
    """
    with pytest.raises(ConfigError, match=r"its vocabulary has \d+ tokens, not 49152"):
        opened(model_path, tiny_model("llama"))


def test_its_memory_is_in_the_estimate(model_path):
    """
    All of it in a part of its own; weights of the same file count once.
    """
    config = EngineConfig(context=ContextConfig(n_ctx=1024))
    (plain,) = estimate_memory(model_path, config).devices
    with_itself = config.model_copy(update={"speculation": {"draft": model_path}})
    (same,) = estimate_memory(model_path, with_itself).devices
    draft = {"draft": {"path": model_path, "use_extra_bufts": False}}
    other = config.model_copy(update={"speculation": draft})
    (apart,) = estimate_memory(model_path, other).devices

    assert plain.draft_bytes == 0
    assert plain.kv_bytes < same.draft_bytes < plain.total_bytes
    assert same.total_bytes == plain.total_bytes + same.draft_bytes
    assert apart.draft_bytes - same.draft_bytes == plain.weights_bytes


@pytest.mark.parametrize("name", ["mamba", "gemma3", "t5", "bert"])
def test_the_estimate_is_without_one_that_is_not_loaded(name):
    """
    Beside a model without speculation none is, whatever the options say.
    """
    config = EngineConfig(speculation={"draft": tiny_model("llama")})
    (device,) = estimate_memory(tiny_model(name), config).devices

    assert device.draft_bytes == 0


def test_options_say_what_they_need():
    """
    A draft model switches itself on; a mode without one, or one that is unused, is refused.
    """
    assert SpeculationConfig(draft="a.gguf").mode == "draft"
    assert SpeculationConfig(draft="a.gguf").draft_model == DraftConfig(path="a.gguf")
    assert SpeculationConfig(draft="a.gguf", mode="off").draft_model is None
    assert SpeculationConfig(mode="lookup").draft_model is None
    for fields, message in (
        ({"mode": "draft"}, "draft=None: give the file of one"),
        ({"mode": "lookup", "draft": "a.gguf"}, "mode='lookup': give 'draft'"),
        ({"draft": {"path": "a.gguf", "chat_template": "chatml"}}, "chat_template"),
        ({"draft": {"n_gpu_layers": 1}}, "path"),
    ):
        with pytest.raises(ConfigError, match=message):
            SpeculationConfig(**fields)
