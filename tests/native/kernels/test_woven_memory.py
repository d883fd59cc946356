"""Woven weights beside the file that they are of: they cost no second copy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pyllama_raw.native.kernels import table
from pyllama_raw.native.model import quantize
from scripts.tiny_models import vocab
from scripts.tiny_models.gguf import write
from scripts.tiny_models.recipe import Recipe, sizes
from tests.native.support import run_python

N_VOCAB = 4096
WIDE = sizes(16, 4, n_embd=2048, n_ff=8192, n_layer=1, vocab_size=N_VOCAB)

CODE = """
import json, sys
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context
from pyllama_raw.native.model import Model

def resident():
    lines = open("/proc/self/status").read().splitlines()
    values = dict(line.split(":") for line in lines)
    return {name: 1024 * int(values[name].split()[0]) for name in ("VmRSS", "VmHWM", "RssFile")}

path, is_fast, load_mode = json.loads(sys.argv[1])
before = resident()
after = []
with Model.load(path, use_extra_bufts=False, load_mode=load_mode) as model:
    contexts = [
        Context(model, n_seq_max=1, n_ctx=256, n_threads=2, fast_kernels=is_fast) for _ in range(2)
    ]
    batch = Batch(contexts[0].n_batch)
    for start in range(0, model.n_vocab, 256):  # all pages of the embeddings
        for context in contexts:
            context.clear()
            batch.clear()
            batch.add([*range(start, start + 256, 2)], 0, 0, True)
            context.decode(batch)
            after.append(resident())
    print(json.dumps([before, after]))
    for context in contexts:
        context.close()
"""

pytestmark = [
    pytest.mark.native,
    pytest.mark.skipif(
        not any(row.is_woven and row.is_usable for row in table()),
        reason="no weights are woven on this CPU",
    ),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> Path:
    """A tied model of 69 million weights in 8 bits each."""
    folder = tmp_path_factory.mktemp("woven-memory")
    words = vocab.extended(N_VOCAB)
    recipe = Recipe("wide", "llama", WIDE, more=words, without=("output.weight",))
    write(recipe, folder / "floats.gguf")
    quantize(folder / "floats.gguf", folder / "model.gguf", "q8_0")
    (folder / "floats.gguf").unlink()
    return folder / "model.gguf"


def used(path: Path, *, is_fast: bool, load_mode: str = "mmap") -> list[dict[str, int]]:
    """What a process has after each step, more than before; two contexts take turns."""
    process = run_python(CODE, json.dumps([str(path), is_fast, load_mode]))
    assert (process.returncode, process.stderr) == (0, "")
    before, after = json.loads(process.stdout)
    return [
        {name: n_bytes - before[name] for name, n_bytes in step.items()}
        for step in after
    ]


def test_woven_weights_take_the_place_of_those_of_the_file(path):
    """
    A process with woven weights has as much memory as one without, while it weaves, too, and when
    it has looked at all of the embeddings. Contexts of one model share them.
    """
    woven, plain = used(path, is_fast=True), used(path, is_fast=False)

    n_bytes = path.stat().st_size
    assert woven[-1]["RssFile"] < 0.3 * n_bytes < n_bytes < plain[-1]["RssFile"]
    assert woven[-1]["VmRSS"] < 1.1 * plain[-1]["VmRSS"]
    assert woven[-1]["VmHWM"] < 1.1 * plain[-1]["VmHWM"]


def test_weights_that_are_not_mapped_are_not_held_twice(path):
    """
    libllama multiplies them then, from the memory that it read them into.
    """
    copies, pages = (
        used(path, is_fast=True, load_mode="none"),
        used(path, is_fast=False),
    )

    assert copies[-1]["VmRSS"] < 1.1 * pages[-1]["VmRSS"]
