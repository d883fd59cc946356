"""Snapshots of a slot: captured, restored, and equal to what was computed."""

import numpy as np
import pytest

from pyllama_raw.errors import SnapshotFailed
from pyllama_raw.native.context import Context
from tests.native.support import (
    EXACT,
    last_logits,
    make_context,
    make_prompt,
    prefill,
    run_python,
)
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native


def capture(context: Context, slot: int) -> np.ndarray:
    out = np.zeros(context.state_bytes(slot), np.uint8)
    assert context.capture(slot, out) == len(out)
    return out


def test_a_restored_slot_goes_on_bit_for_bit(model):
    """
    Captured, cleared and restored into another slot, the next logits are the same.
    """
    prompt, more = make_prompt(40), make_prompt(5, seed=1)
    with make_context(model, **EXACT) as context:
        prefill(context, prompt)
        snapshot = capture(context, 0)
        plain = last_logits(context, more, pos=40)
        context.clear()
        assert context.restore(3, snapshot) == len(snapshot)

        assert context.seq_pos_max(3) == 39
        assert np.array_equal(last_logits(context, more, slot=3, pos=40), plain)


def test_a_capture_leaves_the_slot_alone(model):
    """
    Capturing changes no logits and no position.
    """
    prompt, more = make_prompt(20), make_prompt(4, seed=1)
    with make_context(model, **EXACT) as context:
        prefill(context, prompt, slot=0)
        prefill(context, prompt, slot=1)
        capture(context, 1)

        first = last_logits(context, more, slot=0, pos=20)
        assert np.array_equal(first, last_logits(context, more, slot=1, pos=20))


def test_a_trimmed_snapshot_is_its_prefix(model):
    """
    What is trimmed after a restore equals a shorter prompt: attention keeps positions.
    """
    prompt, more = make_prompt(32), make_prompt(6, seed=1)
    with make_context(model, **EXACT) as context:
        prefill(context, prompt[:20])
        plain = last_logits(context, more, pos=20)
        context.clear()
        prefill(context, prompt)
        snapshot = capture(context, 0)
        context.restore(1, snapshot)
        assert context.seq_rm(1, 20)

        assert np.array_equal(last_logits(context, more, slot=1, pos=20), plain)


def test_a_range_can_be_captured_alone_in_unified_memory(model):
    """
    slot -> scratch by seq_cp of a range, captured; restored to scratch and copied back,
    the pieces make the whole again.
    """
    prompt, more = make_prompt(48), make_prompt(5, seed=1)
    slot, scratch, other = 0, 3, 1
    with make_context(model, flash_attn="off") as context:
        prefill(context, prompt, slot=slot)
        edges = []
        for p0 in range(0, 48, 16):
            context.seq_cp(slot, scratch, p0, p0 + 16)
            edges.append(capture(context, scratch))
            context.seq_rm(scratch)
        plain = last_logits(context, more, slot=slot, pos=48)
        context.clear()
        for edge in edges:
            context.restore(scratch, edge)
            context.seq_cp(scratch, other)
            context.seq_rm(scratch)

        assert len({len(edge) for edge in edges}) == 1
        assert context.seq_pos_max(other) == 47
        restored = last_logits(context, more, slot=other, pos=48)
        assert np.array_equal(restored, plain)


def test_bytes_grow_with_tokens(model):
    """
    state_bytes is what capture writes, about the same for every token.
    """
    with make_context(model) as context:
        sizes = []
        for n in range(1, 4):
            context.clear()
            prefill(context, make_prompt(n * 32))
            sizes.append(context.state_bytes(0))
        steps = np.diff(sizes)

        assert steps[0] == steps[1] > 0


def test_an_empty_slot_has_no_snapshot(model):
    """
    Capturing nothing is an error: a snapshot stands for at least one position.
    """
    with make_context(model) as context:
        with pytest.raises(SnapshotFailed, match="slot 2 is empty"):
            context.capture(2, np.zeros(1000, np.uint8))


def test_a_buffer_too_small_is_refused(model):
    """
    Nothing is written beyond the end of the array.
    """
    with make_context(model) as context:
        prefill(context, make_prompt(10))
        out = np.zeros(context.state_bytes(0), np.uint8)
        with pytest.raises(SnapshotFailed):
            context.capture(0, out[: len(out) // 2])
        assert not out[len(out) // 2 :].any()


@pytest.mark.parametrize(
    "out",
    [
        np.zeros(10**6, np.float32),
        np.zeros((1000, 1000), np.uint8),
        np.zeros(10**6, np.uint8)[::2],
    ],
)
def test_only_plain_byte_arrays_are_written(model, out):
    """
    Another dtype, shape or layout never reaches C.
    """
    with make_context(model) as context:
        prefill(context, make_prompt(2))
        with pytest.raises(TypeError, match="contiguous"):
            context.capture(0, out)


def test_read_only_arrays_are_not_written(model):
    """
    capture() refuses memory that must not change; restore() reads it.
    """
    with make_context(model) as context:
        prefill(context, make_prompt(2))
        data = capture(context, 0)
        data.flags.writeable = False
        with pytest.raises((BufferError, ValueError, TypeError)):
            context.capture(0, data)
        assert context.restore(1, data) == len(data)


@pytest.mark.parametrize("damage", ["cut", "changed", "empty"])
def test_a_damaged_snapshot_leaves_an_empty_slot(model, damage):
    """
    What does not restore is SnapshotFailed; the slot can be computed again.
    """
    with make_context(model) as context:
        prefill(context, make_prompt(10))
        data = capture(context, 0)
        if damage == "changed":
            data[:16] = 255
        data = {"cut": data[:-7], "empty": data[:0]}.get(damage, data)
        prefill(context, make_prompt(3), slot=1)
        with pytest.raises(SnapshotFailed):
            context.restore(1, data)

        assert context.seq_pos_max(1) is None
        prefill(context, make_prompt(3), slot=1)
        assert context.seq_pos_max(0) == 9


def test_a_snapshot_needs_free_cells(model):
    """
    Too little room fails the restore and touches no other slot.
    """
    with make_context(model, n_ctx=256) as context:
        prefill(context, make_prompt(150))
        data = capture(context, 0)
        with pytest.raises(SnapshotFailed):
            context.restore(1, data)

        assert (context.seq_pos_max(0), context.seq_pos_max(1)) == (149, None)


FORGED = """
import resource, sys
from array import array
resource.setrlimit(resource.RLIMIT_AS, (2**33, 2**33))  # of the machine that runs this
import numpy as np
from pyllama_raw.errors import SnapshotFailed
from pyllama_raw.native.model import Model
from tests.native.support import make_context, prefill
from tests.native.test_state import capture

with Model.load(sys.argv[1]) as model, make_context(model, n_ctx=64) as context:
    prefill(context, array("i", [5, 6, 7]))
    words = capture(context, 0).view(np.uint32)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for i in range(len(words)):
        kept, words[i] = words[i], 2**26
        try:
            context.restore(1, words.view(np.uint8))
        except SnapshotFailed:
            pass
        words[i] = kept
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("name", ["llama", "gemma3", "mamba"])
def test_a_forged_number_of_cells_takes_no_memory(name):
    """
    Whatever number a state has in place of another one: room for 2**26 cells takes more than a GB.
    """
    child = run_python(FORGED, tiny_model(name))

    assert child.returncode == 0, child.stderr
    assert int(child.stdout) < 200_000  # kB
