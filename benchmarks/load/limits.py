"""What the machine can do at most, measured on the spot, and what a model asks of it."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import tempfile
from math import prod
from pathlib import Path
from typing import NamedTuple, Self

from pyllama_raw.native.gguf import TensorInfo, read_header
from pyllama_raw.native.libllama import lib

PROBE = Path(__file__).with_name("limits.cpp")
FLAGS = ("-O3", "-std=c++17", "-pthread")


class Limits(NamedTuple):
    """Rates of all threads together."""

    instructions: str  # that multiply bytes; empty: none are known for this CPU
    int8_gops: float  # a multiplication and an addition are two operations
    read_gb_per_s: float


def limits(threads: int, *instructions: str) -> Limits:
    """
    Build and run the probe, which takes some seconds.

    Args:
        instructions: options of the compiler for those of the CPU that may be used; none: all.

    Raises:
        CalledProcessError, OSError: there is no C++ compiler, or the probe failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = str(Path(folder) / "limits")
        compiler = shlex.split(os.environ.get("CXX") or "c++")
        flags = [*FLAGS, *(instructions or ["-march=native"])]
        subprocess.run([*compiler, *flags, str(PROBE), "-o", program], check=True)
        command = [program, str(threads)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    return Limits(**json.loads(done.stdout))


class Weights(NamedTuple):
    """Matrices of a dense model, all of which a step reads."""

    n_layers: int  # numbers that each token is multiplied by
    n_output: int  # numbers that each row of logits is made by
    n_bytes: int  # of both

    @classmethod
    def of(cls, model: Path) -> Self:
        """Those of the file *model*; without an output matrix its embeddings make logits."""
        tensors = {
            t.name: t for t in read_header(str(model)).tensors if len(t.dims) > 1
        }
        layers = [t for name, t in tensors.items() if name.startswith("blk.")]
        output = tensors.get("output.weight", tensors["token_embd.weight"])
        return cls(
            sum(prod(tensor.dims) for tensor in layers),
            prod(output.dims),
            sum(map(n_bytes, [*layers, output])),
        )

    def gops(self, n_tokens: int, n_rows: int) -> float:
        """Operations in billions of *n_tokens* tokens with *n_rows* rows of logits."""
        return 2e-9 * (n_tokens * self.n_layers + n_rows * self.n_output)


def n_bytes(tensor: TensorInfo) -> int:
    """Of its data in the file."""
    width, *rows = tensor.dims
    return int(lib.ggml_row_size(tensor.type, width)) * prod(rows)
