"""
The tiny models are what they are named for, and lively enough to test with.

The native tests stand on them: a model that repeats one token, or that ignores its
prompt, would let a broken cache pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context
from pyllama_raw.native.libllama import lib
from pyllama_raw.native.model import Model
from scripts.make_tiny_models import make
from scripts.tiny_models import vocab
from scripts.tiny_models.recipe import Recipe
from tests.native.support import unlike_before
from tests.support import tiny

pytestmark = pytest.mark.native

MAX_BYTES = 2_000_000
N_PROMPT = 40
N_OUTPUT = 24
N_SEEDS = 3


def prompt(seed: int) -> list[int]:
    letters = np.random.default_rng(seed).integers(ord(" "), ord("~"), N_PROMPT - 1)
    return [vocab.BOS, *letters.tolist()]


def open_context(model: Model, *, n_ctx: int = 256, swa_full: bool = True) -> Context:
    return Context(
        model,
        n_seq_max=1,
        n_ctx=n_ctx,
        n_batch=64,
        n_ubatch=64,
        n_threads=1,
        n_threads_batch=1,
        swa_full=swa_full,
    )


def decode(context: Context, tokens: list[int], pos: int) -> NDArray[np.float32]:
    """Logits after *tokens*."""
    batch = Batch(len(tokens))
    batch.add(tokens, pos, 0, output=True)
    context.decode(batch)
    return np.asarray(context.logits(len(tokens) - 1))


def generate(context: Context, tokens: list[int]) -> tuple[list[int], bool]:
    """The greedy output of *tokens*, and whether all logits were finite."""
    context.clear()
    logits = decode(context, tokens, 0)
    output: list[int] = []
    finite = True
    for pos in range(len(tokens), len(tokens) + N_OUTPUT):
        finite = finite and bool(np.isfinite(logits).all())
        output.append(int(logits.argmax()))
        logits = decode(context, output[-1:], pos)
    return output, finite


def by_name(recipe: Recipe) -> str:
    return recipe.name


@pytest.fixture
def model(recipe: Recipe) -> Iterator[Model]:
    with Model.load(tiny.tiny_model(recipe.name)) as model:
        yield model


all_models = pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(recipe, marks=unlike_before("has no llada with biases"))
        if recipe.name == "llada"
        else recipe
        for recipe in tiny.RECIPES.values()
    ],
    ids=by_name,
)
generating = pytest.mark.parametrize("recipe", tiny.GENERATING, ids=by_name)


@all_models
def test_model_is_of_its_class(recipe: Recipe, model: Model) -> None:
    """
    libllama reports the memory class, window, rotation and vocabulary the recipe states.
    """
    rope_type = lib.llama_model_rope_type(model.ptr)
    mrope = rope_type in (lib.LLAMA_ROPE_TYPE_MROPE, lib.LLAMA_ROPE_TYPE_IMROPE)

    assert model.is_recurrent == (recipe.memory == "recurrent")
    assert model.is_hybrid == (recipe.memory == "hybrid")
    assert model.n_swa == recipe.n_swa
    assert mrope == recipe.mrope
    assert model.has_encoder == recipe.encoder
    assert lib.llama_model_is_diffusion(model.ptr) == recipe.diffusion
    assert (model.vocab.kind != "none") == recipe.has_vocab
    assert model.n_vocab == vocab.N_VOCAB


@all_models
def test_context_has_memory_unless_it_cannot_generate(
    recipe: Recipe, model: Model
) -> None:
    """
    Encoders and diffusion models keep nothing between two batches; all others do.
    """
    with open_context(model) as context:
        assert context.has_memory == (recipe.memory != "none")


@generating
def test_greedy_output_is_varied(recipe: Recipe, model: Model) -> None:
    """
    Logits are finite, and the output goes neither in a small circle nor alike for all.
    """
    with open_context(model) as context:
        results = [generate(context, prompt(seed)) for seed in range(N_SEEDS)]
    outputs = [output for output, _ in results]

    assert all(finite for _, finite in results)
    assert min(len(set(output)) for output in outputs) >= 4
    assert len({tuple(output) for output in outputs}) == N_SEEDS


@generating
def test_early_token_changes_the_logits(recipe: Recipe, model: Model) -> None:
    """
    What was said 20 tokens ago matters, so a test sees when memory is wrong.
    """
    changed = prompt(0)
    changed[-20] = ord("!") if changed[-20] != ord("!") else ord("?")
    with open_context(model) as context:
        before = decode(context, prompt(0), 0)
        context.clear()
        after = decode(context, changed, 0)

    assert np.linalg.norm(after - before) > 1e-3 * np.linalg.norm(before)


@generating
def test_part_of_a_slot_can_be_forgotten_unless_recurrent(
    recipe: Recipe, model: Model
) -> None:
    """
    A recurrent state cannot go back; hybrid models hold one.
    """
    with open_context(model) as context:
        decode(context, prompt(0), 0)

        assert context.seq_rm(0, 1, -1) == (recipe.memory in ("attention", "swa"))


@pytest.mark.parametrize("swa_full", [True, False])
@pytest.mark.parametrize("recipe", tiny.SWA, ids=by_name)
def test_window_loses_the_first_tokens(
    recipe: Recipe, model: Model, swa_full: bool
) -> None:
    """
    Without swa_full the cells of tokens behind the window are used again.

    libllama makes the window cache at least 256 cells large, so it takes that many tokens.
    """
    with open_context(model, n_ctx=512, swa_full=swa_full) as context:
        for pos in range(0, 8 * N_PROMPT, N_PROMPT):
            decode(context, prompt(pos), pos)

        memory = lib.llama_get_memory(context.ptr)
        assert (lib.llama_memory_seq_pos_min(memory, 0) == 0) == swa_full


def test_text_survives_the_vocabulary() -> None:
    """
    Any text comes back from its tokens, a word is one token and an emoji several.
    """
    text = "the end of <|x|>\n\tfür 🙂"
    with Model.load(tiny.tiny_model("llama")) as model:
        tokens = model.vocab.tokenize(text, add_special=True, parse_special=True)
        special = model.vocab.tokenize(
            "<|im_end|>", add_special=False, parse_special=True
        )

        assert tokens[0] == model.vocab.bos == vocab.BOS
        assert b"".join(map(model.vocab.piece, tokens[1:])) == text.encode()
        assert len(tokens) < 1 + len(text.encode())
        assert list(special) == [vocab.IM_END]
        assert model.vocab.eog_tokens == frozenset(vocab.END_OF_GENERATION)
        assert model.chat_template() == vocab.CHAT_TEMPLATE


@pytest.mark.parametrize(("name", "ends"), [("llama", False), ("llama-ends", True)])
def test_only_one_model_ends_by_itself(name: str, ends: bool) -> None:
    """
    Greedy output has no end of generation, except of the model made for it.
    """
    with (
        Model.load(tiny.tiny_model(name)) as model,
        open_context(model) as context,
    ):
        said = {t for s in range(N_SEEDS) for t in generate(context, prompt(s))[0]}

    assert bool(said & set(vocab.END_OF_GENERATION)) == ends


def test_files_are_small_and_the_same_every_time(tmp_path: Path) -> None:
    """
    A model depends on its recipe alone, and is below 2 MB.
    """
    name = "falcon-h1"
    make(tmp_path, [name])
    sizes = [tiny.tiny_model(name).stat().st_size for name in tiny.RECIPES]

    assert (tmp_path / f"{name}.gguf").read_bytes() == tiny.tiny_model(
        name
    ).read_bytes()
    assert max(sizes) < MAX_BYTES
