"""Drafts by heads of a model itself: outputs are those without, and heads follow each slot."""

from array import array
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

from pyllama_raw import (
    AsyncEngine,
    CacheConfig,
    ConfigError,
    ContextConfig,
    Engine,
    EngineConfig,
    Model,
    ModelConfig,
    SamplingParams,
    SchedulerConfig,
    estimate_memory,
)
from pyllama_raw.core.costs import CostHistory
from pyllama_raw.core.scheduling import speculation
from pyllama_raw.core.scheduling.speculation import DraftModel
from pyllama_raw.engine import draft_executor
from pyllama_raw.engine.draft_executor import HeadExecutor, Trail
from pyllama_raw.errors import ContextFailed, DecodeFailed, InvalidBatch, NoKVSpace
from pyllama_raw.native.batch import Batch, HiddenBatch
from pyllama_raw.native.context import Context
from pyllama_raw.native.libllama import lib
from pyllama_raw.native.model import Model as NativeModel
from pyllama_raw.native.model import quantize
from scripts.tiny_models import gguf
from scripts.tiny_models.recipe import Recipe, experts, sizes
from tests.native.support import unlike_before
from tests.native.test_speculation import GREEDY, preempted, prompts_of
from tests.support.last_digits import needs_attention, steady_attention
from tests.support.near_ties import parting
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

OWN = ("*.nextn.embed_tokens.weight", "*.nextn.shared_head_head.weight")
MIXED = experts() | {"nextn_predict_layers": 1, "expert_shared_count": 1}
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "hy_v3",
            "hy_v3",
            sizes(2, 1) | MIXED,
            without=(*OWN, "*_exps*", "*_shexp*", "*ffn_gate_inp*", "*exp_probs*"),
        ),
        Recipe("glm4moe", "glm4moe", sizes(2, 1) | MIXED, without=OWN),
        Recipe(
            "deepseek2",
            "deepseek2",
            sizes(
                2,
                1,
                attention__q_lora_rank=32,
                attention__kv_lora_rank=32,
                attention__key_length=48,
                attention__key_length_mla=32,
                attention__value_length=32,
                attention__value_length_mla=16,
                rope__dimension_count=16,
                leading_dense_block_count=0,
                expert_weights_scale=1.0,
            )
            | MIXED,
            without=OWN,
        ),
    )
}


NO_GLM = unlike_before("ends the process that makes a tiny model with heads of glm4moe")
NAMES = [
    pytest.param(name, marks=NO_GLM) if name == "glm4moe" else name for name in RECIPES
]


@pytest.fixture(autouse=True)
def free_drafts(monkeypatch):
    """Drafts cost nothing, so there are some in every step that may have them."""
    monkeypatch.setattr(
        CostHistory, "decode_seconds", lambda _, n_most: [1.0] * (n_most + 1)
    )
    monkeypatch.setattr(DraftModel, "seconds", lambda *_: 1e-3)


@pytest.fixture(scope="module")
def file_of(tmp_path_factory):
    """The tiny model of an architecture, of one layer and a head that is like it; each is made once."""
    folder = tmp_path_factory.mktemp("heads")

    @cache
    def path_of(name: str) -> Path:
        gguf.write(RECIPES[name], folder / f"{name}.gguf")
        return folder / f"{name}.gguf"

    return path_of


@pytest.fixture(scope="module")
def path(file_of):
    """The dense one."""
    return file_of("hy_v3")


def opened(path, mode="mtp", *, n_slots=4, **fields):
    parts = {
        "context": ContextConfig(n_ctx=4096, n_threads=1, **steady_attention()),
        "scheduler": SchedulerConfig(n_slots=n_slots),
        "speculation": {"mode": mode},
    }
    return Engine.open(path, config=EngineConfig(**parts | fields))


def assert_same(plain, drafted):
    """Greedy outputs are equal, but for near ties."""
    for reference, other in zip(plain, drafted, strict=True):
        assert parting(reference.logprobs, other.token_ids) is None


