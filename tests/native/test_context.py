"""Computing batches: real limits, codes, output rows, the abort flag."""

import threading
from array import array

import numpy as np
import pytest

from pyllama_raw.errors import (
    ClosedError,
    ConfigError,
    ContextFailed,
    DecodeAborted,
    InvalidBatch,
    InvalidRequest,
    NoKVSpace,
    Unsupported,
)
from pyllama_raw.native.batch import Batch
from pyllama_raw.native.context import AbortFlag
from pyllama_raw.native.libllama import lib
from pyllama_raw.native.sampler import RowSampler, RowSamplers
from tests.native.support import (
    ANY_SLOT,
    EXACT,
    generate,
    last_logits,
    make_context,
    make_prompt,
    prefill,
    unlike_before,
)

pytestmark = pytest.mark.native


def test_real_values_are_read_back(model):
    """
    libllama pads n_ctx and caps n_batch; the context tells what it has.
    """
    with make_context(model, n_ctx=300, n_batch=2048, n_ubatch=512) as unified:
        assert (unified.n_ctx, unified.n_ctx_seq) == (512, 512)
        assert (unified.n_batch, unified.n_ubatch, unified.max_tokens) == (300,) * 3
    with make_context(model, n_ctx=1100, kv_unified=False) as split:
        assert (split.n_ctx, split.n_ctx_seq) == (2048, 512)
        assert (split.n_seq_max, split.kv_unified) == (4, False)


def test_memory_is_told_by_slot(model):
    """
    Positions of a slot count what was computed for it and nothing else.
    """
    with make_context(model) as context:
        assert context.has_memory
        assert context.can_shift
        assert context.seq_pos_max(1) is None
        prefill(context, make_prompt(7), slot=1)
        assert context.seq_pos_max(1) == 6
        assert context.seq_rm(1, 4) is True
        assert context.seq_pos_max(1) == 3
        context.clear()
        assert context.seq_pos_max(1) is None


@pytest.mark.parametrize("kv_unified", [True, False])
def test_slots_do_not_see_each_other(model, kv_unified):
    """
    Greedy tokens of a prompt are the same alone and with another prompt in the batch.
    """
    prompts = [make_prompt(9, seed) for seed in (1, 2)]
    with make_context(model, kv_unified=kv_unified, flash_attn="off") as context:
        alone = [generate(context, p, 1, RowSampler())[0] for p in prompts[:1]]
        context.clear()
        alone += generate(context, prompts[1], 1, RowSampler())
        context.clear()
        batch, samplers = Batch(64), RowSamplers(2)
        samplers.set_all([RowSampler(), RowSampler()])
        for slot, prompt in enumerate(prompts):
            batch.add(prompt, 0, slot, True)

        outcome = context.step(batch, samplers)

        assert batch.rows[: batch.n_rows].tolist() == [8, 17]
        assert (outcome.code, outcome.codes) == (0, [])
        assert outcome.tokens == alone
        assert outcome.decode_ns > 0
        assert outcome.sample_ns > 0


def test_step_is_decode_and_argmax(model):
    """
    The token of a greedy row is the largest logit of that row.
    """
    with make_context(model) as context:
        prompt = make_prompt(12)
        token = generate(context, prompt, 1, RowSampler())[0]

        assert token == int(np.asarray(context.logits(11)).argmax())


def test_chunked_prefill_is_exact_in_the_deterministic_layout(model):
    """
    With split KV and no flash attention, logits do not depend on how a prompt is cut, as
    long as no chunk is a single token: ggml multiplies by one column with other code.
    """
    prompt = make_prompt(60)
    with make_context(model, **EXACT) as context:
        whole = last_logits(context, prompt)
        context.clear()
        for start in range(0, 56, 7):
            prefill(context, prompt[start : start + 7], pos=start)
        cut = last_logits(context, prompt[56:], pos=56)

        assert np.array_equal(whole, cut)


def test_no_room_changes_nothing(model):
    """
    Code 1 leaves every slot as it was, and the context usable.
    """
    with make_context(model, n_ctx=256) as context:
        prefill(context, make_prompt(200))
        with pytest.raises(NoKVSpace) as caught:
            prefill(context, make_prompt(100), slot=1)

        assert caught.value.returned == 1
        assert (context.seq_pos_max(0), context.seq_pos_max(1)) == (199, None)
        context.seq_rm(0)
        prefill(context, make_prompt(100), slot=1)
        assert context.seq_pos_max(1) == 99


@pytest.mark.parametrize(
    ("token", "pos", "slot"),
    [
        (-5, 0, 0),
        (10**6, 0, 0),
        (5, 3, 0),
        pytest.param(5, 0, 200, marks=unlike_before(ANY_SLOT)),
    ],
)
def test_libllama_refuses_what_it_checks_itself(model, token, pos, slot):
    """
    Unknown tokens, gaps of positions and slots beyond n_seq_max are InvalidBatch.
    """
    with make_context(model) as context:
        prefill(context, make_prompt(2))
        batch = Batch(4)
        batch.add([token], pos, slot, True)
        with pytest.raises(InvalidBatch) as caught:
            context.decode(batch)

        assert caught.value.returned == -1
        assert context.seq_pos_max(0) == 1


def test_a_set_abort_flag_stops_a_decode(model):
    """
    While the flag is set a decode ends with code 2; cleared, it works again.
    """
    with AbortFlag() as abort, make_context(model, abort=abort) as context:
        abort.set()
        with pytest.raises(DecodeAborted):
            prefill(context, make_prompt(64))
        abort.clear()
        context.clear()
        prefill(context, make_prompt(64))

        assert context.seq_pos_max(0) == 63


