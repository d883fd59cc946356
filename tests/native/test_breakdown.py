"""Memory that is reckoned without weights is what libllama takes with them."""

import sys
from pathlib import Path

import pytest

from pyllama_raw import (
    ContextConfig,
    EngineConfig,
    MediaConfig,
    ModelConfig,
    devices,
    estimate_memory,
    probe,
)
from pyllama_raw.errors import ConfigError, ContextFailed, ModelLoadFailed, Unsupported
from pyllama_raw.native.context import Context
from pyllama_raw.native.libllama import ffi, lib
from pyllama_raw.native.memory import CELL_BYTES, NO_WEIGHTS, breakdown_of
from pyllama_raw.native.model import Model, quantize
from pyllama_raw.native.projector import Projector
from tests.native.support import run_python
from tests.support.tiny import GENERATING, tiny_model, tiny_projector

pytestmark = pytest.mark.native

FIELDS = {"n_ctx": 1024, "n_threads": 1, "n_outputs_max": 8}
ROW_BYTES = 4 * FIELDS["n_outputs_max"]  # of each token of the vocabulary


def buffers(context: Context) -> tuple[int, int, int]:
    """Weights, cells and compute buffers, as they are allocated."""
    parts = ffi.new("plr_memory_part[]", 16)
    found = parts[0 : lib.plr_memory_parts(context.ptr, 16, parts)]
    return (
        sum(part.weights for part in found),
        sum(part.cells for part in found),
        sum(part.compute for part in found),
    )


def graph_bytes(context: Context) -> int:
    """Bytes of a graph, which has room for so many nodes. The context is of no use then."""
    n_nodes = lib.plr_graph_nodes(context.ptr)
    n_bytes = lib.ggml_tensor_overhead() * n_nodes
    return n_bytes + lib.ggml_graph_overhead_custom(n_nodes, False)


@pytest.mark.parametrize("recipe", GENERATING, ids=lambda recipe: recipe.name)
def test_the_breakdown_is_that_of_a_loaded_model(recipe):
    """
    Weights, cells and compute buffers of every class of models come to the same bytes, and
    beside them are three graphs, and attention weights where attention is no single kernel.
    """
    path = tiny_model(recipe.name)
    with Model.load(path, **NO_WEIGHTS) as model:
        found = breakdown_of(model, n_seq_max=3, fast_kernels=True, **FIELDS)
        cells = 0 if model.is_recurrent and not model.is_hybrid else found.n_ctx
    with Model.load(path) as model, Context(model, n_seq_max=3, **FIELDS) as context:
        wanted, can_shift = buffers(context), context.can_shift
        graphs = 3 * graph_bytes(context)
        if model.reads_sources:
            graphs += 2 * context.n_ctx_seq * context.n_ubatch * model.n_head

    rows = ROW_BYTES * model.n_vocab
    without = found.weights["CPU"], found.kv["CPU"] - cells * CELL_BYTES
    assert (*without, found.compute["CPU"] - rows - graphs) == wanted
    assert found.can_shift == can_shift


def test_graphs_of_long_steps_are_much():
    """
    Models whose graphs grow with the tokens of a step take a hundred megabytes for them.
    """
    config = EngineConfig(context=ContextConfig(n_ubatch=2048, n_threads=1))

    long, short = (estimate_memory(tiny_model(n), config) for n in ("qwen35", "llama"))

    more = long.devices[0].compute_bytes - short.devices[0].compute_bytes
    assert 90e6 < more < 110e6


def test_attention_without_a_kernel_takes_more():
    """
    Its weights of all cells are there once more, as 16-bit numbers.
    """
    path = tiny_model("llama")
    with Model.load(path) as model:
        n_head = model.n_head

    def compute(flash_attn):
        context = ContextConfig(n_ctx=8192, kv_unified=True, flash_attn=flash_attn)
        (host,) = estimate_memory(path, EngineConfig(context=context)).devices
        return host.compute_bytes

    assert compute("off") - compute("on") > 2 * 8192 * 512 * n_head