@pytest.fixture(scope="module")
def plain(path):
    """Outputs without drafts."""
    with opened(path, "off") as engine:
        return engine.complete_many(prompts_of(6), GREEDY)


@pytest.mark.parametrize("name", NAMES)
def test_greedy_outputs_are_those_without(name, file_of):
    """
    More than a third of the drafts are right, because the head is like the layer and has read all.
    """
    prompts, results = prompts_of(12), []
    for mode in ("off", "mtp"):
        with opened(file_of(name), mode) as engine:
            results.append(engine.complete_many(prompts, GREEDY))
            stats, info = engine.stats(), engine.info

    assert info.speculation == "mtp"
    assert_same(*results)
    assert stats.failed == 0
    assert stats.accepted_tokens > stats.drafted_tokens / 3 > 0


@pytest.mark.parametrize("name", NAMES)
def test_a_head_says_what_it_says_of_the_whole_text_at_once(name, file_of, monkeypatch):
    """
    Whatever the steps were: the states of the model, one position behind the tokens.
    """
    run, proposals = HeadExecutor._run, []

    def watched(executor, works, context):
        result = run(executor, works, context)
        proposals.extend(zip(works, result.outputs, strict=True))
        return result

    monkeypatch.setattr(HeadExecutor, "_run", watched)
    prompts = prompts_of(4, n_tokens=300)
    with opened(file_of(name)) as engine:
        results = engine.complete_many(prompts, GREEDY)
    texts = [
        [*prompt, *result.token_ids]
        for prompt, result in zip(prompts, results, strict=True)
    ]
    # Requests get their numbers in any order, so each is told by its tokens.
    latest = defaultdict(list)
    for work, _ in proposals:
        latest[work.request_id].append((work.pos, work.tokens[0]))
    text_of = {
        request_id: next(
            t for t in texts if all(t[pos] == token for pos, token in all_of)
        )
        for request_id, all_of in latest.items()
    }

    with NativeModel.load(file_of(name), load_mtp=True) as model:
        n_right = [
            first_draft(model, text_of[work.request_id][: work.pos + 1])
            == output.tokens[0]
            for work, output in proposals
        ]
    assert len(n_right) > 20
    assert sum(n_right) > 0.95 * len(n_right)


def first_draft(model, tokens):
    """What the head says behind *tokens*, by two contexts that read them at once."""
    fields = {"n_seq_max": 1, "n_ctx": 512, "n_batch": 512, "n_threads": 1}
    with (
        Context(model, **fields) as context,
        Context(model, ctx_type="mtp", **fields) as heads,
    ):
        context.keep_hidden(of_rows=False)
        batch = Batch(512)
        batch.add(tokens[:-1], 0, 0, True)
        context.decode(batch)
        states = bytes(context.hidden_bytes) + context.hidden(0, len(tokens) - 1)
        hidden = HiddenBatch(512, model.n_embd_out)
        hidden.add_hidden(tokens, 0, 0, states, True)
        heads.decode(hidden)
        logits = heads.logits(len(tokens) - 1)
    return max(range(len(logits)), key=logits.__getitem__)


@needs_attention
@pytest.mark.usefixtures("at_best_level")
def test_fast_and_deterministic_outputs_are_bit_for_bit_those_without(
    path, tmp_path_factory
):
    """
    Drawn ones, too: each token takes one draw of the model's row.
    """
    small = tmp_path_factory.mktemp("small") / "heads.gguf"
    quantize(path, small, "q4_0")
    params = SamplingParams(
        seed=3, max_tokens=48, ignore_eos=True, temperature=0.4, logprobs=2
    )
    results = []
    for mode in ("off", "mtp"):
        with opened(small, mode, deterministic="fast") as engine:
            results.append(engine.complete_many(prompts_of(8), params))
            n_accepted = engine.stats().accepted_tokens

    plain, drafted = results
    assert n_accepted > 0
    assert [r.token_ids for r in drafted] == [r.token_ids for r in plain]
    assert [r.logprobs for r in drafted] == [r.logprobs for r in plain]


