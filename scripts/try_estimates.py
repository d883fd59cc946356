"""
Compare estimates of memory with what a process has in memory when it uses all of it.

    python -m scripts.try_estimates [NAME ...]

A tiny model of each class, and the default one, is opened in a process of its own. All slots are
filled, in steps that are as large as they may be, or an image is encoded. The process has used
another model before, so what libllama and Python need once does not count. Sizes are such that
the memory of the model is more than what each context needs besides.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path

from pyllama_raw.engine.build import context_fields, layout_of
from pyllama_raw.engine.build_embedder import step_fields
from pyllama_raw.engine.capabilities import Operation, probe
from pyllama_raw.engine.estimate import MemoryEstimate, estimate
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.bitmap import Bitmap
from pyllama_raw.native.context import Context
from pyllama_raw.native.cut import RowRun
from pyllama_raw.native.model import Model
from pyllama_raw.native.projector import Projector
from pyllama_raw.options.config import (
    CacheConfig,
    ContextConfig,
    EmbeddingConfig,
    EngineConfig,
    MediaConfig,
    SchedulerConfig,
)
from pyllama_raw.options.models import default_model
from tests.tiny import tiny_model, tiny_projector

NAMES = (
    *("llama", "qwen3moe", "gemma3", "mamba2", "rwkv7", "falcon-h1", "qwen35"),
    *("bert", "jina-bert-v2", "qwen3-embedding", "t5", "projector:qwen2vl", "default"),
)
N_STEP = 2048  # tokens of a step, and of a slot
N_SLOTS = 16
IMAGE = 700  # pixels


def main() -> None:
    """Measure each named model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", default=NAMES)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measured(options.names[0])))
        return
    print(f"{'':18} {'estimate':>12} {'measured':>12} {'ratio':>6}  weights, kv, ...")
    for name in options.names:
        command = [sys.executable, "-m", "scripts.try_estimates", name, "--here"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        parts, n_bytes = json.loads(done.stdout)
        ratio = sum(parts) / n_bytes
        print(f"{name:18} {sum(parts):12,} {n_bytes:12,} {ratio:6.3f}  {parts}")


def measured(name: str) -> tuple[list[int], int]:
    """The parts of the estimate for a model, and what its use adds to this process."""
    path, config = opened_as(name)
    parts = parts_of(estimate(path, config))
    other = "jina-bert-v2" if name == "bert" else "bert"
    use(*opened_as("projector:llava" if config.media.mmproj else other))
    use(*opened_as("llama-moe", n_slots=1))
    before = resident_bytes()
    return parts, use(path, config) - before


def parts_of(memory: MemoryEstimate) -> list[int]:
    return [
        sum(one.weights_bytes for one in memory.devices),
        sum(one.kv_bytes for one in memory.devices),
        sum(one.compute_bytes for one in memory.devices),
        sum(one.projector_bytes for one in memory.devices),
    ]


def opened_as(name: str, n_slots: int = N_SLOTS) -> tuple[Path, EngineConfig]:
    """The file of *name*, and the options that it is used with."""
    kind, _, rest = name.partition(":")
    projector = None
    if kind == "projector":
        projector, path = tiny_projector(rest)
    elif name == "default":
        path, n_slots = default_model(), 1
    else:
        path, n_slots = tiny_model(name), 4 if name == "t5" else n_slots
    context = ContextConfig(
        n_ctx=n_slots * N_STEP,
        n_ubatch=512 if name == "default" else N_STEP,
        kv_unified=name == "t5",
        n_threads=1,
    )
    return path, EngineConfig(
        context=context,
        scheduler=SchedulerConfig(n_slots=n_slots),
        cache=CacheConfig(mode="off"),
        embedding=EmbeddingConfig(max_step_tokens=N_STEP),
        media=MediaConfig(mmproj=projector),
    )


def use(path: Path, config: EngineConfig) -> int:
    """Use all that an engine of *config* would have; the memory of the process then."""
    capabilities = probe(path)
    with Model.load(path) as model:
        if Operation.GENERATE not in capabilities.operations:
            pooling = capabilities.model.pooling
            fields = config.context.model_dump() | step_fields(model, config)
            fields |= {"kv_unified": True, "pooling": pooling and pooling.value}
        else:
            n_slots = config.scheduler.n_slots
            fields = context_fields(config.context, n_slots, model.n_ctx_train)
            fields["n_seq_max"] = layout_of(model, config).n_seq_max
        with Context(model, **fields) as context:
            if model.reads_sources:
                read(context)
            if not context.has_memory:
                n_slots = 1
                fill(context, 0, min(context.max_tokens, model.n_ctx_train))
            else:
                for slot in range(context.n_seq_max):
                    fill(context, slot, min(N_STEP, context.n_ctx_seq))
            if config.media.mmproj is None:
                return resident_bytes()
            with Projector.load(config.media.mmproj, model) as projector:
                encode(projector)
                return resident_bytes()


def read(context: Context) -> None:
    """Read as much as can be read at once, a part for each slot."""
    batch, n_slots = Batch(context.n_ubatch), context.n_seq_max
    for slot in range(n_slots):
        batch.add_scored([100] * (context.n_ubatch // n_slots), 0, slot)
    assert context.read_sources(batch).code == 0


def fill(context: Context, slot: int, n_tokens: int) -> None:
    batch = Batch(context.max_tokens)
    tokens = [100 + index % 100 for index in range(n_tokens)]
    n_scored = min(context.n_outputs_max, n_tokens)
    if not context.has_memory:
        batch.add_scored(tokens, 0, slot)
    else:
        batch.add(tokens[:-n_scored], 0, slot, False)
        batch.add_scored(tokens[-n_scored:], n_tokens - n_scored, slot)
    context.decode(batch)


def encode(projector: Projector) -> None:
    with Bitmap.image(IMAGE, IMAGE, bytes(3 * IMAGE**2)) as bitmap:
        cut = projector.cut(bitmap)
    with cut:
        for index, run in enumerate(cut.runs):
            if isinstance(run, RowRun):
                projector.encode(cut, index)


def resident_bytes() -> int:
    """Memory of this process, after what was freed is given back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
