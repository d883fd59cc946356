"""Memory that is reckoned without weights is what libllama takes with them."""

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
from pyllama_raw.native.breakdown import CELL_BYTES, NO_WEIGHTS, breakdown_of
from pyllama_raw.native.context import Context
from pyllama_raw.native.libllama import ffi, lib
from pyllama_raw.native.model import Model
from pyllama_raw.native.projector import Projector
from tests.native.support import run_python
from tests.tiny import GENERATING, tiny_model, tiny_projector

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


@pytest.mark.parametrize("recipe", GENERATING, ids=lambda recipe: recipe.name)
def test_the_breakdown_is_that_of_a_loaded_model(recipe):
    """
    Weights, cells and compute buffers of every class of models come to the same bytes.
    """
    path = tiny_model(recipe.name)
    with Model.load(path, **NO_WEIGHTS) as model:
        found = breakdown_of(model, n_seq_max=3, fast_kernels=True, **FIELDS)
        cells = 0 if model.is_recurrent and not model.is_hybrid else found.n_ctx
    with Model.load(path) as model, Context(model, n_seq_max=3, **FIELDS) as context:
        wanted, can_shift = buffers(context), context.can_shift

    rows = ROW_BYTES * model.n_vocab
    without = found.weights["CPU"], found.kv["CPU"] - cells * CELL_BYTES
    assert (*without, found.compute["CPU"] - rows) == wanted
    assert found.can_shift == can_shift


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
    print(engine.complete([5, 6, 7], SamplingParams(max_tokens=3)).usage.completion_tokens)
"""


def test_estimates_leave_engines_alone():
    """
    Estimates before and beside an engine do not disturb it, and the process ends well.
    """
    done = run_python(TRIED_AGAIN, tiny_model("falcon-h1"))

    assert (done.returncode, done.stdout, done.stderr) == (0, "3\n", "")
