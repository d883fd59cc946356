"""
Compare estimates of memory with what processes have in memory when they use all of it.

    python -m scripts.try_estimates [NAME ...] [--n-ctx N]

Each tiny model, and the default one, is opened in a process of its own. Its slots are filled to
the end, or texts of the greatest length become vectors. Then the memory of the process is
compared with what it had before, when it had used another model. What an engine holds besides
is measured with a model of nearly nothing, and printed with each ratio.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

from pyllama_raw import (
    CacheConfig,
    ContextConfig,
    Engine,
    EngineConfig,
    Image,
    MediaConfig,
    Prompt,
    SamplingParams,
    SchedulerConfig,
    estimate_memory,
    probe,
)
from pyllama_raw.media import Audio
from pyllama_raw.results import MemoryEstimate, Operation

ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0)
CLASSES = {  # by what they keep of a text
    "dense": "llama",
    "MoE": "qwen3moe",
    "SWA": "gemma3",
    "recurrent": "mamba2",
    "hybrid": "falcon-h1",
    "encoder": "bert",
    "decoder that embeds": "qwen3-embedding",
    "with a projector": "qwen2vl",
}
DEFAULT = "default"


def main() -> None:
    """Measure each named model, or one of each class."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help="of a tiny model")
    parser.add_argument("--n-ctx", type=int, default=8192)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(measured(options.child, options.n_ctx)))
        return
    names = options.names or [*CLASSES.values(), DEFAULT]
    print(f"{'model':20} {'estimate':>12} {'measured':>12} {'ratio':>6}")
    for name in names:
        said = json.loads(in_a_process(name, options.n_ctx))
        ratio = said["estimate"] / said["measured"]
        print(
            f"{name:20} {said['estimate']:12,} {said['measured']:12,} {ratio:6.3f}",
            said["parts"],
        )


def in_a_process(name: str, n_ctx: int) -> str:
    command = [sys.executable, "-m", "scripts.try_estimates", "--child", name]
    done = subprocess.run(
        [*command, "--n-ctx", str(n_ctx)], capture_output=True, text=True, check=True
    )
    return done.stdout


def measured(name: str, n_ctx: int) -> dict[str, Any]:
    """The estimate for a model, and what its use added to this process."""
    path, projector = files(name)
    config = engine_config(n_ctx, projector)
    estimate = estimate_memory(path, config)
    use(files("bloom")[0], engine_config(256, None))  # what each process needs once
    before = resident_bytes()
    with Engine.open(path, config) as engine:
        exercise(engine, path, config)
        after = resident_bytes()
    return {
        "estimate": estimate.total_bytes,
        "measured": after - before,
        "parts": parts(estimate),
    }


def parts(estimate: MemoryEstimate) -> str:
    shares = (
        f"{one.device} {one.weights_bytes:,} + {one.kv_bytes:,} + "
        f"{one.compute_bytes:,} + {one.projector_bytes:,}"
        for one in estimate.devices
    )
    return ", ".join(shares)


def files(name: str) -> tuple[Path | None, Path | None]:
    """The model of *name*, and its projector."""
    from tests.tiny import PROJECTORS, tiny_model, tiny_projector

    if name == DEFAULT:
        return None, None
    if name in PROJECTORS:
        projector, model = tiny_projector(name)
        return model, projector
    return tiny_model(name), None


def engine_config(n_ctx: int, projector: Path | None) -> EngineConfig:
    n_slots = max(n_ctx // 2048, 1)
    return EngineConfig(
        context=ContextConfig(n_ctx=n_ctx, n_threads=1),
        scheduler=SchedulerConfig(n_slots=n_slots, target_step_s=60),
        cache=CacheConfig(mode="off"),
        media=MediaConfig(mmproj=projector),
    )


def use(path: Path | None, config: EngineConfig) -> None:
    with Engine.open(path, config) as engine:
        exercise(engine, path, config)


def exercise(engine: Engine, path: Path | None, config: EngineConfig) -> None:
    """Touch all memory that the engine has for its work."""
    found = probe(path, config)
    info, rng = engine.info, random.Random(1)
    if Operation.GENERATE not in found.capabilities.operations:
        engine.embed(["and so on " * 40] * 64)
        return
    prompts: list[Prompt] = [
        [rng.randrange(100, 250) for _ in range(info.n_ctx_slot - 1)]
        for _ in range(info.n_slots)
    ]
    engine.complete_many(prompts, ONE_TOKEN)
    scored = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=1)
    engine.complete_many([prompts[0][:256]], scored)
    if found.images:
        import numpy as np

        pixels = np.zeros((1024, 1024, 3), np.uint8)
        engine.complete(["see ", Image(pixels)], ONE_TOKEN)
    if found.sounds:
        import numpy as np

        engine.complete(["hear ", Audio(np.zeros(16000 * 20, np.float32))], ONE_TOKEN)


def resident_bytes() -> int:
    """Memory of this process, after what was freed has been given back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    (line,) = (line for line in lines if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
