"""Steps that verify drafts: no output depends on them, but for near ties."""

import json
from array import array
from collections import Counter
from functools import partial
from itertools import count
from random import Random

import numpy as np
import pytest

from pyllama_raw import (
    ConfigError,
    ContextConfig,
    Engine,
    EngineConfig,
    MediaConfig,
    SamplingParams,
    SchedulerConfig,
)
from pyllama_raw.core.costs import CostHistory
from pyllama_raw.core.scheduling.speculation import DraftOffer, Speculation
from pyllama_raw.engine.guidance import MaskState
from pyllama_raw.engine.sampling import Constraints
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.libllama import lib
from pyllama_raw.native.model import Model, quantize
from pyllama_raw.native.sampler import (
    Matcher,
    RowLogprobs,
    RowSampler,
    RowSamplers,
    SamplerChain,
)
from pyllama_raw.native.stages import Draw, TopK
from tests.api.media_engines import picture
from tests.native.support import make_context, prefill
from tests.support.last_digits import (
    STEADY,
    needs_attention,
    needs_steady_digits,
    steady_attention,
)
from tests.support.near_ties import parting
from tests.support.tiny import tiny_adapter, tiny_model, tiny_projector

pytestmark = pytest.mark.native

N_DRAWS = 20_000
CHI_999 = 59.7  # of 30 degrees of freedom: one in a thousand is larger
GREEDY = SamplingParams(
    temperature=0, seed=0, max_tokens=48, ignore_eos=True, logprobs=2
)


class Oracle:
    """
    Drafts of outputs that are known, some of which are wrong, whatever they cost.

    Tiny models seldom say anything twice, so nothing would be drafted by itself.
    """

    def __init__(self):
        self.outputs = {}  # by prompt and seed
        self.rng = Random(1)  # noqa: S311

    def learn(self, prompts, results):
        for prompt, result in zip(prompts, results, strict=True):
            self.outputs[tuple(prompt), result.seed] = result.token_ids

    def offer(self, running):
        sequence, request = running.sequence, running.request
        key = tuple(request.tokens), request.sampling.seed
        n_most = request.max_tokens - sequence.n_output - 1
        if not request.speculates or key not in self.outputs:
            return None
        start, depth = sequence.n_output, self.rng.randrange(min(n_most, 9) + 1)
        draft = array("i", self.outputs[key][start : start + depth])
        for place in range(len(draft)):
            if self.rng.random() < 0.15:
                draft[place] = self.rng.randrange(3, 200)
        while draft and request.stop_token_ids & {*draft}:
            draft.pop()
        chances = [0.9**n for n in range(len(draft))]
        return DraftOffer(running, draft, chances) if draft else None


@pytest.fixture
def oracle(monkeypatch):
    oracle = Oracle()
    monkeypatch.setattr(
        CostHistory, "decode_seconds", lambda _, n_most: [1.0] * (n_most + 1)
    )

    monkeypatch.setattr(Speculation, "_offer", lambda _, running: oracle.offer(running))
    return oracle


def opened(path, mode, *, n_slots=4, kv_unified=True, **fields):
    context = ContextConfig(
        n_ctx=1024 * n_slots,
        n_threads=1,
        kv_unified=kv_unified,
        **steady_attention(),
    )
    return Engine.open(
        path,
        config=EngineConfig(
            context=context,
            scheduler=SchedulerConfig(n_slots=n_slots),
            speculation={"mode": mode},
            **fields,
        ),
    )


