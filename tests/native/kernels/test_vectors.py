"""Our kernels where texts become vectors: products of floats, GELU, texts side by side."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context
from pyllama_raw.native.kernels import table
from pyllama_raw.native.model import Model, quantize
from tests.api.bert_reference import BertReference
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

# Of vectors that are about 1 long in each direction: libllama rounds GELU to 16 bits.
TOLERANCE = 5e-3


@contextmanager
def vectors_of(path: Path, **fields: object) -> Iterator[Context]:
    with (
        Model.load(path, use_extra_bufts=False) as model,
        Context(
            model, n_seq_max=8, n_ctx=512, n_batch=256, n_ubatch=256, n_outputs_max=256,
            n_threads=2, kv_unified=True, **fields,  # type: ignore[arg-type]
        ) as context,
    ):  # fmt: skip
        yield context


def embed(context: Context, lengths: list[int], pooling_values: int) -> np.ndarray:
    """A row for each text; the texts are computed at once."""
    batch = Batch(256)
    for slot, tokens in enumerate(random_texts(lengths)):
        batch.add_scored(tokens, 0, slot)
    context.decode(batch)
    rows = [
        np.frombuffer(context.vector(slot), np.float32) for slot in range(len(lengths))
    ]
    return np.stack(rows).reshape(-1, pooling_values)


def random_texts(lengths: list[int]) -> list[array[int]]:
    rng = np.random.default_rng(len(lengths))
    return [array("i", rng.integers(3, 200, length).tolist()) for length in lengths]


def takes(*computes: str) -> list[str]:
    """Those of *computes* that kernels of ours are for on this CPU."""
    return [
        row.computes for row in table() if row.is_usable and row.computes in computes
    ]


def taken_by(context: Context) -> set[str]:
    """What kernels of ours computed; a CPU may have none."""
    return {row.computes for row in context.kernels.taken} if context.kernels else set()


@pytest.mark.parametrize(
    ("name", "pooling", "n_values", "kind"),
    [
        ("bert", "mean", 64, "f32"),
        ("bert", "mean", 64, "f16"),
        ("bert-labels", "rank", 3, "f32"),
        ("bert-labels", "rank", 3, "f16"),
        ("nomic-bert-moe", "cls", 64, "f32"),  # rounding can choose other experts
        ("jina-bert-v2", "mean", 64, "f32"),  # attention with a bias of each head
    ],
)
def test_vectors_are_those_of_libllama(name, pooling, n_values, kind, tmp_path: Path):
    """
    Tiles and their rests, in rows of weights and in columns; one text, and several that the
    graph holds side by side.
    """
    path = tiny_model(name)
    if kind == "f16":
        quantize(path, tmp_path / "half.gguf", "f16")
        path = tmp_path / "half.gguf"
    with (
        vectors_of(path, pooling=pooling) as fast,
        vectors_of(path, pooling=pooling, fast_kernels=False) as slow,
    ):
        for lengths in [1], [5], [6], [97], [200], [13, 40, 1, 96, 7]:
            found, expected = (embed(c, lengths, n_values) for c in (fast, slow))
            np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)
        taken = taken_by(fast)

    gelu = () if name == "jina-bert-v2" else ("gelu",)  # that has another one
    assert taken >= {*takes(kind, "attention", *gelu, "norm", "halves")}


def test_products_of_floats_are_exact_sums():
    """
    Nothing is rounded to 16 bits where keys and values are not.
    """
    floats = {"flash_attn": "off", "type_k": "f32", "type_v": "f32"}
    path = tiny_model("qwen3-embedding")
    with (
        vectors_of(path, pooling="last", **floats) as fast,
        vectors_of(path, pooling="last", fast_kernels=False, **floats) as slow,
    ):
        found, expected = (embed(c, [20, 3, 100], 64) for c in (fast, slow))

    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-5)


def test_products_of_halves_lose_what_half_floats_lose(tmp_path: Path):
    """
    Scores are as near to those in 64 bits as those of libllama, which makes half floats of
    columns; rows have one part or several.
    """
    path = tmp_path / "half.gguf"
    quantize(tiny_model("bert-wide"), path, "f16")
    reference, lengths = BertReference(path), [13, 40, 1, 96, 7, 20, 33, 5]
    expected = [reference.scores(tokens)[0] for tokens in random_texts(lengths)]
    floats = {"pooling": "rank", "flash_attn": "off"}
    with (
        vectors_of(path, **floats) as fast,
        vectors_of(path, fast_kernels=False, **floats) as slow,
    ):
        found, others = (embed(c, lengths, 1)[:, 0] - expected for c in (fast, slow))

    assert np.linalg.norm(found) <= np.linalg.norm(others)


def test_a_context_that_generates_leaves_floats_to_libllama():
    """
    Its outputs have the digits that users compare with those of libllama.
    """
    with vectors_of(tiny_model("llama")) as context:
        batch = Batch(256)
        batch.add(array("i", range(3, 40)), 0, 0, True)
        context.decode(batch)
        taken = taken_by(context)

    assert taken == {*takes("attention")}
