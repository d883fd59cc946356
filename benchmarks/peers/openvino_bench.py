"""
OpenVINO GenAI on the same file: batches as llama-batched-bench has them, and greedy tokens.

Run by its environment's Python, this file is the program that computes them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .batched_bench import Phases

TYPES = ("Q4_0", "Q4_1", "Q4_K", "Q6_K", "Q8_0")  # that its reader of GGUF knows
# Its kernels choose their instructions at run time, as oneDNN does, whose variable names a level.
# What else OpenVINO chooses by the CPU has to be told: floats of 16 bits, and on AVX2 sums of bytes.
FLOATS = {"INFERENCE_PRECISION_HINT": "f32"}
NO_BYTES = {"DYNAMIC_QUANTIZATION_GROUP_SIZE": 0}
LEVELS = {  # another level is what the machine has
    "sse42": ("SSE41", FLOATS | NO_BYTES),
    "avx2": ("AVX2", FLOATS | NO_BYTES),
    "avx512vnni": ("AVX512_CORE_VNNI", FLOATS),
}


def openvino_bench(
    model: Path,
    *,
    n_prompt: int,
    n_output: int,
    n_slots: int,
    repeats: int,
    threads: int,
    cpu_level: str,
    properties: tuple[str, ...] = (),
) -> Phases:
    """
    Run *repeats* batches of *n_slots* requests; loading is not in the time.

    Args:
        cpu_level: a name of PYLLAMA_RAW_CPU, whose instructions it may use.
        properties: of its device, each as NAME=VALUE.
    """
    from . import find
    from .batched_bench import Phases

    level, of_level = LEVELS.get(cpu_level, (None, {}))
    options = {
        "model": str(model),
        "n_prompt": n_prompt,
        "n_output": n_output,
        "n_slots": n_slots,
        "repeats": repeats,
        "onednn_level": level,
        "properties": {
            "INFERENCE_NUM_THREADS": threads,
            **of_level,
            **dict(pair.split("=") for pair in properties),
        },
    }
    command = [find("openvino_python"), __file__, json.dumps(options)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        text = done.stdout + done.stderr
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode}:\n{text[-2000:]}"
        )
    runs = [Phases(**run) for run in json.loads(done.stdout.splitlines()[-1])]
    return sum(runs, Phases())


def main(options: dict[str, Any]) -> None:
    """Print the phases of all batches as one line."""
    import os

    if options["onednn_level"]:  # read when its library is loaded
        os.environ["ONEDNN_MAX_CPU_ISA"] = options["onednn_level"]
    import numpy as np  # type: ignore[import-not-found,unused-ignore]
    import openvino  # type: ignore[import-not-found]
    import openvino_genai  # type: ignore[import-not-found]

    n_slots, n_prompt = options["n_slots"], options["n_prompt"]
    pipeline = openvino_genai.LLMPipeline(
        options["model"], "CPU", **options["properties"]
    )
    rng = np.random.default_rng(0)

    def generate(n_output: int) -> Any:
        """Its metrics of one batch of random tokens, which any vocabulary has."""
        config = openvino_genai.GenerationConfig(
            max_new_tokens=n_output, ignore_eos=True, do_sample=False
        )
        ids = rng.integers(0, 256, (n_slots, n_prompt), dtype=np.int64)
        inputs = openvino_genai.TokenizedInputs(
            openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids))
        )
        return pipeline.generate(inputs, config).perf_metrics

    generate(2)  # what it makes on the first call
    runs = []
    for _ in range(options["repeats"]):
        # The first token is of the prompt; behind it come as many steps as the others'.
        metrics = generate(options["n_output"] + 1)
        prefill_s = metrics.get_ttft().mean / 1000
        runs.append(
            {
                "n_prefill": n_slots * n_prompt,
                "prefill_s": prefill_s,
                "n_decode": n_slots * options["n_output"],
                "decode_s": metrics.get_generate_duration().mean / 1000 - prefill_s,
            }
        )
    print(json.dumps(runs))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
