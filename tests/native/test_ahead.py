"""Beginning the next step while nobody has asked for it."""

import pytest

from pyllama_raw.native.batch import Batch
from pyllama_raw.native.sampler import RowSampler, RowSamplers
from tests.native.support import generate, make_context, make_prompt

pytestmark = pytest.mark.native


def test_a_step_begun_ahead_is_the_next_one(model):
    """
    Tokens are the same whether steps are begun ahead or the batch is filled each time.
    """
    prompt = make_prompt(9)
    with make_context(model) as context:
        expected = generate(context, prompt, 12, RowSampler())
        context.clear()
        batch, samplers = Batch(64), RowSamplers(1)
        samplers.set(0, RowSampler())
        batch.add(prompt[:-1], 0, 0, False)
        context.decode(batch)
        batch.clear()
        batch.add_rows([prompt[-1]], [len(prompt) - 1], [0])
        found = [
            context.step(batch, samplers, ahead=i < 11).tokens[0] for i in range(12)
        ]

        assert not context.drop()
    assert found == expected


def test_what_was_begun_can_be_dropped(model):
    """
    After drop() the context is free for anything else; the token may be in memory.
    """
    with make_context(model) as context:
        batch, samplers = Batch(64), RowSamplers(1)
        samplers.set(0, RowSampler())
        batch.add_rows([make_prompt(1)[0]], [0], [0])
        context.step(batch, samplers, ahead=True)

        assert context.drop()
        assert not context.drop()
        assert context.seq_pos_max(0) in (0, 1)
        context.seq_rm(0, 1, -1)
        assert context.step(batch, samplers).code == 0


def test_a_context_may_be_closed_over_it(model):
    """
    close() waits for what was begun.
    """
    context = make_context(model)
    batch, samplers = Batch(64), RowSamplers(1)
    samplers.set(0, RowSampler())
    batch.add_rows([make_prompt(1)[0]], [0], [0])
    context.step(batch, samplers, ahead=True)

    context.close()

    assert context.closed
