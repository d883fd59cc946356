"""
Compare estimates of memory with what a process has in memory when it uses all of it.

    python -m scripts.try_estimates [--large DIRECTORY] [NAME ...]

A model of each class is opened in a process of its own: a tiny one and the default one, or one of
some hundred megabytes, which is made in DIRECTORY. All slots are filled, in steps that are as
large as they may be, with outputs and without, or an image is encoded. The process has used
another model before, so what libllama and Python need once does not count. Beside a tiny model
the few megabytes that each context needs besides are much.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path

from pyllama_raw.engine.estimate import MemoryEstimate, estimate
from pyllama_raw.engine.info import Operation, probe
from pyllama_raw.engine.layout import context_fields, layout_of, step_fields
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context
from pyllama_raw.native.model import Model
from pyllama_raw.native.projector import Bitmap, Projector, RowRun
from pyllama_raw.options.config import (
    CacheConfig,
    ContextConfig,
    EmbeddingConfig,
    EngineConfig,
    MediaConfig,
    SchedulerConfig,
)
from pyllama_raw.options.models import default_model
from scripts.large_models import LARGE, large_model, large_projector
from tests.support.tiny import tiny_model, tiny_projector

NAMES = (
    *("llama", "qwen3moe", "gemma3", "mamba2", "rwkv7", "falcon-h1", "qwen35"),
    *("bert", "jina-bert-v2", "qwen3-embedding", "t5", "projector:qwen2vl", "default"),
)
LARGE_NAMES = (*LARGE, "projector:qwen2vl")
N_STEP, N_LARGE_STEP = 2048, 512  # tokens of a step, and of a slot
N_SLOTS, N_LARGE_SLOTS = 16, 2
IMAGE, LARGE_IMAGE = 700, 1288  # pixels; libllama makes room for the latter


def main() -> None:
    """Measure each named model."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--large", type=Path, metavar="DIRECTORY")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.here:
        print(json.dumps(measured(options.names[0], options.large)))
        return
    names = options.names or (LARGE_NAMES if options.large else NAMES)
    print(f"{'':18} {'estimate':>12} {'measured':>12} {'ratio':>6}  weights, kv, ...")
    for name in names:
        command = [sys.executable, "-m", "scripts.try_estimates", name, "--here"]
        if options.large:
            command += ["--large", str(options.large)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        parts, n_bytes = json.loads(done.stdout)
        ratio = sum(parts) / n_bytes
        print(f"{name:18} {sum(parts):12,} {n_bytes:12,} {ratio:6.3f}  {parts}")


def measured(name: str, large: Path | None) -> tuple[list[int], int]:
    """The parts of the estimate for a model, and what its use adds to this process."""
    path, config = opened_as(name, large=large)
    parts = parts_of(estimate(path, config))
    other = "jina-bert-v2" if name == "bert" else "bert"
    use(*opened_as("projector:llava" if config.media.mmproj else other))
    use(*opened_as("llama-moe", n_slots=1))
    before = resident_bytes()
    image = IMAGE if large is None else LARGE_IMAGE
    return parts, use(path, config, image) - before


def parts_of(memory: MemoryEstimate) -> list[int]:
    return [
        sum(device.weights_bytes for device in memory.devices),
        sum(device.kv_bytes for device in memory.devices),
        sum(device.compute_bytes for device in memory.devices),
        sum(device.projector_bytes for device in memory.devices),
    ]


def opened_as(
    name: str, n_slots: int = N_SLOTS, large: Path | None = None
) -> tuple[Path, EngineConfig]:
    """The file of *name*, a tiny model if *large* is None, and the options of its use."""
    kind, _, tail = name.partition(":")
    projector, n_step = None, N_STEP
    if large is not None:
        path = large_model(tail or name, large)
        n_slots, n_step = N_LARGE_SLOTS, N_LARGE_STEP
        projector = large_projector(tail, large) if tail else None
    elif kind == "projector":
        projector, path = tiny_projector(tail)
    elif name == "default":
        path, n_slots = default_model(), 1
    else:
        path, n_slots = tiny_model(name), 4 if name == "t5" else n_slots
    context = ContextConfig(
        n_ctx=n_slots * n_step,
        n_ubatch=512 if name == "default" else n_step,
        kv_unified=name == "t5",
        n_threads=1,
    )
    return path, EngineConfig(
        context=context,
        scheduler=SchedulerConfig(n_slots=n_slots),
        cache=CacheConfig(mode="off"),
        embedding=EmbeddingConfig(max_step_tokens=n_step),
        media=MediaConfig(mmproj=projector),
    )


def use(path: Path, config: EngineConfig, image: int = IMAGE) -> int:
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
                    n_cells = config.context.n_ctx // config.scheduler.n_slots
                    n_most = min(context.n_ctx_seq, n_cells)
                    fill(context, slot, min(context.max_tokens, n_most))
            if config.media.mmproj is None:
                return resident_bytes()
            with Projector.load(config.media.mmproj, model) as projector:
                encode(projector, image)
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
        context.decode(batch)
        batch.clear()
        context.seq_rm(slot)
        batch.add(tokens[:-n_scored], 0, slot, False)
        batch.add_scored(tokens[-n_scored:], n_tokens - n_scored, slot)
    context.decode(batch)


def encode(projector: Projector, n_pixels: int) -> None:
    with Bitmap.image(n_pixels, n_pixels, bytes(3 * n_pixels**2)) as bitmap:
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
