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
        samplers.set_all([RowSampler()])
        batch.add(prompt[:-1], 0, 0, False)
        context.decode(batch)
        batch.clear()
        batch.add_rows([prompt[-1]], [len(prompt) - 1], [0])
        found = [
            context.step(batch, samplers, ahead=i < 11).tokens[0] for i in range(12)
        ]

        assert not context.drop()
    assert found == expected


def test_behind_prompts_their_rows_go_on(model):
    """
    Of a batch of a token and two prompts only what was sampled is left, a row each.
    """
    prompts = [make_prompt(5, seed) for seed in range(3)]

    def run(ahead: bool) -> list[list[int]]:
        with make_context(model, n_seq_max=3) as context:
            batch, samplers = Batch(64), RowSamplers(3)
            samplers.set_all([RowSampler() for _ in range(3)])
            batch.add_rows([prompts[0][0]], [0], [1])
            batch.add(prompts[1], 0, 0, True)
            batch.add(prompts[2], 0, 2, True)
            found = [context.step(batch, samplers, ahead=ahead).tokens]
            assert batch.is_rows_only == ahead
            if not ahead:
                batch.clear()
                batch.add_rows(found[0], [1, 5, 5], [1, 0, 2])
            found += [context.step(batch, samplers).tokens for _ in range(3)]
            assert not context.drop()
            return found

    assert run(True) == run(False)


def test_a_row_that_fails_leaves_the_batch_alone(model):
    """
    Nothing is begun then.
    """
    with make_context(model, n_seq_max=2) as context:
        batch, samplers = Batch(64), RowSamplers(2)
        closed = RowSampler()
        closed.close()
        samplers.set_all([RowSampler(), closed])
        batch.add(make_prompt(5), 0, 0, True)
        batch.add(make_prompt(4), 0, 1, True)
        outcome = context.step(batch, samplers, ahead=True)

        assert outcome.codes[0] == 0 != outcome.codes[1]
        assert batch.n_tokens == 9
        assert not context.drop()


def test_what_was_begun_can_be_dropped(model):
    """
    After drop() the context is free for anything else; the token may be in memory.
    """
    with make_context(model) as context:
        batch, samplers = Batch(64), RowSamplers(1)
        samplers.set_all([RowSampler()])
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
    samplers.set_all([RowSampler()])
    batch.add_rows([make_prompt(1)[0]], [0], [0])
    context.step(batch, samplers, ahead=True)

    context.close()

    assert context.closed


def test_a_decode_that_fails_ahead_is_told_by_the_next_call(model):
    """
    Here for want of cells: what was sampled before is not lost.
    """
    with make_context(model, n_ctx=256, n_seq_max=1) as context:
        batch, samplers = Batch(256), RowSamplers(1)
        samplers.set_all([RowSampler()])
        batch.add(make_prompt(255), 0, 0, False)
        context.decode(batch)
        batch.clear()
        batch.add_rows([100], [255], [0])
        outcome = context.step(batch, samplers, ahead=True)
        failed = context.step(batch, samplers)

    assert (outcome.code, len(outcome.tokens)) == (0, 1)
    assert (failed.code, failed.tokens, failed.codes) == (1, [], [])
