"""Memory of a process that makes vectors, with a vocabulary as large as they get."""

from pathlib import Path

import numpy as np
import pytest

from pyllama_raw import EmbeddingConfig
from scripts.mutations.gguf_file import read
from tests.native.support import run_python
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

N_VOCAB = 250_000  # as of bge-m3

CODE = """
import anyio, sys
from pathlib import Path
from pyllama_raw import AsyncEngine, ContextConfig, EngineConfig

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith(name)]
    return 1024 * int(line.split()[1])

async def main():
    config = EngineConfig(context=ContextConfig(n_threads=1))
    texts = ["a text and its number %d " % i + "and so on " * (i % 40) for i in range(200)]
    before = status("VmRSS")
    async with AsyncEngine.open(sys.argv[1], config) as engine:
        await engine.embed(texts)
        await engine.embed(texts)
    print(status("VmHWM") - before)

anyio.run(main)
"""


def test_memory_is_weights_and_the_budget_of_a_step(tmp_path: Path):
    """
    A process that embeds 400 texts needs at most the file and 1.5 budgets more than before.
    """
    path = tmp_path / "large.gguf"
    path.write_bytes(with_vocabulary(tiny_model("bert"), N_VOCAB))

    done = run_python(CODE, path)

    assert (done.returncode, done.stderr) == (0, "")
    limit = path.stat().st_size + 1.5 * EmbeddingConfig().max_step_bytes
    assert int(done.stdout) <= limit


def with_vocabulary(path: Path, n_tokens: int) -> bytes:
    """The model with that many tokens; the new ones share a vector."""
    file = read(path)
    tokens = file.values[b"tokenizer.ggml.tokens"].data
    types = file.values[b"tokenizer.ggml.token_type"].data
    n_more = n_tokens - len(tokens)
    file.values[b"bert.vocab_size"].data = n_tokens
    tokens += [b"more-%d" % index for index in range(n_more)]
    types += [1] * n_more
    (table,) = [t for t in file.tensors if t.name == b"token_embd.weight"]
    rows = np.frombuffer(table.data, np.float32).reshape(-1, table.dims[0])
    table.data = np.concatenate([rows, np.repeat(rows[-1:], n_more, 0)]).tobytes()
    table.dims = [table.dims[0], n_tokens]
    return file.encode()