def test_who_leaves_and_who_is_preempted(path, plain):
    """
    Whatever became of the one before in a slot, the next output is right, and has drafts.
    """
    prompts, params = prompts_of(6), GREEDY
    scheduler = SchedulerConfig(n_slots=1, preempt="priority")
    with opened(path, scheduler=scheduler) as engine:
        results = preempted(engine, prompts, params)
        stats = engine.stats()

    assert stats.preempted > 0
    assert stats.accepted_tokens > 0
    assert_same([*plain[-1:], *plain[:-1], *plain[::2]], results)


@pytest.mark.parametrize("mode", ["live", "snapshots", "off"])
def test_a_prefix_that_is_there_already(mode, path):
    """
    Of a slot that goes on, of one that is copied, and out of host memory, which has no states.
    """
    (base,) = prompts_of(1, n_tokens=400)
    prompts = [[*base, n, n + 1] for n in range(10, 16)]
    results = []
    for source in ("off", "mtp"):
        cache = CacheConfig(mode=mode)
        with opened(path, source, n_slots=2, cache=cache) as engine:
            of_engine = [engine.complete(p, GREEDY) for p in (base, *prompts)]
            # Both slots hold others; then the first prompts come again.
            engine.complete_many(prompts_of(4, seed=7, n_tokens=400), GREEDY)
            of_engine += engine.complete_many(prompts, GREEDY)
            of_engine += engine.complete_n(base, GREEDY.model_copy(update={"n": 2}))
            results.append(of_engine)
            n_cached = sum(result.usage.cached_tokens for result in of_engine)
            n_accepted = [result.usage.accepted_tokens for result in of_engine]
            stats = engine.stats()

    assert_same(*results)
    assert (n_cached > 0) == (mode != "off")
    assert stats.failed == 0
    assert min(n_accepted[:7]) > 0


def test_outputs_that_outgrow_their_slot(path):
    """
    The model shifts its cells, and the head begins anew.
    """
    fields = {
        "context": ContextConfig(n_ctx=512, n_threads=1),
        "scheduler": SchedulerConfig(n_slots=2, context_full="shift"),
    }
    params = GREEDY.model_copy(update={"max_tokens": 700})
    with opened(path, **fields) as engine:
        results = engine.complete_many(prompts_of(2, n_tokens=60), params)
        stats = engine.stats()

    assert [len(result.token_ids) for result in results] == [700, 700]
    assert stats.shifted > 0
    assert stats.accepted_tokens > 0


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleep_frees_the_heads_too(level, path):
    """
    Afterwards they have a context again.
    """
    prompts = prompts_of(4)
    with opened(path) as engine:
        before = engine.complete_many(prompts, GREEDY)
        engine.sleep(level)
        engine.wake()
        after = engine.complete_many(prompts, GREEDY)
        n_accepted = [
            sum(r.usage.accepted_tokens for r in rs) for rs in (before, after)
        ]

    assert min(n_accepted) > 0
    assert_same(before, after)


def test_many_slots_on_few_cells(path, caplog):
    """
    Cells of slots that rest make room for those that run.
    """
    prompts = prompts_of(24, n_tokens=200)
    context = ContextConfig(n_ctx=1024, n_threads=1)
    with opened(path, context=context, n_slots=8) as engine:
        engine.complete_many(prompts, GREEDY)
        stats = engine.stats()

    assert stats.failed == 0
    assert stats.accepted_tokens > 0
    assert "failed, requests go on without" not in caplog.text


def test_outputs_of_one_prompt_share_its_cells(path, monkeypatch):
    """
    As those of the model: what was not read of a slot is read before it is copied.
    """
    copy, copies = HeadExecutor._copy, []

    def watched(executor, src, dst, n_pos):
        copy(executor, src, dst, n_pos)
        highest = executor._context.seq_pos_max(dst)
        copies.append((n_pos - 1, highest, len(executor._trails[dst].tokens)))

    monkeypatch.setattr(HeadExecutor, "_copy", watched)
    (prompt,) = prompts_of(1, n_tokens=200)
    with opened(path) as engine:
        results = engine.complete_n(prompt, GREEDY.model_copy(update={"n": 3}))

    assert sum(result.usage.accepted_tokens for result in results) > 0
    assert len(copies) > 0
    assert all(copy == (copy[0], copy[0], 0) for copy in copies)


