"""
Every call libllama would end the process on is refused in Python first.

Each group runs in a process of its own, which must end well: exit code 0, one line a
guard with the class of its error.
"""

from pathlib import Path

import numpy as np
import pytest

from tests.native.support import ANY_SLOT, run_python, unlike_before

pytestmark = pytest.mark.native

PREAMBLE = """
import sys
import numpy as np
from pyllama_raw.errors import PyllamaError
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import Context
from pyllama_raw.native.libllama import ffi, last_error, lib
from pyllama_raw.native.model import Model
from pyllama_raw.native.sampler import RowSampler, RowSamplers

def guard(name, call):
    try:
        call()
    except PyllamaError as error:
        print(name, type(error).__name__, error, sep="|", flush=True)
    else:
        print(name, "nothing was refused", "", sep="|", flush=True)

def batch_of(n_tokens, *, slot=0, pos=0, n_outputs=1):
    batch = Batch(4096)
    batch.add([100] * (n_tokens - n_outputs), pos, slot, False)
    for i in range(n_outputs):
        batch.add([100], pos + n_tokens - n_outputs + i, slot, True)
    return batch
"""


def refused(code: str, path: Path) -> dict[str, str]:
    """Name of a guard -> class of its error, in order."""
    done = run_python(PREAMBLE + code, path)
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line.split("|") for line in done.stdout.splitlines()]
    return {line[0]: line[1] for line in lines}


@unlike_before(ANY_SLOT)
def test_batches(model_path):
    """
    Too many tokens or output rows, unknown tokens, slots and positions: InvalidBatch.
    """
    code = """
model = Model.load(sys.argv[1])
for kv_unified in (True, False):
    context = Context(model, n_seq_max=2, n_ctx=1024, n_batch=64, n_ubatch=16,
                      kv_unified=kv_unified)
    u = f" {kv_unified}"
    one = batch_of(1)
    samplers = RowSamplers(8)
    guard("n_batch" + u, lambda: context.decode(batch_of(65)))
    guard("n_batch step" + u, lambda: context.step(batch_of(65), samplers))
    guard("n_outputs" + u, lambda: context.decode(batch_of(8, n_outputs=3)))
    guard("empty" + u, lambda: context.decode(Batch(4)))
    many = batch_of(8, n_outputs=3)
    guard("rows" + u, lambda: context.step(many, samplers))
    two = batch_of(8, n_outputs=2)
    guard("samplers" + u, lambda: context.step(two, RowSamplers(1)))
    guard("slot" + u, lambda: context.decode(batch_of(1, slot=2)))
    guard("slot 255" + u, lambda: context.decode(batch_of(1, slot=255)))
    guard("slot -1" + u, lambda: batch_of(1, slot=-1))
    context.decode(batch_of(4))
    guard("gap" + u, lambda: context.decode(batch_of(1, pos=5)))
    guard("overlap" + u, lambda: context.decode(batch_of(1, pos=2)))
    for token in (-1, model.n_vocab, 2**31 - 1):
        batch = Batch(4)
        batch.add([token], 4, 0, True)
        guard(f"token {token}" + u, lambda: context.decode(batch))
"""
    found = refused(code, model_path)

    assert len(found) == 28
    assert set(found.values()) == {"InvalidBatch"}


def test_slots_and_ranges(model_path):
    """
    Slots outside n_seq_max, partial copies of split memory, shifts beyond 32 bits.
    """
    code = """
model = Model.load(sys.argv[1])
context = Context(model, n_seq_max=2, n_ctx=512, kv_unified=False)
context.decode(batch_of(8))
buffer = np.zeros(context.state_bytes(0), np.uint8)
for slot in (-1, 2, 300, 2**31):
    guard(f"seq_rm {slot}", lambda: context.seq_rm(slot))
    guard(f"seq_cp from {slot}", lambda: context.seq_cp(slot, 0))
    guard(f"seq_cp to {slot}", lambda: context.seq_cp(0, slot))
    guard(f"seq_add {slot}", lambda: context.seq_add(slot, 0, -1, 1))
    guard(f"seq_pos_max {slot}", lambda: context.seq_pos_max(slot))
for slot in (-2, 2, 300, 2**31):  # -1 is all of them
    guard(f"state_bytes {slot}", lambda: context.state_bytes(slot))
    guard(f"capture {slot}", lambda: context.capture(slot, buffer))
    guard(f"restore {slot}", lambda: context.restore(slot, buffer))
guard("p0", lambda: context.seq_rm(0, 2**31, -1))
guard("p1", lambda: context.seq_rm(0, 0, -2))
guard("delta", lambda: context.seq_add(0, 0, -1, 2**31 - 1))
guard("partial cp", lambda: context.seq_cp(0, 1, 2, 5))
guard("partial cp from 1", lambda: context.seq_cp(0, 1, 1, -1))
"""
    found = refused(code, model_path)

    assert len(found) == 37
    assert found.pop("partial cp") == "Unsupported"
    assert found.pop("partial cp from 1") == "Unsupported"
    assert set(found.values()) == {"InvalidRequest"}


