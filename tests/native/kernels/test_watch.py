"""Multiply-adds with weights are counted, by the type of the weights and by whose kernels compute."""

from __future__ import annotations

from array import array
from collections import Counter
from math import prod
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pyllama_raw import Engine, EngineConfig
from pyllama_raw.api.metrics import EngineMetrics
from pyllama_raw.native.gguf import read_header
from pyllama_raw.native.kernels import Watch
from pyllama_raw.native.libllama import lib, text
from pyllama_raw.native.model import Model
from tests.native.support import last_logits, make_context
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

# In the tiny mixtures of experts a token is sent to two of four.
N_EXPERTS, N_USED = 4, 2


def products_of(path: Path, n_tokens: int, n_outputs: int) -> dict[str, int]:
    """Multiply-adds of a decode, by type; behind the last attention are outputs only."""
    header = read_header(str(path))
    names = {tensor.name for tensor in header.tensors}
    n_layers = header.values[f"{header.values['general.architecture']}.block_count"]
    counts: Counter[str] = Counter()
    for tensor in header.tensors:
        is_input = tensor.name == "token_embd.weight" and "output.weight" in names
        if len(tensor.dims) < 2 or is_input:
            continue
        is_late = tensor.name.startswith(
            ("output", "token_embd", f"blk.{n_layers - 1}.ffn")
        )
        n = prod(tensor.dims) * (n_outputs if is_late else n_tokens)
        if len(tensor.dims) > 2:
            n = n * N_USED // N_EXPERTS
        counts[text(lib.ggml_type_name(tensor.type))] += n
    return dict(counts)


@pytest.mark.parametrize("fast_kernels", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen3moe"])
def test_each_product_is_counted_once(name, fast_kernels):
    """
    Rows times columns times values of a row, of experts those that are used; also where a graph
    is computed again.
    """
    path, watch = tiny_model(name), Watch()
    with (
        Model.load(path) as model,
        make_context(model, watch=watch, fast_kernels=fast_kernels) as context,
    ):
        last_logits(context, array("i", range(3, 10)))
        first = {kind: sum(of.values()) for kind, of in watch.products.items()}
        for pos in (7, 8, 9):
            last_logits(context, array("i", [5]), pos=pos)
        after = {kind: sum(of.values()) for kind, of in watch.products.items()}
        whose = {whose for of in watch.products.values() for whose in of}

    alone = products_of(path, 1, 1)
    assert first == products_of(path, 7, 1)
    assert {kind: after[kind] - first[kind] for kind in after} == {
        kind: 3 * n for kind, n in alone.items()
    }
    assert fast_kernels or "ours" not in whose


def test_contexts_share_a_watch():
    """
    Its counts are of all of them, and can be read when they are closed.
    """
    path, watch = tiny_model("llama"), Watch()
    with Model.load(path) as model:
        for _ in range(2):
            with make_context(model, watch=watch) as context:
                last_logits(context, array("i", range(3, 10)))

    counts = {kind: sum(of.values()) for kind, of in watch.products.items()}
    assert counts == {kind: 2 * n for kind, n in products_of(path, 7, 1).items()}
    assert sum(watch.attentions.values()) == 2 * 2


def test_an_engine_and_its_metrics_tell_them():
    """
    Counts grow with each request, and stay when the engine is closed.
    """
    config = EngineConfig(context={"n_ctx": 512})
    with Engine.open(tiny_model("llama"), config) as engine:
        before = engine.stats().products
        engine.complete([5, 6, 7])
        stats, metrics = engine.stats(), EngineMetrics(engine).text()
    after = stats.products

    samples = {
        (sample.labels["weights"], sample.labels["kernels"]): sample.value
        for family in text_string_to_metric_families(metrics)
        for sample in family.samples
        if sample.name == "pyllama_raw:multiply_adds_total"
    }
    assert sum(after["f32"].values()) > sum(before["f32"].values()) > 0
    assert samples == {(k, w): n for k, of in after.items() for w, n in of.items()}
    assert engine.stats().products == after