@pytest.fixture
def often(monkeypatch, caplog):
    """Heads read what they have taken in after a few tokens, and the log tells of a failure."""
    monkeypatch.setattr(draft_executor, "N_BATCH", 8)
    monkeypatch.setattr(speculation, "PAUSE", 1)
    yield
    lines = [record.getMessage() for record in caplog.get_records("call")]
    assert any("failed, requests go on without" in line for line in lines)


@pytest.mark.parametrize(
    ("name", "error"),
    [("_run", DecodeFailed), ("_run", NoKVSpace), ("_fill", DecodeFailed)],
)
@pytest.mark.usefixtures("often")
def test_heads_that_fail_fail_no_request(name, error, path, plain, monkeypatch):
    """
    Their context is made anew or emptied, and outputs go on.
    """
    method, n_calls = getattr(HeadExecutor, name), []

    def failing(*args):
        n_calls.append(name)
        if len(n_calls) in (2, 3):
            raise error("llama_decode", -3, "as told")
        return method(*args)

    monkeypatch.setattr(HeadExecutor, name, failing)
    with opened(path) as engine:
        drafted = engine.complete_many(prompts_of(6), GREEDY)
        stats = engine.stats()

    assert len(n_calls) > 3
    assert stats.failed == 0
    assert stats.accepted_tokens > 0
    assert_same(plain, drafted)


@pytest.mark.parametrize("code", [1, 2, -1, -3])
def test_decodes_that_fail_lose_nothing(code, path, plain):
    """
    Of the model or of its heads: no space, an abort, a refused batch and a lost context.
    """
    with opened(path) as engine:
        results = []
        for n_until in (3, 4, 5, 6, 9, 12):
            lib.plr_fail_decode(code, n_until, -1)
            results.append(engine.complete_many(prompts_of(6), GREEDY))
        lib.plr_fail_decode(0, 0, -1)
        stats = engine.stats()

    assert (stats.failed, stats.accepted_tokens > 0) == (0, True)
    for of_try in results:
        assert_same(plain, of_try)


def test_constraints_and_several_outputs(path):
    """
    A mask takes drafts that it refuses out of the batch, so later works lie elsewhere in it.
    """
    params = SamplingParams(temperature=0.6, seed=1, max_tokens=40, regex="[a-m ]{60}")
    (prompt,) = prompts_of(1)
    results = []
    for mode in ("off", "mtp"):
        with opened(path, mode) as engine:
            results.append(
                [
                    r.text
                    for r in engine.complete_n(
                        prompt, params.model_copy(update={"n": 3})
                    )
                ]
            )
            n_drafted = engine.stats().drafted_tokens

    assert n_drafted > 0
    assert results[0] == results[1]


def test_models_without_heads_are_refused_by_name(path, tmp_path):
    """
    Before weights are read, or by the tensors that a file lacks.
    """
    with pytest.raises(ConfigError, match="n_layer_nextn is 0, so no head of it"):
        opened(tiny_model("llama"))
    overrides = {"llama.nextn_predict_layers": 1}
    with pytest.raises(ConfigError, match="heads of 'llama' are not used, only those"):
        opened(tiny_model("llama"), model=ModelConfig(kv_overrides=overrides))
    overrides = {"hy_v3.nextn_predict_layers": 2}
    with pytest.raises(ConfigError, match="all of 2 layers are heads"):
        opened(path, model=ModelConfig(kv_overrides=overrides))
    without = tmp_path / "without.gguf"
    trunk = RECIPES["hy_v3"]
    patterns = (*trunk.without, "blk.1.*")
    gguf.write(Recipe("hy_v3", "hy_v3", trunk.fields, without=patterns), without)
    with pytest.raises(ConfigError, match=r"has no tensor 'blk.1.nextn.eh_proj.weight"):
        opened(without)