def test_the_abort_flag_works_from_another_thread(model):
    """
    A decode that runs is stopped by another thread: the GIL is free meanwhile.
    """
    with (
        AbortFlag() as abort,
        make_context(model, abort=abort, n_ctx=4096, n_batch=4096) as context,
    ):
        setter = threading.Timer(0.05, abort.set)
        setter.start()
        with pytest.raises(DecodeAborted):
            prefill(context, make_prompt(4000))
        setter.join()


def test_an_abort_flag_outlives_its_close_in_a_context(model):
    """
    The flag is freed after the context, so libllama never reads freed memory.
    """
    abort = AbortFlag()
    with make_context(model, abort=abort) as context:
        abort.close()
        prefill(context, make_prompt(3))
        assert context.seq_pos_max(0) == 2


def test_logits_are_a_copy_of_an_output_row(model):
    """
    logits() gives [n_vocab] floats that later steps leave alone; other rows are refused.
    """
    with make_context(model) as context:
        first = last_logits(context, make_prompt(3))
        kept = first.copy()
        prefill(context, make_prompt(3), slot=1)

        assert first.shape == (model.n_vocab,)
        assert np.array_equal(first, kept)
        for row in (0, -1, 3, 10**9):
            with pytest.raises(InvalidRequest, match="row"):
                context.logits(row)


def test_a_row_that_is_no_output_fails_alone(model):
    """
    A wrong row or a closed sampler is a code of that row; the others are sampled.
    """
    with make_context(model) as context:
        batch, samplers = Batch(8), RowSamplers(4)
        batch.add(make_prompt(3), 0, 0, True)
        batch.add(make_prompt(3), 0, 1, True)
        closed = RowSampler()
        closed.close()
        samplers.set_all([RowSampler(), RowSampler(), closed])
        batch.n_rows = 4
        batch.rows[:4] = array("i", [0, 2, 5, -1])

        outcome = context.step(batch, samplers)

        assert outcome.code == 0
        assert [code == 0 for code in outcome.codes] == [False, True, False, False]
        assert [token >= 0 for token in outcome.tokens] == [False, True, False, False]


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"n_seq_max": 0}, ConfigError, "n_seq_max=0"),
        ({"n_seq_max": 257}, ConfigError, "n_seq_max=257 .* 1 to 256"),
        ({"n_ctx": 0}, ConfigError, "n_ctx=0"),
        ({"n_ctx": 2**31}, ConfigError, "n_ctx=2147483648"),
        ({"n_ctx": 2**31 - 1}, ContextFailed, r"n_ctx=2147483647 .*type_k=f16"),
        ({"n_batch": 2}, ConfigError, "n_batch=2 has no room .* n_seq_max=4"),
        ({"n_threads": 513}, ConfigError, "n_threads=513"),
        ({"n_threads_batch": 0}, ConfigError, "n_threads_batch=0"),
        ({"type_k": "q9_9"}, ConfigError, "type_k='q9_9'"),
        ({"flash_attn": "maybe"}, ConfigError, "flash_attn='maybe'"),
        ({"rope_scaling": "x"}, ConfigError, "rope_scaling='x'"),
        ({"n_cats": 1}, ConfigError, "unknown context options: n_cats"),
        ({"type_v": "q4_0", "flash_attn": "off"}, ContextFailed, "flash_attn"),
    ],
)
def test_impossible_contexts_are_refused(model, fields, error, message):
    """
    What C would truncate, abort on or never get the memory for names value and knob.
    """
    with pytest.raises(error, match=message):
        make_context(model, **fields)


@pytest.mark.parametrize("kv_type", ["f32", "bf16", "q8_0", "q4_0", "iq4_nl", "q5_1"])
def test_every_kv_type_computes(model, kv_type):
    """
    All KV types the configuration offers work on the CPU (quantised V by flash attention).
    """
    with make_context(model, n_ctx=256, type_k=kv_type, type_v=kv_type) as context:
        assert np.isfinite(last_logits(context, make_prompt(5))).all()


def test_threads_can_be_changed(model):
    """
    set_threads takes effect at once, within the limits of ggml.
    """
    with make_context(model) as context:
        context.set_threads(1, 2)
        assert lib.llama_n_threads(context.ptr) == 1
        assert lib.llama_n_threads_batch(context.ptr) == 2
        with pytest.raises(ConfigError, match="n_threads=0"):
            context.set_threads(0, 1)


def test_a_closed_context_is_refused(model):
    """
    After close() every use is ClosedError.
    """
    context = make_context(model)
    batch = Batch(4)
    batch.add([5], 0, 0, True)
    context.close()

    for use in (
        lambda: context.decode(batch),
        lambda: context.step(batch, RowSamplers(1)),
        lambda: context.logits(0),
        lambda: context.seq_rm(0),
        lambda: context.state_bytes(0),
        lambda: context.set_threads(1, 1),
    ):
        with pytest.raises(ClosedError):
            use()


def test_split_kv_copies_whole_slots_only(model):
    """
    Without kv_unified a part of a slot cannot be copied: Unsupported names the knob.
    """
    with make_context(model, kv_unified=False) as context:
        prefill(context, make_prompt(5))
        with pytest.raises(Unsupported, match="kv_unified"):
            context.seq_cp(0, 1, 0, 3)
        context.seq_cp(0, 1)

        assert context.seq_pos_max(1) == 4


def test_a_shift_moves_positions(model):
    """
    seq_rm and seq_add close a gap; the slot goes on from there.
    """
    with make_context(model) as context:
        prefill(context, make_prompt(20))
        context.seq_rm(0, 4, 10)
        context.seq_add(0, 10, -1, -6)

        assert context.seq_pos_max(0) == 13
        prefill(context, make_prompt(1), pos=14)
        assert context.seq_pos_max(0) == 14