def prompts_of(n_prompts, seed=0, n_tokens=24):
    """Token ids, half of which come again."""
    rng = np.random.default_rng(seed)
    halves = rng.integers(3, 200, (n_prompts, n_tokens // 2)).tolist()
    return [half * 2 for half in halves]


def preempted(engine, prompts, params):
    """Results of urgent requests, one after each of *prompts*, and of every other of these."""
    urgent, slow = [], []
    for n, prompt in enumerate(prompts):
        # The urgent one takes the only slot; the other goes on later, or leaves.
        with engine.generate(prompt, params, priority=5) as stream:
            next(iter(stream))
            urgent.append(engine.complete(prompts[n - 1], params))
            if n % 2 == 0:
                for _ in stream:
                    pass
                slow.append(stream.result)
    return [*urgent, *slow]


def both(oracle, path, prompts, params, **fields):
    """Results without drafts, and with them."""
    results = []
    for mode in ("off", "lookup"):
        with opened(path, mode, **fields) as engine:
            results.append(engine.complete_many(prompts, params))
            stats = engine.stats()
        oracle.learn(prompts, results[0])
    assert stats.drafted_tokens > stats.accepted_tokens > 0
    assert stats.drafted_tokens == sum(r.usage.drafted_tokens for r in results[1])
    assert stats.accepted_tokens == sum(r.usage.accepted_tokens for r in results[1])
    return results


@pytest.mark.parametrize(
    "name",
    ["llama", "qwen2", "llama-moe", pytest.param("default", marks=needs_steady_digits)],
)
def test_greedy_outputs_and_their_scores_are_those_without_drafts(
    name, model_path, oracle
):
    """
    Up to near ties; log-probabilities within 1e-3, and of each token the two likeliest.
    """
    n_prompts = 8 if name == "default" else 32
    path = model_path if name == "default" else tiny_model(name)
    fields = STEADY if name == "default" else {}
    plain, drafted = both(oracle, path, prompts_of(n_prompts), GREEDY, **fields)

    for reference, other in zip(plain, drafted, strict=True):
        assert parting(reference.logprobs, other.token_ids) is None
        for score, again in zip(reference.logprobs, other.logprobs, strict=True):
            if score.token_id != again.token_id:
                break
            assert again.logprob == pytest.approx(score.logprob, abs=1e-3)
            assert [p for _, p in again.top] == pytest.approx(
                [p for _, p in score.top], abs=1e-3
            )


def test_split_memory_verifies_drafts_too(oracle):
    """
    Each slot has cells of its own there.
    """
    path = tiny_model("llama")
    plain, drafted = both(oracle, path, prompts_of(16), GREEDY, kv_unified=False)

    for reference, other in zip(plain, drafted, strict=True):
        assert parting(reference.logprobs, other.token_ids) is None


SAMPLED = {
    "plain": {},
    "penalties": {
        "repeat_penalty": 1.2,
        "frequency_penalty": 0.3,
        "dry_multiplier": 0.5,
    },
    "bias": {"logit_bias": {50: 4.0, 51: -4.0}, "min_tokens": 20, "top_k": 5},
    "mirostat": {"mirostat": 2},
    "cold": {"temperature": 0.0, "repeat_penalty": 1.3},
}


@needs_attention
@pytest.mark.usefixtures("at_best_level")
@pytest.mark.parametrize("kind", SAMPLED)
def test_fast_and_deterministic_outputs_are_bit_for_bit_those_without_drafts(
    kind, tmp_path, oracle
):
    """
    By all samplers: rows have the same bits there, and each token takes one draw.
    """
    path = tmp_path / "llama.gguf"
    quantize(tiny_model("llama"), path, "q4_0")
    params = SamplingParams(
        **{"seed": 3, "max_tokens": 48, "ignore_eos": True, "temperature": 0.3}
        | {"logprobs": 3, "logprobs_of": "sampler" if kind == "bias" else "model"}
        | SAMPLED[kind]
    )
    plain, drafted = both(oracle, path, prompts_of(8), params, deterministic="fast")

    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    assert [r.logprobs for r in drafted] == [r.logprobs for r in plain]


@needs_attention
@pytest.mark.usefixtures("at_best_level")
def test_drafts_by_default_change_no_bit(tmp_path, oracle):
    """
    A request that is asked again, alone, says the same. With adapters, whose products are
    libllama's, it has no drafts.
    """
    path = tmp_path / "llama.gguf"
    quantize(tiny_model("llama"), path, "q4_0")
    params = GREEDY.model_copy(update={"temperature": 0.3, "seed": 3})
    prompts = prompts_of(8)
    with opened(path, "off") as engine:
        plain = [engine.complete(prompt, params) for prompt in prompts]
    oracle.learn(prompts, plain)
    with opened(path, "auto") as engine:
        assert engine.info.speculation == "lookup"
        drafted = [engine.complete(prompt, params) for prompt in prompts]
        n_accepted = engine.stats().accepted_tokens
        engine.load_adapter("a", tiny_adapter("lora-a"))
        adapted = engine.complete(prompts[0], params, adapters={"a": 1.0})

    assert n_accepted > 0
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    assert [r.logprobs for r in drafted] == [r.logprobs for r in plain]
    assert adapted.usage.drafted_tokens == 0


@pytest.mark.usefixtures("at_best_level")
@pytest.mark.parametrize(
    ("kind", "fields", "reason"),
    [
        (None, {}, "weights are of types that our kernels do not weave"),
        ("q4_0", {"model": {"load_mode": "none"}}, "weights are not woven"),
        ("q4_0", {"deterministic": True}, "deterministic is True"),
        ("q4_0", {"sampler_placement": "backend"}, "sampler_placement is backend"),
    ],
)
def test_there_are_no_drafts_by_default_where_they_could_change_bits(
    kind, fields, reason, tmp_path
):
    """
    Nothing is refused: nobody has asked for drafts.
    """
    path = tiny_model("llama")
    if kind is not None:
        path = tmp_path / "llama.gguf"
        quantize(tiny_model("llama"), path, kind)
    with opened(path, "auto", **fields) as engine:
        info = engine.info

    assert info.speculation.startswith("off: ")
    assert reason in info.speculation


@needs_steady_digits
@pytest.mark.parametrize(
    "constraint",
    [
        {"regex": "([a-c]{3}[0-9]{2} ){8}"},
        {"grammar": 'root ::= ("abcabc" | "abd") root | "!"'},
        {"json_schema": {
            "type": "object",
            "properties": {
                "identifier": {"type": "integer"},
                "description": {"enum": ["alpha", "beta"]},
                "measurements": {"type": "array", "items": {"type": "number"},
                                 "minItems": 2, "maxItems": 4},
            },
            "required": ["identifier", "description", "measurements"],
            "additionalProperties": False,
        }},
    ],
    ids=["regex", "grammar", "json_schema"],
)  # fmt: skip
def test_constraints_hold_at_each_place(constraint, model_path, oracle):
    """
    Masks and grammars follow accepted drafts; the output is the one without drafts.
    """
    params = SamplingParams(
        temperature=0, seed=0, max_tokens=96, logprobs=2, **constraint
    )
    prompts = prompts_of(3)
    plain, drafted = both(oracle, model_path, prompts, params, **STEADY)

    for reference, other in zip(plain, drafted, strict=True):
        assert parting(reference.logprobs, other.token_ids) is None
        if "json_schema" in constraint and other.finish_reason == "stop":
            assert set(json.loads(other.text)) == {
                "identifier",
                "description",
                "measurements",
            }


@needs_steady_digits
def test_outputs_of_one_prompt_end_at_stop_strings_in_the_midst_of_drafts(
    model_path, oracle
):
    """
    Each output of n has drafts of its own; a request may refuse all.
    """
    (prompt,) = prompts_of(1)
    params = SamplingParams(temperature=0.5, seed=1, max_tokens=40, n=3)
    with opened(model_path, "off", **STEADY) as engine:
        plain = engine.complete_n(prompt, params)
    oracle.learn([prompt] * 3, plain)
    stop = plain[0].text[20:24]
    params = params.model_copy(update={"stop": (stop,)})
    with opened(model_path, "lookup", **STEADY) as engine:
        results = engine.complete_n(prompt, params)
        refusing = engine.complete_n(prompt, params, speculation=False)

    assert results[0].text == plain[0].text[: plain[0].text.index(stop)]
    assert [r.text for r in refusing] == [r.text for r in results]
    assert sum(r.usage.accepted_tokens for r in results) > 0
    assert [r.usage.drafted_tokens for r in refusing] == [0, 0, 0]


@pytest.mark.parametrize("code", [1, 2, -1, -3])
def test_decodes_that_fail_lose_nothing(code, oracle):
    """
    No space, an abort, a refused batch and a lost context, in the midst of drafts.
    """
    path, prompts = tiny_model("llama"), prompts_of(3)
    with opened(path, "off") as engine:
        plain = engine.complete_many(prompts, GREEDY)
    oracle.learn(prompts, plain)
    with opened(path, "lookup") as engine:
        results = []
        for n_until in (3, 4, 5, 6, 8):
            lib.plr_fail_decode(code, n_until, -1)
            results.append(engine.complete_many(prompts, GREEDY))
        lib.plr_fail_decode(0, 0, -1)
        assert engine.stats().accepted_tokens > 0

    for of_try in results:
        for reference, other in zip(plain, of_try, strict=True):
            assert parting(reference.logprobs, other.token_ids) is None


def test_rows_of_images_are_held_after_a_step_with_drafts(oracle):
    """
    They have a batch of their own, of which no draft is cut off.
    """
    projector, path = tiny_projector("llava")
    media, prompts = MediaConfig(mmproj=projector), prompts_of(16)
    messages = [[picture(n), "x", picture(n + 8), "y"] for n in range(8)]
    with opened(path, "off", media=media) as engine:
        plain = engine.complete_many([*prompts, *messages], GREEDY)
    oracle.learn(prompts, plain[: len(prompts)])
    with opened(path, "lookup", media=media) as engine:
        drafted = engine.complete_many([*prompts, *messages], GREEDY)
        stats = engine.stats()

    assert stats.accepted_tokens > 0
    assert stats.failed_steps == 0
    for reference, other in zip(plain, drafted, strict=True):
        assert parting(reference.logprobs, other.token_ids) is None


@pytest.mark.parametrize("name", ["mamba", "jamba", "gemma3"])
def test_memory_that_cannot_be_cut_says_why_there_are_no_drafts(name):
    """
    The engine works, and its info has the reason.
    """
    with opened(tiny_model(name), "lookup", n_slots=1) as engine:
        (result,) = engine.complete_many(prompts_of(1), GREEDY)
        info = engine.info

    assert info.speculation == (
        "off: the memory of the model cannot forget tokens, as drafts that are wrong"
    )
    assert result.usage.drafted_tokens == 0


@pytest.mark.parametrize(
    ("fields", "reason"),
    [({"deterministic": True}, "fast"), ({"sampler_placement": "backend"}, "backend")],
)
def test_promises_that_drafts_would_break_are_refused(fields, reason):
    """
    By the name of the option, before anything is loaded.
    """
    with pytest.raises(ConfigError, match=reason):
        EngineConfig(speculation={"mode": "lookup"}, **fields)


def test_draws_of_two_places_have_the_distribution_of_the_model():
    """
    20,000 steps with a draft: chi-squared of the tokens of both places, and their scores.
    """
    with Model.load(tiny_model("llama")) as model, make_context(model) as context:
        prompt, slot = array("i", range(10, 30)), 0
        prefill(context, prompt[:-1], slot=slot)
        last, n_kept, n_first = prompt[-1], len(prompt) - 1, 4

        def logits_after(*tokens):
            batch = Batch(16)
            batch.add(array("i", (last, *tokens)), n_kept, slot, True)
            context.decode(batch)
            row = np.array(context.logits(len(tokens)), np.float64)
            context.cut(slot, n_kept)
            return row

        first = logits_after()
        draft = int(first.argmax())
        chances = [likely(row, n_first) for row in (first, logits_after(draft))]
        samplers, logprobs = RowSamplers(8), RowLogprobs(2, n_places=2)
        chain = SamplerChain.build([TopK(n_first), Draw(5)], model.vocab)
        sampler = RowSampler(chain, n_first=n_first)
        sampler.watch(logprobs)
        samplers.set_all([sampler, sampler])
        batch, counts = Batch(16), Counter()
        for _ in range(N_DRAWS):
            batch.clear()
            batch.add_drafts(array("i", (last, draft)), n_kept, slot)
            tokens = context.step(batch, samplers).tokens
            context.cut(slot, n_kept)
            counts[tuple(tokens)] += 1
        sampler.close()

    expected = {
        (token, -1): chance for token, chance in chances[0].items() if token != draft
    }
    expected |= {
        (draft, token): chances[0][draft] * chance
        for token, chance in chances[1].items()
    }
    assert set(counts) == set(expected)
    chi = sum(
        (counts[k] - N_DRAWS * p) ** 2 / (N_DRAWS * p) for k, p in expected.items()
    )
    assert chi < CHI_999


def likely(row, n_first):
    """The chance of each of the *n_first* likeliest tokens among these."""
    tokens = np.argsort(-row)[:n_first]
    weights = np.exp(row[tokens] - row[tokens[0]])
    return dict(zip(tokens.tolist(), (weights / weights.sum()).tolist(), strict=True))


@pytest.fixture(scope="module")
def make_mask(model):
    """A mask at the beginning of a schema, and the tokens of a text."""
    make = Constraints(model.vocab).make
    schema = {"properties": {"colour": {"type": "integer"}}, "required": ["colour"]}
    params = SamplingParams(json_schema=schema | {"additionalProperties": False})
    start = make(params)

    def begin():
        mask = start()
        assert isinstance(mask, MaskState)
        mask.expect_drafts()
        return mask

    return begin, partial(model.vocab.tokenize, add_special=False, parse_special=False)


def after(mask, tokens):
    """What may follow *tokens*."""
    for token in tokens:
        mask.accept(token)
    mask.prepare()
    return mask.mask.tobytes()


def test_masks_of_places_are_those_of_accepted_drafts(make_mask):
    """
    What the constraint refuses is no draft, and nothing is taken in.
    """
    begin, tokenize = make_mask
    tokens = array("i", tokenize('{"colour": 1'))
    mask = begin()
    n_valid = mask.prepare_places(tokens + array("i", tokenize("!")))

    n_bytes = 4 * len(mask.mask)
    places = mask.masks.tobytes()
    assert n_valid == len(tokens)
    for place in range(n_valid + 1):
        start = place * n_bytes
        assert places[start : start + n_bytes] == after(begin(), tokens[:place])
    assert after(mask, ()) == after(begin(), ())
    assert after(mask, tokens) == after(begin(), tokens)


def test_a_limit_behind_a_draft_is_not_reached_by_drafting_it(make_mask, monkeypatch):
    """
    The draft is left out, and the constraint goes on from what was accepted.
    """
    begin, tokenize = make_mask
    tokens = array("i", tokenize('{"colour": 1'))
    mask = begin()
    mask.accept(tokens[0])
    n_computed = count()
    monkeypatch.setattr(
        Matcher,
        "error",
        property(lambda _: "too much" if next(n_computed) == 2 else ""),
    )

    assert mask.prepare_places(tokens[1:]) == 2
    assert len(mask.masks) == 3 * len(mask.mask)
    monkeypatch.undo()
    assert after(mask, tokens[1:]) == after(begin(), tokens)


def test_a_constraint_tells_what_it_forces(make_mask):
    """
    Nothing while a text may begin in several ways, then the rest of a key.
    """
    begin, tokenize = make_mask
    mask = begin()
    at_first = mask.forced(16)
    for token in tokenize('{"c'):
        mask.accept(token)

    assert at_first == ()
    assert mask.forced(2) == mask.forced(16)[:2] != ()
