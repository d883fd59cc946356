"""Beginning the next step while nobody has asked for it."""

from contextlib import contextmanager

import pytest

from pyllama_raw.native.batch import Batch
from pyllama_raw.native.sampler import RowSampler, RowSamplers
from pyllama_raw.native.step_run import MAX_STEPS, StepRun
from tests.native.support import generate, make_context, make_prompt

pytestmark = pytest.mark.native

N_VOCAB = 49_152  # of the model


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


def test_behind_prompts_their_rows_go_on(model):
    """
    Of a batch of a token and two prompts only what was sampled is left, a row each.
    """
    prompts = [make_prompt(5, seed) for seed in range(3)]

    def run(ahead: bool) -> list[list[int]]:
        with make_context(model, n_seq_max=3) as context:
            batch, samplers = Batch(64), RowSamplers(3)
            for row in range(3):
                samplers.set(row, RowSampler())
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
        samplers.set(0, RowSampler())
        closed = RowSampler()
        closed.close()
        samplers.set(1, closed)
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


def run_of(n_steps: int, max_s: float = 60.0, *, tells: bool = False) -> StepRun:
    run = StepRun(N_VOCAB, max_s)
    run.limit(n_steps)
    run.tell_each(tells)
    return run


@contextmanager
def one_stream(model):
    """A context with one token in slot 0, and its next batch."""
    with make_context(model) as context:
        batch, samplers = Batch(64), RowSamplers(1)
        samplers.set(0, RowSampler())
        batch.add_rows([make_prompt(1)[0]], [0], [0])
        yield context, batch, samplers


def test_several_steps_are_those_one_by_one(model):
    """
    One call, its tokens in order; the next call goes on behind them.
    """
    with one_stream(model) as (context, batch, samplers):
        expected = [
            context.step(batch, samplers, ahead=i < 11).tokens[0] for i in range(12)
        ]
    with one_stream(model) as (context, batch, samplers):
        first = context.step(batch, samplers, ahead=True, run=run_of(8))
        rest = context.step(batch, samplers, ahead=True, run=run_of(4))

        assert (first.n_steps, rest.n_steps) == (8, 4)
        assert first.tokens + rest.tokens == expected
        assert context.drop()


def test_a_call_has_a_limit():
    """
    There is room for the tokens of so many steps.
    """
    assert run_of(MAX_STEPS + 1).raw.n_steps == MAX_STEPS
    assert run_of(-1).raw.n_steps == 1


@pytest.mark.parametrize("what", ["end", "interrupt", "time"])
def test_a_call_ends_early(model, what):
    """
    At a token that ends a request, if somebody interrupts, and after its time.
    """
    run = run_of(8, max_s=0.0 if what == "time" else 60.0)
    with one_stream(model) as (context, batch, samplers):
        tokens = context.step(batch, samplers, ahead=True, run=run_of(8)).tokens
        context.drop()
    end = next(t for t in tokens if t != tokens[0])
    if what == "end":
        run.add_ends([end, end])
        run.remove_ends([end])
    if what == "interrupt":
        run.interrupt()
    with one_stream(model) as (context, batch, samplers):
        found = context.step(batch, samplers, ahead=True, run=run).tokens
        context.drop()

    assert found == tokens[: tokens.index(end) + 1 if what == "end" else 1]


def test_an_interrupt_is_taken_back(model):
    """
    As is the last user's token.
    """
    run = run_of(3)
    run.interrupt()
    run.resume()
    run.add_ends(range(N_VOCAB))
    run.remove_ends(range(N_VOCAB))
    with one_stream(model) as (context, batch, samplers):
        assert context.step(batch, samplers, ahead=True, run=run).n_steps == 3
        context.drop()


@contextmanager
def room_for_four(model):
    """A context with cells for four steps of slot 0, and the first batch of them."""
    with make_context(model, n_ctx=256, n_seq_max=1) as context:
        batch, samplers = Batch(256), RowSamplers(1)
        samplers.set(0, RowSampler())
        batch.add(make_prompt(252), 0, 0, False)
        context.decode(batch)
        batch.clear()
        batch.add_rows([100], [252], [0])
        yield context, batch, samplers


def test_a_decode_that_fails_later_is_told_by_the_next_call(model):
    """
    Here for want of cells: what was sampled before is not lost.
    """
    with room_for_four(model) as (context, batch, samplers):
        outcome = context.step(batch, samplers, ahead=True, run=run_of(8))

        assert (outcome.code, outcome.n_steps, len(outcome.tokens)) == (0, 4, 4)
        failed = context.step(batch, samplers)
        assert (failed.code, failed.tokens, failed.n_steps) == (1, [], 0)


def to_the_end(context, batch, outcome) -> list:
    """All outcomes of a call."""
    outcomes = [outcome]
    while outcomes[-1].goes_on:
        outcomes.append(context.more(batch))
    return outcomes


def test_a_call_tells_of_each_step(model):
    """
    In order, each once, with the time it took; the next call goes on behind them.
    """
    with one_stream(model) as (context, batch, samplers):
        expected = context.step(batch, samplers, ahead=True, run=run_of(20)).tokens
        context.drop()
    with one_stream(model) as (context, batch, samplers):
        run = run_of(8, tells=True)
        first = context.step(batch, samplers, ahead=True, run=run)
        told = to_the_end(context, batch, first)
        rest = context.step(batch, samplers, ahead=True, run=run_of(12))
        context.drop()

    assert first.n_steps == 1
    assert all(outcome.decode_ns > 0 for outcome in told)
    assert sum(outcome.n_steps for outcome in told) == 8
    assert [t for outcome in [*told, rest] for t in outcome.tokens] == expected


def test_a_call_that_goes_on_may_be_dropped(model):
    """
    What it did in between is forgotten; the memory is told how far it got.
    """
    with one_stream(model) as (context, batch, samplers):
        run = run_of(MAX_STEPS, tells=True)
        assert context.step(batch, samplers, ahead=True, run=run).goes_on
        assert context.drop()
        assert not context.drop()
        context.clear()
        batch.clear()
        batch.add_rows([make_prompt(1)[0]], [0], [0])
        again = context.step(batch, samplers, ahead=True, run=run_of(4))
        context.drop()

        assert again.n_steps == 4


def test_a_context_may_be_closed_over_a_call_that_goes_on(model):
    """
    close() ends it.
    """
    with one_stream(model) as (context, batch, samplers):
        run = run_of(MAX_STEPS, tells=True)
        assert context.step(batch, samplers, ahead=True, run=run).goes_on

    assert context.closed


def test_a_telling_call_leaves_a_failure_to_the_next_one(model):
    """
    Here for want of cells: there was no further step after all.
    """
    with room_for_four(model) as (context, batch, samplers):
        run = run_of(8, tells=True)
        told = to_the_end(
            context, batch, context.step(batch, samplers, ahead=True, run=run)
        )

        assert sum(outcome.n_steps for outcome in told) == 4
        assert all(outcome.code == 0 for outcome in told)
        assert context.step(batch, samplers).code == 1
