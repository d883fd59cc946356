"""What a context reads for its decoder, and what it refuses to."""

from array import array

import numpy as np
import pytest

from pyllama_raw.engine.layout import measure_sources
from pyllama_raw.errors import InvalidBatch, Unsupported
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import AbortFlag, Context
from pyllama_raw.native.model import Model
from tests.native.support import make_context
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

SOURCES = [40, 41, 42, 43, 44, 45], [70, 71, 72], [90, 91]
CLOSE = 1e-3  # of logits whose deviation is 3: all sums are in 32 bits, with ReLU
EXACT = {"type_k": "f32", "type_v": "f32", "flash_attn": "off", "n_ubatch": 64}


@pytest.fixture(scope="module")
def t5():
    with Model.load(tiny_model("t5")) as model:
        yield model


def read(context: Context, sources, pos=0) -> int:
    """Have *sources*, by slot, read from *pos* on."""
    batch = Batch(256)
    for slot, source in sources.items():
        batch.add_scored(source, pos, slot)
    return context.read_sources(batch).code


def decode(context: Context, tokens, pos) -> list[np.ndarray]:
    """The row of each of *tokens*, by slot."""
    batch = Batch(16)
    for (slot, token), at in zip(tokens.items(), pos, strict=True):
        batch.add([token], at, slot, True)
    context.decode(batch)
    return [np.array(context.logits(row)) for row in range(len(tokens))]


def alone(t5, slot, tokens) -> list[np.ndarray]:
    """Rows of a slot that has the context for itself."""
    with make_context(t5, n_seq_max=4, **EXACT) as context:
        assert read(context, {slot: SOURCES[slot]}) == 0
        return [
            decode(context, {slot: token}, [pos])[0] for pos, token in enumerate(tokens)
        ]


def test_slots_see_their_own_sources(t5):
    """
    Sources that are read together are those of their slots, as alone.
    """
    start = t5.decoder_start
    with make_context(t5, n_seq_max=4, **EXACT) as context:
        assert read(context, dict(enumerate(SOURCES))) == 0

        rows = decode(context, {0: start, 1: start, 2: start}, [0, 0, 0])

    expected = [alone(t5, slot, [start])[0] for slot in range(3)]
    assert np.abs(np.array(rows) - expected).max() < CLOSE
    assert np.abs(rows[0] - rows[1]).max() > 1


def test_a_slot_goes_on_when_its_source_is_read_again(t5):
    """
    A newcomer joins by a read of all sources, each behind what its slot holds.
    """
    start = t5.decoder_start
    with make_context(t5, n_seq_max=4, **EXACT) as context:
        assert read(context, {0: SOURCES[0]}) == 0
        decode(context, {0: start}, [0])
        batch = Batch(64)
        batch.add_scored(SOURCES[0], 1, 0)
        batch.add_scored(SOURCES[1], 0, 1)
        assert context.read_sources(batch).code == 0

        rows = decode(context, {0: 50, 1: start}, [1, 0])

    expected = [alone(t5, 0, [start, 50])[1], alone(t5, 1, [start])[0]]
    assert np.abs(np.array(rows) - expected).max() < CLOSE


@pytest.mark.parametrize("bad", [{0: [10**6]}, {0: [-1]}])
def test_a_read_that_is_refused_changes_nothing(t5, bad):
    """
    Decodes see what they saw before.
    """
    start = t5.decoder_start
    with make_context(t5, n_seq_max=4, **EXACT) as context:
        assert read(context, {0: SOURCES[0]}) == 0
        code = read(context, bad)

        rows = decode(context, {0: start}, [0])

    assert code == -1
    assert np.abs(rows[0] - alone(t5, 0, [start])[0]).max() == 0


def test_a_read_that_is_aborted_changes_nothing(t5):
    """
    Decodes see what they saw before, and the next read works.
    """
    start = t5.decoder_start
    with AbortFlag() as flag, make_context(t5, n_seq_max=4, abort=flag, **EXACT) as c:
        assert read(c, {0: SOURCES[0]}) == 0
        flag.set()
        code = read(c, {1: SOURCES[1]})
        flag.clear()

        rows = decode(c, {0: start}, [0])
        assert read(c, {1: SOURCES[1]}) == 0

    assert code == 2
    assert np.abs(rows[0] - alone(t5, 0, [start])[0]).max() == 0


def test_sources_that_would_abort_are_refused(t5, model):
    """
    None, more than a graph has room for, and those of a model without an encoder.
    """
    with make_context(t5, n_seq_max=4, **EXACT) as context:
        with pytest.raises(InvalidBatch, match="65 tokens, 1 to 64 are allowed"):
            read(context, {0: [40] * 65})
        with pytest.raises(InvalidBatch, match="0 tokens"):
            read(context, {})
    with (
        make_context(model, n_seq_max=1) as context,
        pytest.raises(InvalidBatch, match="reads no sources"),
    ):
        read(context, {0: [40]})


def test_a_source_may_be_longer_than_texts_in_training():
    """
    Its length is that of a graph: positions are only compared with each other.
    """
    source = array("i", range(40, 240))
    rows = []
    for n_ctx_train in (64, 2048):
        overrides = {"t5.context_length": n_ctx_train}
        with Model.load(tiny_model("t5"), kv_overrides=overrides) as model:
            with make_context(model, n_seq_max=2, n_ubatch=256) as context:
                assert read(context, {0: source}) == 0
                rows += decode(context, {0: model.decoder_start}, [0])

    assert np.array_equal(*rows)


@pytest.mark.parametrize("n_seq_max", [1, 2, 8])
def test_a_probe_leaves_an_empty_context(t5, n_seq_max):
    """
    It tells what a slot costs, and nothing is left of it.
    """
    with make_context(t5, n_seq_max=n_seq_max) as context:
        cost = measure_sources(context, t5.decoder_start)
        n_left = [context.seq_pos_max(slot) for slot in range(n_seq_max)]

    assert n_left == [None] * n_seq_max
    assert cost.token_bytes >= 2 * 2 * 2 * t5.n_embd  # keys and values, layers, f16


def test_a_model_without_numbers_is_refused(t5, monkeypatch):
    """
    A model that computes none would answer with anything.
    """
    with make_context(t5, n_seq_max=2) as context:
        monkeypatch.setattr(context, "logits", lambda row: array("f", [float("nan")]))

        with pytest.raises(Unsupported, match="no numbers"):
            measure_sources(context, t5.decoder_start)