def test_contexts(model_path):
    """
    Options libllama aborts on, or that would have the process killed for memory.
    """
    code = """
model = Model.load(sys.argv[1])
def make(**fields):
    n_seq_max = fields.pop("n_seq_max", 2)
    return lambda: Context(model, n_seq_max=n_seq_max, **fields).close()
guard("n_ctx", make(n_ctx=2**31 - 1))
guard("n_ctx split", make(n_ctx=2**31 - 1, kv_unified=False))
guard("n_ubatch", make(n_ctx=2**27, n_batch=2**27, n_ubatch=2**27))
guard("seqs > n_batch", make(n_ctx=512, n_batch=8, n_ubatch=8, n_seq_max=9))
guard("n_seq_max", make(n_seq_max=257))
guard("n_threads", make(n_threads=2**31 - 1))
guard("type_v", make(type_v="q8_0", flash_attn="off"))
guard("vocab", lambda: Context(Model.load(sys.argv[1], vocab_only=True), n_seq_max=1))
overrides = {"llama.attention.key_length": 40}
for fields in ({"type_k": "q8_0"}, {"type_k": "q4_0", "flash_attn": "off"}):
    odd = None
    def odd_heads():
        global odd
        odd = Model.load(sys.argv[1], kv_overrides=overrides)
        Context(odd, n_seq_max=1, **fields)
    guard(f"block size {fields}", odd_heads)
Context(model, n_seq_max=256, n_ctx=256, n_batch=256, n_ubatch=1, n_threads=1).close()
Context(model, n_seq_max=4, n_ctx=1, n_batch=4, n_ubatch=4, n_threads=512).close()
"""
    found = refused(code, model_path)

    assert found.pop("seqs > n_batch") == "ConfigError"
    assert found.pop("n_seq_max") == "ConfigError"
    assert found.pop("n_threads") == "ConfigError"
    blocks = [found.pop(name) for name in list(found) if name.startswith("block")]
    assert set(blocks) <= {"ContextFailed", "ModelLoadFailed"}
    assert set(found.values()) == {"ContextFailed"}


def test_use_after_close_and_exit_with_open_objects(model_path):
    """
    Nothing that was closed reaches C, and a process may end with everything open.
    """
    code = """
model = Model.load(sys.argv[1])
context = Context(model, n_seq_max=2, n_ctx=256)
kept = Context(model, n_seq_max=1, n_ctx=256)
samplers = RowSamplers(2)
closed = RowSampler()
closed.close()
samplers.set_all([closed])
outcome = context.step(batch_of(1), samplers)
assert (outcome.code, outcome.codes[0]) == (0, -1000), outcome
unset = context.step(batch_of(1, pos=1), RowSamplers(1))
assert unset.codes[0] == -1000
vocab = model.vocab
model.close()
context.close()
guard("context", lambda: context.decode(batch_of(1)))
guard("model", lambda: Context(model, n_seq_max=1))
guard("vocab", lambda: vocab.piece(5))
"""
    found = refused(code, model_path)

    assert found == dict.fromkeys(("context", "model", "vocab"), "ClosedError")


def test_the_net_below_the_guards(model_path):
    """
    A failed assertion inside a shim call is an exception with its text, not an abort.
    """
    code = """
model = Model.load(sys.argv[1])
context = Context(model, n_seq_max=2, n_ctx=512, n_batch=8, n_ubatch=8)
batch = batch_of(9)
assert context._run(batch, 0, ffi.NULL, False) == -1000
assert "n_batch" in last_error(), last_error()
context = Context(model, n_seq_max=2, n_ctx=512)
batch = batch_of(9, n_outputs=3)
assert context._run(batch, 0, ffi.NULL, False) == -1000
assert "n_outputs_max" in last_error(), last_error()
print("alive|yes|")
"""
    assert refused(code, model_path) == {"alive": "yes"}


def _damaged(data: bytes, seed: int, n_meta: int) -> bytes:
    """*data* cut off or with some bytes of the metadata changed."""
    chance = np.random.default_rng(seed)
    if seed % 3 == 0:
        return data[: chance.integers(n_meta)]
    changed = np.frombuffer(data, np.uint8).copy()
    n_bytes = chance.choice([1, 2, 8])
    changed[chance.integers(n_meta, size=n_bytes)] = chance.integers(256, size=n_bytes)
    return changed.tobytes()


def test_damaged_files(model_path, tmp_path):
    """
    Cut off and changed files either load or are ModelLoadFailed; none ends the process.
    """
    n_meta = 64 * 1024  # keys, and the start of the vocabulary
    with model_path.open("rb") as stream:
        data = stream.read(4 * 1024 * 1024)
    for seed in range(24):
        damaged = tmp_path / f"{seed}.gguf"
        damaged.write_bytes(_damaged(data, seed, n_meta))
    code = """
from pathlib import Path
for path in sorted(Path(sys.argv[1]).glob("*.gguf")):
    for vocab_only in (True, False):
        guard(f"{path.name} {vocab_only}",
              lambda: Model.load(path, vocab_only=vocab_only).close())
"""
    found = refused(code, tmp_path)

    assert len(found) == 48
    assert set(found.values()) <= {"ModelLoadFailed", "nothing was refused"}
    assert all(found[f"{s}.gguf True"] == "ModelLoadFailed" for s in range(0, 24, 3))