MAPPED = """
import sys
from pathlib import Path
from pyllama_raw.engine.estimate import estimate
from pyllama_raw.native import memory
from pyllama_raw.native.model import Model
from pyllama_raw import EngineConfig
spans, reckon = [], memory._mapped_bytes
memory._mapped_bytes = lambda *given: spans.append(reckon(*given)) or spans[-1]
path = Path(sys.argv[1])
estimate(path, EngineConfig())
with Model.load(path) as model:
    lines = Path("/proc/self/maps").read_text().splitlines()
    ends = [line.split()[0].split("-") for line in lines if line.endswith(str(path))]
    print(spans[0], sum(int(end, 16) - int(start, 16) for start, end in ends))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads what is mapped in /proc")
def test_the_part_of_a_file_that_stays_is_known(tmp_path: Path):
    """
    libllama lets go of both ends of a file if their weights are put in another order.
    """
    path = tmp_path / "model.gguf"
    quantize(tiny_model("llama"), path, "q8_0")

    spanned, mapped = map(int, run_python(MAPPED, path).stdout.split())

    assert 0 <= mapped - spanned <= 2 * 4096


def test_a_projector_has_its_part():
    """
    The part of a projector is what it tells when it is loaded; header and model say the rest.
    """
    path, text_model = tiny_projector("ultravox")
    config = EngineConfig(media=MediaConfig(mmproj=path))
    with Model.load(text_model) as model, Projector.load(path, model) as projector:
        n_bytes = projector.n_bytes

    (host,) = estimate_memory(text_model, config).devices
    facts = probe(text_model, config)

    assert (host.device, host.projector_bytes) == ("CPU", n_bytes)
    assert (facts.images, facts.sounds) == (False, True)


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("llama", (False, False, True, True)),
        ("qwen2vl", (False, False, True, False)),
        ("gemma3", (False, False, False, False)),
        ("mamba", (True, False, False, False)),
        ("jamba", (False, True, False, False)),
        ("bert", (False, False, False, False)),
    ],
)
def test_a_probe_tells_the_kind_of_memory(name, facts):
    """
    Recurrent or hybrid, whether it can be cut, whether it can shift: without a weight.
    """
    found = probe(tiny_model(name))

    kinds = found.is_recurrent, found.is_hybrid
    assert (*kinds, found.can_cut, found.can_shift) == facts


def test_devices_have_an_id_of_their_own():
    """
    No two devices have the same id, and none is without.
    """
    ids = [device.stable_id for device in devices()]

    assert all(ids)
    assert len(set(ids)) == len(ids)


def test_what_cannot_be_reckoned_is_told(tmp_path: Path):
    """
    Files, models and options that no engine takes are refused with the error of an opening.
    """
    bad = tmp_path / "bad.gguf"
    bad.write_bytes(b"not a model")
    llama = tiny_model("llama")
    many = EngineConfig(context=ContextConfig(n_ctx=2**31 - 1))
    device = EngineConfig(model=ModelConfig(devices=["none such"]))

    with pytest.raises(ModelLoadFailed):
        estimate_memory(bad)
    with pytest.raises(Unsupported):
        estimate_memory(tiny_model("llada"))
    with pytest.raises(ContextFailed, match="n_ctx=2147483647"):
        estimate_memory(llama, many)
    with pytest.raises(ConfigError, match="none such"):
        estimate_memory(llama, device)
    with pytest.raises(ConfigError, match="config"):
        estimate_memory(llama, 4096)  # type: ignore[arg-type]


TRIED_AGAIN = """
import sys
from pyllama_raw import Engine, SamplingParams, estimate_memory, probe

for _ in range(3):
    estimate_memory(sys.argv[1]); probe(sys.argv[1])
with Engine.open(sys.argv[1]) as engine:
    estimate_memory(sys.argv[1])
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    print(engine.complete([5, 6, 7], params).usage.completion_tokens)
"""


def test_estimates_leave_engines_alone():
    """
    Estimates before and beside an engine do not disturb it, and the process ends well.
    """
    done = run_python(TRIED_AGAIN, tiny_model("falcon-h1"))

    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")
