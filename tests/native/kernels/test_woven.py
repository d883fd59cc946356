"""Products of woven weights: as near to exact sums as libllama's, and the same for any neighbours."""

from __future__ import annotations

import os
import subprocess
import sys
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from gguf.quants import dequantize
from numpy.typing import NDArray

from benchmarks.load.products import compiled, lines_of
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.gguf import read_header
from pyllama_raw.native.kernels import Deterministic, table, woven_levels
from pyllama_raw.native.libllama import ffi, lib
from pyllama_raw.native.model import Adapter, Model, load_adapter
from scripts.tiny_models import vocab
from scripts.tiny_models.gguf import write
from scripts.tiny_models.recipe import Recipe, experts, sizes
from tests.native.support import last_logits, make_context, make_prompt
from tests.support.tiny import tiny_adapter, tiny_model

N_VOCAB = vocab.N_VOCAB + 13  # rows of the output are no whole tiles
# Rows are multiples of 256, which K types need.
WIDE = sizes(4, 2, n_embd=512, n_ff=768, vocab_size=N_VOCAB)
# All are used: a router that chooses would make another model of other digits.
EXPERTS = WIDE | experts(4, 4) | {"expert_feed_forward_length": 256}
WOVEN = [row.computes for row in table() if row.is_woven]
LEVELS = woven_levels()
EMULATED = Path(__file__).parent / "emulated.h"
PLAIN = {"flash_attn": "off", "type_k": "f32", "type_v": "f32"}

Floats = NDArray[np.float32]

pytestmark = [pytest.mark.native, pytest.mark.usefixtures("at_best_level")]


def taken(context) -> dict[str, int]:
    """Operations on woven weights, by their type."""
    counts = context.kernels.taken.items()
    return {row.computes: n for row, n in counts if row.computes in WOVEN and n}


def prompt_of(model: Model, n_tokens: int, seed: int = 0) -> array[int]:
    return array("i", [t % model.n_vocab for t in make_prompt(n_tokens, seed)])


@pytest.fixture(scope="module")
def floats(tmp_path_factory) -> dict[str, Path]:
    """Models whose matrices are floats."""
    folder = tmp_path_factory.mktemp("floats")
    more = vocab.extended(N_VOCAB)
    paths = {name: folder / f"{name}.gguf" for name in ("wide", "tied", "experts")}
    write(Recipe("wide", "llama", WIDE, more=more), paths["wide"])
    tied = Recipe("wide", "llama", WIDE, more=more, without=("output.weight",))
    write(tied, paths["tied"])
    write(Recipe("wide", "llama", EXPERTS, more=more), paths["experts"])
    return paths


@pytest.fixture(
    scope="module",
    params=[
        *((kind, "wide") for kind in WOVEN),
        *((kind, "experts") for kind in ("q4_1", "q4_k", "mxfp4")),
    ],
    ids="-".join,
)
def model(request, floats, tmp_path_factory):
    """All matrices are of one type."""
    kind, source = request.param
    path = tmp_path_factory.mktemp("woven") / f"{kind}.gguf"
    with Model.load(in_type(kind, floats[source], path), use_extra_bufts=False) as one:
        yield one


