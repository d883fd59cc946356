"""What the machine can do at most, measured on the spot, and what a model asks of it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
from collections import Counter
from math import prod
from pathlib import Path
from typing import NamedTuple, Self

from pyllama_raw.native.gguf import TensorInfo, read_header
from pyllama_raw.native.libllama import lib, text

PROBE = Path(__file__).with_name("limits.cpp")
FLAGS = ("-O3", "-std=c++17", "-pthread")
INSTRUCTIONS = {  # of levels of CPUs and of our kernels, as a compiler names them
    "sse42": ("-msse4.2",),
    "avx2": ("-mavx2",),
    "avxvnni": ("-mavx2", "-mavxvnni"),
    "avx512vnni": ("-mavx512bw", "-mavx512vnni"),
}


class Limits(NamedTuple):
    """Rates of all threads together."""

    instructions: str  # that multiply bytes; empty: none are known for this CPU
    int8_gops: float  # a multiplication and an addition are two operations
    read_gb_per_s: float


def limits(threads: int, level: str | None = None) -> Limits:
    """
    Build and run the probe, which takes some seconds.

    Args:
        level: one of INSTRUCTIONS, of which no more may be used; any other name, or None: all.

    Raises:
        CalledProcessError, OSError: there is no C++ compiler, or the probe failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "limits")
        compiler = shlex.split(os.environ.get("CXX") or "c++")
        flags = [*FLAGS, *INSTRUCTIONS.get(level or "", ["-march=native"])]
        subprocess.run([*compiler, *flags, str(PROBE), "-o", program], check=True)
        command = [program, str(threads)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Limits(**json.loads(done.stdout))


class Weights(NamedTuple):
    """Matrices of a dense model, all of which a step reads."""

    n_layers: int  # numbers that each token is multiplied by
    n_output: int  # numbers that each row of logits is made by
    n_bytes: int  # of both
    type_name: str  # that most of them have

    @classmethod
    def of(cls, model: Path) -> Self:
        """Those of the file *model*; without an output matrix its embeddings make logits."""
        tensors = {
            t.name: t for t in read_header(str(model)).tensors if len(t.dims) > 1
        }
        layers = [t for name, t in tensors.items() if name.startswith("blk.")]
        output = tensors.get("output.weight", tensors["token_embd.weight"])
        sizes = Counter[int]()
        for tensor in layers:
            sizes[tensor.type] += prod(tensor.dims)
        return cls(
            sizes.total(),
            prod(output.dims),
            sum(map(n_bytes, [*layers, output])),
            text(lib.ggml_type_name(sizes.most_common(1)[0][0])).upper(),
        )

    def gops(self, n_tokens: int, n_rows: int) -> float:
        """Operations in billions of *n_tokens* tokens with *n_rows* rows of logits."""
        return 2e-9 * (n_tokens * self.n_layers + n_rows * self.n_output)


def n_bytes(tensor: TensorInfo) -> int:
    """Of its data in the file."""
    width, *rows = tensor.dims
    return int(lib.ggml_row_size(tensor.type, width)) * prod(rows)
