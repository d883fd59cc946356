"""Products of woven experts: within the rounding of columns, and the same for any neighbours."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from pyllama_raw.native.gguf import read_header
from pyllama_raw.native.kernels import weaves
from pyllama_raw.native.libllama import ffi, lib
from pyllama_raw.native.model import Model, quantize
from scripts.tiny_models.gguf import write
from scripts.tiny_models.recipe import Recipe, experts, sizes
from scripts.tiny_models.recipes import RECIPES
from tests.native.support import last_logits, make_context, make_prompt
from tests.support.experts import Listener, attached, name_of

WIDE = sizes(4, 2, n_embd=256, n_ff=512) | experts(8, 3)
WIDE["expert_feed_forward_length"] = 256  # rows of K types are multiples of it
WIDE_MODEL = Recipe("wide-moe", "qwen3moe", WIDE)
# Gates and sums of experts differ by architecture, and so do the types of weights by file.
MODELS = (
    (RECIPES["llama-moe"], "q4_0"),
    (RECIPES["qwen3moe"], "q4_1"),
    (RECIPES["gpt-oss"], "q5_0"),
    (RECIPES["qwen3next"], "q5_1"),
    (WIDE_MODEL, "q8_0"),
    (WIDE_MODEL, "q4_k_m"),
    (WIDE_MODEL, "q5_k_m"),
    (WIDE_MODEL, "q6_k"),
)
BLOCK = 32  # values of a column with one scale

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("at_best_level")]


class Product(NamedTuple):
    """One product of experts, as our kernels made it."""

    layer: int
    weights: np.ndarray  # float64[n_experts, n_rows, n_values]
    columns: np.ndarray  # float32[n_tokens, n_used or 1, n_values]
    ids: np.ndarray  # int32[n_tokens, n_used]
    results: np.ndarray  # float32[n_tokens, n_used, n_rows]


class Products:
    """
    Takes in products of experts.

    Args:
        replace: called with the ids of layer 0, int32[n_tokens, n_used], and its columns,
            float32[n_tokens, n_values], which it may change: only products look at them then.
    """

    def __init__(
        self, replace: Callable[[np.ndarray, np.ndarray], object] = lambda *_: None
    ) -> None:
        self.listener = Listener(self._wants, self._see)
        self.ours: list[Product] = []
        self.n_theirs = 0
        self._replace = replace
        self._ids = self._columns = ffi.NULL

    def _wants(self, node: Any) -> bool:
        if name_of(node) == "ffn_moe_topk-0":
            self._ids = node
        if name_of(node) == "ffn_moe_logits-0":
            self._columns = node.src[1]
        is_product = node.op in (lib.GGML_OP_MUL_MAT_ID, lib.GGML_OP_CUSTOM)
        has_ids = is_product and node.src[2] != ffi.NULL
        if has_ids and node.src[2].type == lib.GGML_TYPE_I32:
            return True
        return name_of(node) == "ffn_moe_weights-0"

    def _see(self, node: Any) -> None:
        if name_of(node) == "ffn_moe_weights-0":
            ids, columns = _values(self._ids, np.int32), _values(self._columns)
            self._replace(ids[0], columns[0])
        elif node.op == lib.GGML_OP_CUSTOM:
            layer = int(name_of(node).rpartition("-")[2])
            columns, results = _values(node.src[1]).copy(), _values(node).copy()
            ids = _values(node.src[2], np.int32)[0].copy()
            product = Product(layer, _weights(node.src[0]), columns, ids, results)
            self.ours.append(product)
        else:
            self.n_theirs += 1


def _values(tensor: Any, kind: type = np.float32) -> np.ndarray:
    """A view of *tensor*, its last dimension first."""
    buffer = ffi.buffer(tensor.data, lib.ggml_nbytes(tensor))
    shape = [tensor.ne[i] for i in (2, 1, 0)]
    strides = [tensor.nb[i] for i in (2, 1, 0)]
    return np.ndarray(shape, kind, buffer, strides=strides)


def _weights(tensor: Any) -> np.ndarray:
    data = np.frombuffer(ffi.buffer(tensor.data, lib.ggml_nbytes(tensor)), np.uint8)
    rows = data.reshape(tensor.ne[2] * tensor.ne[1], -1)
    values = dequantize(rows, GGMLQuantizationType(tensor.type))
    shape = (tensor.ne[2], tensor.ne[1], tensor.ne[0])
    return values.astype(np.float64).reshape(shape)


def _worst(product: Product) -> float:
    """Largest distance to exact results, in units of what the rounding of columns allows."""
    _, weights, columns, ids, results = product
    worst = 0.0
    for token, used in np.ndindex(*ids.shape):
        expert, row = ids[token, used], results[token, used]
        if not 0 <= expert < len(weights):
            worst = max(worst, inf if row.any() else 0)
            continue
        column = columns[token, used % columns.shape[1]].astype(np.float64)
        largest = np.abs(column).reshape(-1, BLOCK).max(axis=1)
        bound = np.abs(weights[expert]) @ np.repeat(0.51 / 127 * largest, BLOCK) + 1e-6
        worst = max(
            worst, float((np.abs(row - weights[expert] @ column) / bound).max())
        )
    return worst


@pytest.fixture(scope="module", params=MODELS, ids=lambda p: f"{p[0].name}-{p[1]}")
def path(request, tmp_path_factory) -> Path:
    recipe, kind = request.param
    folder = tmp_path_factory.mktemp("woven-experts")
    source = folder / "source.gguf"
    write(recipe, source)
    quantize(source, folder / "model.gguf", kind)
    return folder / "model.gguf"


def prompt_of(model: Model, n_tokens: int, seed: int = 0) -> array[int]:
    return array("i", [t % model.n_vocab for t in make_prompt(n_tokens, seed)])


def test_products_are_exact_but_for_the_rounding_of_columns(path):
    """
    Single tokens, a few and many: experts with no column, with one and with several tiles. All
    products of experts are ours.
    """
    products = Products()
    with Model.load(path) as model, attached(products.listener):
        for n_tokens in (1, 2, 7, 150):
            with make_context(model) as context:
                last_logits(context, prompt_of(model, n_tokens))

    assert products.n_theirs == 0
    assert {len(p.results) for p in products.ours} >= {1, 2, 7, 150}
    assert max(map(_worst, products.ours)) <= 1


def test_experts_that_do_not_exist_give_zeros(path):
    """
    Whatever a router says: no other memory is read, and other columns are right.
    """
    with Model.load(path, vocab_only=True) as model:
        if model.meta["general.architecture"] == "gpt-oss":
            pytest.skip(
                "it adds biases of experts, and libllama ends the process there"
            )

    def replace(ids: np.ndarray, _: np.ndarray) -> None:
        ids[:4, 0] = (-1, 2**31 - 1, -(2**31), 1000)

    products = Products(replace)
    with Model.load(path) as model, attached(products.listener):
        with make_context(model, n_threads=2) as context:
            last_logits(context, prompt_of(model, 30))

    n_bad = [((p.ids < 0) | (p.ids >= len(p.weights))).sum() for p in products.ours]
    assert {n for n, p in zip(n_bad, products.ours, strict=True) if p.layer == 0} == {4}
    assert max(map(_worst, products.ours)) <= 1


def test_a_column_has_the_bits_of_it_alone(path):
    """
    Beside others for the same experts and for others, and by more threads.
    """
    n_tokens, rng = 40, np.random.default_rng(3)
    with Model.load(path) as model:
        n_experts = int(
            model.meta[f"{model.meta['general.architecture']}.expert_count"]
        )
        columns = rng.normal(size=(n_tokens, model.n_embd)).astype(np.float32)
        chosen = np.argsort(rng.random((n_tokens, n_experts)), axis=1).astype(np.int32)

        def results_of(tokens: list[int], n_threads: int) -> list[np.ndarray]:
            def replace(ids: np.ndarray, values: np.ndarray) -> None:
                ids[:] = chosen[tokens, : ids.shape[1]]
                values[:] = columns[tokens]

            products = Products(replace)
            with (
                attached(products.listener),
                make_context(
                    model, n_threads=n_threads, deterministic="fast"
                ) as context,
            ):
                last_logits(context, prompt_of(model, len(tokens)))
            return [p.results for p in products.ours if p.layer == 0]

        together = results_of(list(range(n_tokens)), 3)
        for token in (0, 17, 39):
            alone = results_of([token], 1)
            a, b = (
                [r.tobytes() for r in rows]
                for rows in ([r[token] for r in together], [r[0] for r in alone])
            )

            assert len(a) >= 2
            assert a == b


def test_a_model_whose_experts_are_of_these_types_is_ours(path):
    """
    libllama then does not repack its weights, which it would keep from us.
    """
    assert weaves(read_header(str(path)))