def rewritten(
    source: Path,
    target: Path,
    change: Callable[[str, Floats], tuple[np.ndarray, GGMLQuantizationType]],
) -> Path:
    """The model *source* with other tensors, which *change* makes of names and floats."""
    reader = GGUFReader(source)
    writer = GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name != "general.architecture":
            is_array = field.types[0] == GGUFValueType.ARRAY
            of_items = field.types[-1] if is_array else None
            value, kind = field.contents(), field.types[0]
            writer.add_key_value(name, value, kind, sub_type=of_items)
    for tensor in reader.tensors:
        floats = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        data, data_type = change(tensor.name, floats)
        writer.add_tensor(tensor.name, data, raw_dtype=data_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return target


def as_floats(source: Path, target: Path) -> Path:
    """The model *source* with its weights as floats: none of them is another number."""
    return rewritten(source, target, lambda _, x: (x, GGMLQuantizationType.F32))


def in_type(
    kind: str, source: Path, target: Path, without: tuple[str, ...] = ()
) -> Path:
    """
    The model *source* with its matrices in type *kind*, but for routers; tensors *without* are zero.
    """
    data_type = GGMLQuantizationType[kind.upper()]

    def change(name: str, floats: Floats) -> tuple[np.ndarray, GGMLQuantizationType]:
        if any(part in name for part in without):
            floats = np.zeros_like(floats)
        if floats.ndim == 1 or "ffn_gate_inp" in name:
            return floats, GGMLQuantizationType.F32
        return quantised(floats, data_type), data_type

    return rewritten(source, target, change)


def quantised(floats: Floats, data_type: GGMLQuantizationType) -> NDArray[np.uint8]:
    *shape, n_values = floats.shape
    data = np.zeros((*shape, lib.ggml_row_size(data_type, n_values)), np.uint8)
    values = np.ascontiguousarray(floats)
    source, target = ffi.from_buffer("float[]", values), ffi.from_buffer(data)
    n_rows = values.size // n_values
    lib.ggml_quantize_chunk(data_type, source, target, 0, n_rows, n_values, ffi.NULL)
    return data


def test_logits_are_as_near_to_exact_ones_as_those_of_libllama(model, tmp_path):
    """
    Exact ones are those of the same weights as floats. Both err by the 8 bits of a column;
    prompts of many lengths make tiles of all widths.
    """
    exact_file = as_floats(Path(model.path), tmp_path / "exact.gguf")
    ours, theirs = [], []
    with (
        Model.load(exact_file, use_extra_bufts=False) as floats,
        make_context(model, **PLAIN) as woven,
        make_context(model, fast_kernels=False, **PLAIN) as plain,
        make_context(floats, fast_kernels=False, **PLAIN) as exact,
    ):
        for n_tokens in (*range(1, 24), 64, 65, 130):
            prompt = prompt_of(model, n_tokens)
            logits = [last_logits(one, prompt) for one in (woven, plain, exact)]
            for context in (woven, plain, exact):
                context.clear()
            size = np.square(logits[2]).mean()
            ours.append(np.square(logits[0] - logits[2]).mean() / size)
            theirs.append(np.square(logits[1] - logits[2]).mean() / size)
        assert taken(woven)

    assert np.sqrt(np.mean(ours)) < 1.5 * np.sqrt(np.mean(theirs))
    assert max(ours) < 0.2**2


def test_a_model_that_lies_where_another_one_lay_has_its_own_weights(floats, tmp_path):
    """
    Woven weights are known by the address of the file's. They go before the model does, whoever
    still holds the closed context.
    """
    turned = rewritten(
        floats["wide"],
        tmp_path / "turned.gguf",
        lambda _, x: (x if x.ndim == 1 else x[::-1].copy(), GGMLQuantizationType.F32),
    )
    sources = {"one": floats["wide"], "other": turned}
    paths = {
        name: in_type("q8_0", source, tmp_path / f"{name}-q8_0.gguf")
        for name, source in sources.items()
    }

    logits: dict[str, list[Floats]] = {name: [] for name in sources}
    closed = []
    for fast in (False, True, True):
        for name, path in paths.items():
            with (
                Model.load(path, use_extra_bufts=False) as one,
                make_context(
                    one, fast_kernels=fast, deterministic=fast and "fast"
                ) as context,
            ):
                logits[name].append(last_logits(context, prompt_of(one, 9)))
                assert not fast or taken(context)
            closed.append(context)

    for plain, *woven in logits.values():
        assert all(np.abs(each - plain).max() < 0.1 * plain.std() for each in woven)
    assert np.abs(logits["one"][0] - logits["other"][0]).max() > logits["one"][0].std()


def tokens_of(n_columns: int) -> list[int]:
    return [t % N_VOCAB for t in make_prompt(n_columns, n_columns)]


def one_product(
    path: Path, deterministic: Deterministic, counts: Sequence[int]
) -> tuple[NDArray[np.float64], NDArray[np.float64], dict[int, Floats]]:
    """
    Columns and weights, and their products as a model gives them whose layers add nothing.

    Logits are the output, whose rows are no whole tiles, times normed embeddings.

    Returns:
        Columns, float64[n_vocab, n_values]; weights, float64[n_vocab, n_values]; and by each of
        *counts*, as many tokens in a step, logits float32[count, n_vocab] of ``tokens_of(count)``.
    """
    tensors = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    embeddings, output, norm = (
        dequantize(tensors[name].data, tensors[name].tensor_type).astype(float)
        for name in ("token_embd.weight", "output.weight", "output_norm.weight")
    )
    size = np.sqrt(np.square(embeddings).mean(axis=1, keepdims=True) + 1e-5)
    results = {}
    with (
        Model.load(path, use_extra_bufts=False) as one,
        make_context(
            one, n_outputs_max=max(counts), deterministic=deterministic, **PLAIN
        ) as context,
    ):
        batch = Batch(context.n_batch)
        for n_columns in counts:
            batch.clear()
            positions, slots = [*range(n_columns)], [0] * n_columns
            batch.add_rows(tokens_of(n_columns), positions, slots)
            context.clear()
            context.decode(batch)
            results[n_columns] = np.array(
                [context.logits(row) for row in range(n_columns)]
            )
        assert len(taken(context)) == 1
    return embeddings / size * norm, output, results


@pytest.mark.parametrize("kind", WOVEN)
def test_products_err_by_the_roundings_of_columns_only(kind, floats, tmp_path):
    """
    A column is rounded to 127 steps up to the largest of 32 values; a few values may be rounded
    to the other side. Of any number of columns, if they may not depend on it.
    """
    zeros = ("attn_output", "ffn_down")
    path = in_type(kind, floats["wide"], tmp_path / "one.gguf", zeros)

    counts = (*range(1, 18), 31, 63, 64, 65, 129)
    columns, output, results = one_product(path, "fast", counts)

    columns = columns.reshape(N_VOCAB, -1, 32)
    steps = np.abs(columns).max(axis=2, keepdims=True) / 127 + 1e-30
    rounded = np.round(columns / steps) * steps
    logits = rounded.reshape(N_VOCAB, -1) @ output.T
    half_a_step = (
        steps[..., 0] @ np.abs(output).reshape(N_VOCAB, -1, 32).sum(axis=2).T / 2
    )
    tokens = [token for n in counts for token in tokens_of(n)]
    errors = np.abs(np.concatenate([*results.values()]) - logits[tokens])
    assert np.all(errors <= half_a_step[tokens] + 1e-4)
    assert np.quantile(errors, 0.9) < 1e-4


@pytest.mark.parametrize("kind", WOVEN)
def test_many_columns_err_less_than_a_few(kind, floats, tmp_path):
    """
    AMX rounds both weights and columns to eight bits of floats, which is nearer to exact sums
    than columns of 8 bits; other CPUs multiply many columns as a few.
    """
    zeros = ("attn_output", "ffn_down")
    path = in_type(kind, floats["wide"], tmp_path / "one.gguf", zeros)

    counts = (20, 31, 32, 33, 63, 64, 65, 129)
    columns, output, results = one_product(path, False, counts)
    _, _, of_a_few = one_product(path, "fast", counts)

    logits, sizes_of = columns @ output.T, np.abs(columns) @ np.abs(output).T
    for n, rows in results.items():
        tokens = tokens_of(n)
        errors = np.abs(rows - logits[tokens])
        others = np.abs(of_a_few[n] - logits[tokens])
        if LEVELS[-1] == "amx":
            assert np.all(errors <= (2**-8 + 1e-5) * sizes_of[tokens])
            assert np.sqrt(np.square(errors).mean()) < 0.8 * np.sqrt(
                np.square(others).mean()
            )
        else:
            assert rows.tobytes() == of_a_few[n].tobytes()


@pytest.mark.parametrize(
    "only", [{"output.weight"}, {"blk.0.attn_k.weight", "blk.0.attn_v.weight"}]
)
def test_each_micro_batch_multiplies_columns_of_its_own(only, floats, tmp_path):
    """
    Products of the same columns pack them once. libllama computes one graph for each micro-batch
    of a batch, so columns at the same place are others then.
    """

    def change(name: str, floats: Floats) -> tuple[np.ndarray, GGMLQuantizationType]:
        if name in only:
            kind = GGMLQuantizationType.Q8_0
            return quantised(floats, kind), kind
        return floats, GGMLQuantizationType.F32

    path = rewritten(floats["wide"], tmp_path / "few.gguf", change)
    rows = []
    with Model.load(path, use_extra_bufts=False) as loaded:
        for n_ubatch in (32, 96):
            fields = {"n_ubatch": n_ubatch, "n_outputs_max": 96, **PLAIN}
            with make_context(loaded, **fields) as context:
                batch = Batch(context.n_batch)
                batch.add_rows(tokens_of(96), [*range(96)], [0] * 96)
                context.decode(batch)
                rows.append(np.array([context.logits(row) for row in range(96)]))
                assert taken(context)

    assert np.abs(rows[0] - rows[1]).max() < 0.01 * rows[1].std()


@pytest.mark.parametrize("kind", WOVEN)
def test_products_are_near_those_of_the_plain_path(kind, floats, tmp_path):
    """
    As llama.cpp bounds its own kernels: the largest difference, and the mean of all. Both round
    columns, libllama to steps of 32 or 256 values, ours to steps of 32.
    """
    zeros = ("attn_output", "ffn_down")  # logits are one product
    path = in_type(kind, floats["wide"], tmp_path / "one.gguf", zeros)
    data_type = GGMLQuantizationType[kind.upper()]
    differences, sizes_of = [], []
    with (
        Model.load(path, use_extra_bufts=False) as loaded,
        make_context(loaded, deterministic="fast", **PLAIN) as ours,
        make_context(loaded, fast_kernels=False, **PLAIN) as plain,
    ):
        for n_columns in (1, 3, 5, 9, 33, 63):
            prompt = prompt_of(loaded, n_columns, seed=n_columns)
            woven, theirs = (last_logits(context, prompt) for context in (ours, plain))
            ours.clear()
            plain.clear()
            differences.append(np.abs(woven - theirs))
            sizes_of.append(np.square(theirs).mean())

    size = np.sqrt(np.mean(sizes_of))
    limit, of_mean = (
        (0.06, 0.01) if lib.ggml_blck_size(data_type) == 256 else (0.01, 0.002)
    )
    assert np.max(differences) < limit * size
    assert np.mean(differences) < of_mean * size


def test_a_column_has_the_bits_of_it_alone(model):
    """
    Streams that are decoded together have the logits of each by itself. Products of a few
    columns are computed together, too, and those of 70 are not.
    """
    if any(len(t.dims) > 2 for t in read_header(str(model.path)).tensors):
        pytest.skip(
            "libllama multiplies routers (test_woven_experts.py has the experts)"
        )
    logits = rows_of_streams(model, 1, 7, 70)

    assert logits == logits[:1] * 3


@pytest.mark.parametrize("names", [["lora-a"], ["control"], ["lora-a", "control"]])
def test_a_column_has_the_bits_of_it_alone_with_adapters(names, tmp_path):
    """
    An adapter stands between products of a few columns, which are computed as one where they can.
    Its own weights are multiplied column by column where a context is deterministic.
    """
    path = in_type("q8_0", tiny_model("llama"), tmp_path / "weights.gguf")
    with Model.load(path, use_extra_bufts=False) as loaded:
        adapters = [(load_adapter(loaded, tiny_adapter(name)), 1.0) for name in names]
        plain = rows_of_streams(loaded, 7)
        logits = rows_of_streams(loaded, 1, 7, 70, adapters=adapters)

    assert logits == logits[:1] * 3
    assert logits[0] != plain[0]


@pytest.mark.parametrize("name", ["bloom", "gemma3", "qwen2"])
def test_biases_sums_and_norms_between_products_keep_their_bits(name, tmp_path):
    """
    What is added to a product of a few columns is added by it, and query, key and value are one
    operation, or two, if norms stand between them.
    """

    def change(_: str, floats: Floats) -> tuple[np.ndarray, GGMLQuantizationType]:
        if floats.ndim == 1:
            return floats, GGMLQuantizationType.F32
        data_type = GGMLQuantizationType.Q8_0
        return quantised(floats, data_type), data_type

    path = rewritten(tiny_model(name), tmp_path / f"{name}.gguf", change)
    with Model.load(path, use_extra_bufts=False) as loaded:
        logits = rows_of_streams(loaded, 1, 7, 70)

    assert logits == logits[:1] * 3


def rows_of_streams(
    model: Model,
    *counts: int,
    adapters: Sequence[tuple[Adapter, float]] = (),
    deterministic: Deterministic = "fast",
) -> list[list[bytes]]:
    """Logits of the first seven streams, of which each step computes as many as *counts* say."""
    n_most = max(counts)
    fields = {
        **PLAIN,
        "kv_unified": False,
        "n_seq_max": n_most,
        "n_outputs_max": n_most,
        "deterministic": deterministic,
    }
    results = []
    with make_context(model, **fields) as context:
        context.set_adapters(adapters)
        for slot in range(n_most):
            last_logits(context, prompt_of(model, 5, seed=slot), slot=slot)
        batch = Batch(context.n_batch)
        for n_streams in counts:
            rows = []
            for first in range(0, max(7, n_streams), n_streams):
                slots = [*range(first, first + n_streams)]
                batch.clear()
                batch.add_rows([9] * n_streams, [5] * n_streams, slots)
                context.decode(batch)
                rows += [
                    np.asarray(context.logits(row)).tobytes()
                    for row in range(n_streams)
                ]
                for slot in slots:
                    context.cut(slot, 5)
            results.append(rows[:7])
        assert taken(context)
    return results


def test_a_restored_state_goes_on_with_the_same_bits(model):
    """
    A new context computes its first steps before any products are one operation; one that has run
    for a while does not.
    """
    prompt = prompt_of(model, 9)
    with make_context(model, **PLAIN) as old, make_context(model, **PLAIN) as new:
        for _ in range(3):
            old.clear()
            last_logits(old, prompt)
        state = bytearray(old.state_bytes(0))
        old.capture(0, state)
        rows = []
        for context in (old, new):
            context.clear()
            context.restore(0, state)
            batch = Batch(context.n_batch)
            for position in range(9, 12):
                batch.clear()
                batch.add_rows([7], [position], [0])
                context.decode(batch)
                rows.append(np.asarray(context.logits(0)).tobytes())

    assert rows[:3] == rows[3:]


def test_any_number_of_threads_gives_the_same_bits(model):
    """
    Of one column, which each thread packs for itself, of a few, and of many; with more threads than
    groups of rows, too.
    """
    logits = []
    for n_threads in (1, 2, 3, 40, 70):
        with make_context(model, n_threads=n_threads, **PLAIN) as context:
            rows = []
            for n_tokens in (1, 1, 2, 5, 64, 65):  # the first may weave
                prompt = prompt_of(model, n_tokens, seed=n_tokens)
                rows.append(last_logits(context, prompt).tobytes())
                context.clear()
            logits.append(rows)

    assert logits == logits[:1] * 5


def test_contexts_of_a_model_share_woven_weights(model):
    """
    The second context weaves nothing, and the first may go.
    """
    prompt = prompt_of(model, 9)
    first = make_context(model, **PLAIN)
    with make_context(model, **PLAIN) as second:
        a = last_logits(first, prompt)
        b = last_logits(second, prompt)
        first.close()
        second.clear()
        c = last_logits(second, prompt)

    assert a.tobytes() == b.tobytes() == c.tobytes()


@pytest.mark.parametrize("kind", WOVEN)
def test_rows_of_tied_embeddings_are_those_of_the_file(kind, floats, tmp_path):
    """
    The first step looks them up in the file and weaves them as weights of the output. Later ones
    unpack them, if their type has no minimum, and have the same bits.
    """
    has_minimum = kind in ("q4_1", "q5_1", "q2_k", "q4_k", "q5_k")
    path = in_type(kind, floats["tied"], tmp_path / "tied.gguf")
    with (
        Model.load(path, use_extra_bufts=False) as loaded,
        make_context(loaded, **PLAIN) as context,
    ):
        logits, counts = [], []
        for _ in range(2):
            context.clear()
            logits.append(last_logits(context, prompt_of(loaded, 100)).tobytes())
            counts.append(taken(context)[kind])

    n_products = counts[0]  # of one graph, which may be used again
    assert logits[0] == logits[1]
    assert (counts[1] - n_products) % n_products == (0 if has_minimum else 1)


def test_all_levels_of_instructions_give_the_same_bits(model):
    """
    Contexts of one model share its woven weights, each by another level of this CPU. Prompts of
    many lengths make tiles of all widths.
    """
    logits = {}
    for level in LEVELS:
        assert lib.plr_woven_choose(level.encode())
        with make_context(model, deterministic="fast", **PLAIN) as context:
            rows = []
            for n_tokens in (1, 2, 3, 4, 5, 6, 7, 8, 17):
                row = last_logits(context, prompt_of(model, n_tokens))
                rows.append(row.tobytes())
                context.clear()
            assert taken(context)
        logits[level] = rows

    assert all(rows == logits["plain"] for rows in logits.values())


def test_a_level_that_this_cpu_does_not_have_is_refused():
    """
    The error names the variable, its value and the levels.
    """
    code = "from pyllama_raw.native.libllama import load; load()"
    environment = os.environ | {"PYLLAMA_RAW_WOVEN": "avx3"}
    command = [sys.executable, "-c", code]

    done = subprocess.run(
        command, check=False, capture_output=True, text=True, env=environment
    )

    assert (
        "ConfigError: PYLLAMA_RAW_WOVEN=avx3: there is no such level; levels are auto, "
        "plain, avx2, avxvnni, avx512vnni, amx, and this CPU has auto, plain"
        in done.stderr
    )


def has_simde() -> bool:
    question = "#if !__has_include(<simde/x86/avx512.h>)\n#error\n#endif"
    command = ["c++", "-E", "-x", "c++", "-"]
    done = subprocess.run(
        command, check=False, input=question, capture_output=True, text=True
    )
    return done.returncode == 0


@pytest.mark.nightly
def test_products_of_all_types_and_widths_are_exact_sums(tmp_path):
    """
    By each level of this CPU, of one to 64 columns and the largest numbers: in bits those of plain
    C++, and within roundings of floats of sums in 64 bits. Many columns by AMX are within those of
    bfloat16.
    """
    program = compiled(tmp_path / "products")

    lines = list(lines_of(program, "check"))

    ends = ("same bits", "rounded to bfloat16")
    assert [line for line in lines if not line.endswith(ends)] == []
    assert {line.split()[0] for line in lines} == {*LEVELS, "rows"}


@pytest.mark.nightly
def test_levels_that_this_cpu_lacks_give_the_same_bits_where_they_are_emulated(
    tmp_path,
):
    """
    AVX-VNNI and AVX-512, of all types and widths of tiles, with the largest numbers, by SIMDe.
    """
    if "avx2" not in LEVELS or not has_simde():
        pytest.skip("SIMDe is not installed (libsimde-dev), or there is no AVX2")
    flags = ["-O1", "-mavx2", "-mfma", "-mf16c", f'-DPLR_EMULATED="{EMULATED}"']
    program = compiled(tmp_path / "products", *flags)

    lines = list(lines_of(program, "check"))

    assert [line for line in lines if not line.endswith("same bits")] == []
    assert {line.split()[0] for line in lines} == {
        "plain",
        "avx2",
        "avxvnni",
        "avx512vnni",
        "rows",
    }
