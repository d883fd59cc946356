"""
llama-batched-bench, of llama.cpp and of ik_llama.cpp: a loop around llama_decode without sampling.

What it makes of a model is the ceiling of such a library, if it is set well. Which settings
are best depends on the types of weights and the number of streams, so SETTINGS has all that may be.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from . import find

OWN = "llama-batched-bench"  # with threads of llama.cpp's own
OPENMP = "llama-batched-bench-openmp"
IK = "ik-llama-batched-bench"
OPENVINO = "openvino_python"  # which runs openvino_bench.py instead


class Setting(NamedTuple):
    """One way to build and set a library."""

    program: str
    flags: tuple[str, ...] = ()
    env: Mapping[str, str] = MappingProxyType({})


# llama.cpp multiplies in one of three ways. Weights of some types are woven at load, unless
# --no-repack; of the others and from 8 rows on it unpacks tiles first, unless
# GGML_CPU_TILED_MM=0; what is left are plain dot products.
UNTILED = {"GGML_CPU_TILED_MM": "0"}
UNIFIED = (
    "--kv-unified",
)  # one pool of cells, as servers have it; else each stream its own
SETTINGS = {
    "repack": Setting(OWN),  # as by default
    "repack-untiled": Setting(OWN, env=UNTILED),
    "tiles": Setting(OWN, ("--no-repack",)),
    "plain": Setting(OWN, ("--no-repack",), UNTILED),
    "no-flash": Setting(OWN, ("--flash-attn", "off")),
    "unified": Setting(OWN, UNIFIED),
    "openmp": Setting(OPENMP),
    "ik": Setting(IK, ("-rtr",)),
    "ik-no-rtr": Setting(IK),
    "openvino": Setting(OPENVINO),
    "openvino-f32": Setting(OPENVINO, ("INFERENCE_PRECISION_HINT=f32",)),
}


@dataclass(frozen=True, slots=True)
class Phases:
    """Tokens of prompts and of outputs, and the time that each took."""

    n_prefill: int = 0
    prefill_s: float = 0.0
    n_decode: int = 0
    decode_s: float = 0.0

    def __add__(self, other: Phases) -> Phases:
        return Phases(
            self.n_prefill + other.n_prefill,
            self.prefill_s + other.prefill_s,
            self.n_decode + other.n_decode,
            self.decode_s + other.decode_s,
        )

    @property
    def prefill_tok_per_s(self) -> float:
        return self.n_prefill / self.prefill_s

    @property
    def decode_tok_per_s(self) -> float:
        return self.n_decode / self.decode_s

    @property
    def tok_per_s(self) -> float:
        return (self.n_prefill + self.n_decode) / (self.prefill_s + self.decode_s)


def batched_bench(
    model: Path,
    *,
    n_prompt: int,
    n_output: int,
    n_slots: int,
    repeats: int,
    n_ctx: int,
    threads: int,
    setting: Setting = SETTINGS["unified"],
) -> Phases:
    """
    Run *repeats* batches of *n_slots* requests; loading is not in the time.

    Of ik_llama.cpp one row of a prompt's batch has logits, of llama.cpp one of each prompt.
    """
    is_ik = setting.program == IK
    command = [
        find(setting.program),
        *("--model", str(model), "--ctx-size", str(n_ctx)),
        *("--threads", str(threads)),
        *("-npp", ",".join([str(n_prompt)] * repeats)),
        *("-ntg", str(n_output), "-npl", str(n_slots)),
        *(() if is_ik else ("--output-format", "jsonl", "--offline")),
        *setting.flags,
    ]
    with tempfile.TemporaryDirectory() as folder:  # of logs that ik_llama.cpp writes
        done = subprocess.run(
            command,
            check=False,
            capture_output=True,
            text=True,
            cwd=folder,
            env=os.environ | dict(setting.env),
        )
    text = done.stdout + done.stderr
    runs = [*(of_table(text) if is_ik else of_lines(text))]
    if done.returncode or len(runs) != repeats:
        raise RuntimeError(
            f"{' '.join(command)} ended with {done.returncode} and {len(runs)} results, "
            f"not {repeats}:\n{text[-2000:]}"
        )
    return sum(runs, Phases())


def of_lines(text: str) -> Iterable[Phases]:
    """Those of the JSON lines of llama.cpp; other lines are its log."""
    for line in text.splitlines():
        if line.startswith("{"):
            run = json.loads(line)
            n_streams = run["pl"]
            yield Phases(
                n_streams * run["pp"], run["t_pp"], n_streams * run["tg"], run["t_tg"]
            )


def of_table(text: str) -> Iterable[Phases]:
    """Those of the table of ik_llama.cpp: PP, TG, B, N_KV, T_PP, S_PP, T_TG, S_TG, T, S."""
    number = r" *([0-9.]+) \|"
    for row in re.finditer(rf"^\|{number * 10}$", text, re.MULTILINE):
        n_prompt, n_output, n_streams = map(int, row.groups()[:3])
        prefill_s, decode_s = float(row[5]), float(row[7])
        yield Phases(n_streams * n_prompt, prefill_s, n_streams * n_output, decode_s)