@NO_GLM
def test_heads_that_libllama_asserts_against_are_an_error(tmp_path):
    """
    Of this architecture it takes one head; the process goes on.
    """
    recipe = RECIPES["glm4moe"]
    fields = recipe.fields | {"nextn_predict_layers": 2, "block_count": 3}
    path = tmp_path / "two.gguf"
    gguf.write(Recipe("glm4moe", "glm4moe", fields, without=OWN), path)

    with pytest.raises(ContextFailed, match="only supports a single MTP block"):
        opened(path)
    with pytest.raises(ContextFailed):
        estimate_memory(path, EngineConfig(speculation={"mode": "mtp"}))


@pytest.mark.anyio
async def test_a_model_that_was_opened_before_has_to_have_its_heads(path, caplog):
    """
    They are loaded if they are asked for, and only then.
    """
    context, wants = ContextConfig(n_ctx=1024, n_threads=1), {"mode": "mtp"}
    config, without = (
        EngineConfig(context=context, **fields)
        for fields in ({"speculation": wants}, {})
    )
    skipped = "unused tensor blk.1.nextn.eh_proj.weight"
    async with Model.open(path) as model:
        with pytest.raises(ConfigError, match="open the Model with load_mtp=True"):
            await AsyncEngine.open(model, config)
        async with AsyncEngine.open(model, without):
            pass
    assert skipped in caplog.text
    caplog.clear()
    async with Model.open(path, ModelConfig(load_mtp=True)) as model:
        for options in (config, without):
            async with AsyncEngine.open(model, options) as engine:
                pass

    assert skipped not in caplog.text
    assert engine.info.speculation != "mtp"


def test_their_memory_is_in_the_estimate(path):
    """
    A context with cells of one layer, and states; weights are among those of the model.
    """
    parts = {"context": {"n_ctx": 1024}, "model": {"load_mode": "none"}}
    (plain,) = estimate_memory(path, EngineConfig(**parts)).devices
    with_heads = EngineConfig(**parts, speculation={"mode": "mtp"})
    (drafted,) = estimate_memory(path, with_heads).devices

    assert plain.draft_bytes == 0
    assert drafted.draft_bytes > drafted.kv_bytes / 2
    assert drafted.weights_bytes > plain.weights_bytes


def test_options_say_what_they_need():
    """
    Heads need no draft model, and a request for both is refused.
    """
    with pytest.raises(ConfigError, match="mode='mtp': give 'draft'"):
        EngineConfig(speculation={"mode": "mtp", "draft": "a.gguf"})
    for fields in ({"deterministic": True}, {"sampler_placement": "backend"}):
        with pytest.raises(ConfigError, match=r"speculation\.mode"):
            EngineConfig(speculation={"mode": "mtp"}, **fields)


def test_a_state_belongs_to_each_token(path):
    """
    Another length is refused, and nothing is added.
    """
    batch = HiddenBatch(4, 2)

    with pytest.raises(InvalidBatch, match="2 tokens, 8 bytes of hidden states"):
        batch.add_hidden([1, 2], 0, 0, bytes(8), True)
    assert batch.n_tokens == 0


def test_what_is_left_of_a_trail_that_is_cut():
    """
    The state behind the cut is known, unless the token before it is a cell already.
    """
    trail = Trail(10, b"last")
    trail.tokens, trail.hidden = array("i", [1, 2]), bytearray(b"zeroone.")
    unknown = bytes(4)
    left = [trail.first(n_pos, unknown) for n_pos in (12, 11, 10, 9)]

    assert [part.pos for part in left] == [10, 10, 10, 9]
    assert [part.tokens.tolist() for part in left] == [[1, 2], [1], [], []]
    assert [part.last for part in left] == [b"last", b"one.", b"zero", unknown]
    assert [bytes(part.hidden) for part in left] == [b"zeroone.", b"zero", b"", b""]
