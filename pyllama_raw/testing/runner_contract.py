"""
The contract of runners as tests, for any runner: one body, and what a runner cannot is skipped.

    class TestMine(RunnerContract):
        @asynccontextmanager
        async def made(self) -> AsyncIterator[ModelRunner]:
            async with MyRunner() as runner:
                yield runner

It needs pytest, and runs by the plug-in of anyio. Call
`pytest.register_assert_rewrite("pyllama_raw.testing.runner_contract")` before the import to see
the values of what fails.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from math import isfinite
from typing import Any, ClassVar

import anyio
import pytest

from pyllama_raw import Prompt, Result, SamplingParams
from pyllama_raw.core.request import FinishReason
from pyllama_raw.errors import ClosedError, PyllamaError, Unsupported, WrongUse
from pyllama_raw.runners import ModelRunner, RunnerHealth

LIMIT_S = 60.0  # after which something hangs
FEW = 2  # tokens; any runner says so many


def params(**changes: Any) -> SamplingParams:
    """The same output each time."""
    return SamplingParams(
        **({"max_tokens": FEW, "temperature": 0, "seed": 1} | changes)
    )


def seen(result: Result) -> tuple[Any, ...]:
    """Values that are equal in two answers to the same request; a cache may have helped one."""
    usage = result.usage
    counts = (usage.prompt_tokens, usage.completion_tokens)
    return result.index, result.text, result.finish_reason, counts


@asynccontextmanager
async def skippable(
    context: AbstractAsyncContextManager[ModelRunner],
) -> AsyncIterator[ModelRunner]:
    """
    The runner of *context*, in a block that a test may skip.

    The skip comes out of it when the runner is closed. Groups of tasks in *context* would put it into
    an error that ends the loop's task and that nobody retrieves. Some later collection writes that
    one down then, and Python 3.11 fails where it parses a file meanwhile.
    """
    skip: BaseException | None = None
    async with context as runner:
        try:
            yield runner
        except pytest.skip.Exception as exception:
            skip = exception
    if skip is not None:
        raise skip


def needs(runner: ModelRunner, *names: str) -> None:
    """Skip a test of what *runner* cannot do."""
    abilities = runner.capabilities
    for name in names:
        can = name in abilities.verbs or bool(getattr(abilities, name, False))
        if not can:
            pytest.skip(f"{runner.name} has no {name}")


async def settled(runner: ModelRunner) -> RunnerHealth:
    """The health once nothing runs any more."""
    with anyio.fail_after(LIMIT_S):
        while True:
            health = await runner.health()
            if not health.n_running and not health.n_waiting:
                return health
            await anyio.sleep(0.005)


class RunnerContract(ABC):
    """Inherit it and give made(), and the others where the runner has what they ask for."""

    pytestmark: ClassVar[Any] = pytest.mark.anyio
    prompt: ClassVar[Prompt] = "The sky is"
    follows_schemas: ClassVar[bool] = True  # fakes take one and do not
    chat: ClassVar[Prompt] = [{"role": "user", "content": "Say hello"}]

    @abstractmethod
    def made(self) -> AbstractAsyncContextManager[ModelRunner]:
        """A runner that serves, closed at the end."""

    def failing(self) -> AbstractAsyncContextManager[ModelRunner]:
        """A runner whose outputs fail after a token or several."""
        pytest.skip("nobody says how this runner fails")

    # -- text -----------------------------------------------------------------

    async def test_a_stream_is_the_whole_answer(self) -> None:
        """
        Deltas make up the text of the result, which is that of an answer at once.
        """
        async with skippable(self.made()) as runner:
            needs(runner, "generate")
            result = await runner.generate(self.prompt, params()).collect()
            async with runner.generate(self.prompt, params()) as run:
                deltas = [delta async for delta in run]

        assert "".join(delta.text for delta in deltas) == run.result.text == result.text
        assert seen(run.result) == seen(result)
        assert result.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)

    async def test_a_chat_is_answered(self) -> None:
        """
        Messages are a prompt, too.
        """
        async with skippable(self.made()) as runner:
            needs(runner, "generate")
            result = await runner.generate(self.chat, params()).collect()

        assert result.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert result.usage.prompt_tokens > 0

    async def test_usage_counts_tokens(self) -> None:
        """
        The prompt has some, the output as many as are allowed, or fewer.
        """
        async with skippable(self.made()) as runner:
            needs(runner, "generate")
            result = await runner.generate(self.prompt, params()).collect()

        usage = result.usage
        assert 1 <= usage.completion_tokens <= FEW
        assert 0 <= usage.cached_tokens < usage.prompt_tokens

    async def test_a_limit_of_tokens_ends_an_output(self) -> None:
        """
        One token, and the reason says so.
        """
        async with skippable(self.made()) as runner:
            needs(runner, "generate")
            result = await runner.generate(self.prompt, params(max_tokens=1)).collect()

        assert result.usage.completion_tokens == 1
        assert result.finish_reason is FinishReason.LENGTH

    async def test_several_outputs_have_an_index(self) -> None:
        """
        All of them come, and each delta says whose it is.
        """
        async with skippable(self.made()) as runner:
            needs(runner, "generate", "n")
            texts = {0: "", 1: ""}
            async with runner.generate(self.prompt, params(n=2)) as run:
                async for delta in run:
                    texts[delta.index] += delta.text

        assert {result.index: result.text for result in run.results} == texts

    async def test_token_ids_are_a_prompt(self) -> None:
        """
        They are counted as they are.
        """
        async with skippable(self.made()) as runner:
            needs(runner, "generate", "token_ids")
            result = await runner.generate([5, 6, 7], params()).collect()

        assert result.usage.completion_tokens >= 1

    async def test_log_probabilities_come_with_tokens(self) -> None:
        """
        One a token, none above 0, with as many likely ones as were asked for.
        """
        async with skippable(self.made()) as runner:
            needs(runner, "generate", "logprobs")
            result = await runner.generate(self.prompt, params(logprobs=2)).collect()

        assert len(result.logprobs) >= 1
        assert all(entry.logprob <= 0 for entry in result.logprobs)
        assert {len(entry.top) for entry in result.logprobs} == {2}

    async def test_a_schema_holds_the_output(self) -> None:
        """
        A constant is all that the model may say.
        """
        async with skippable(self.made()) as runner:
            needs(runner, "generate", "json_schema")
            if not self.follows_schemas:
                pytest.skip("it is a fake")
            sampling = params(max_tokens=32, json_schema={"const": 7})
            result = await runner.generate(self.prompt, sampling).collect()

        assert result.text.strip() == "7"

    # -- other verbs ----------------------------------------------------------

    async def test_texts_become_vectors(self) -> None:
        """
        A row each, of one length, in their order.
        """
        async with skippable(self.made()) as runner:
            needs(runner, "embed")
            rows = await runner.embed(["a text", "another one", "a text"])

        assert len(rows) == 3
        assert abs(rows[0] - rows[2]).max() < 1e-3  # places in a batch differ a little
        assert rows.usage.prompt_tokens > 0

    async def test_documents_are_ranked(self) -> None:
        """
        All of them, the best first.
        """
        async with skippable(self.made()) as runner:
            needs(runner, "rank")
            ranked = await runner.rank("a query", ["one", "two", "three"])

        scores = [entry.score for entry in ranked]
        assert scores == sorted(scores, reverse=True)
        assert sorted(entry.index for entry in ranked) == [0, 1, 2]
        assert all(map(isfinite, scores))

    # -- refusals and failures ------------------------------------------------

    async def test_what_it_cannot_do_is_refused_before_it_is_sent(self) -> None:
        """
        Unsupported, of every verb and ability that is not there.
        """
        tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
        async with skippable(self.made()) as runner:
            can = runner.capabilities
            ways: dict[str, tuple[bool, Any, dict[str, Any]]] = {
                "logprobs": (can.logprobs, params(logprobs=1), {}),
                "prompt": (can.prompt_logprobs, params(prompt_logprobs=1), {}),
                "schema": (can.json_schema, params(json_schema={"const": 1}), {}),
                "grammar": (can.grammars, params(regex="a"), {}),
                "n": (can.n, params(n=2), {}),
                "tools": (can.tools, params(), {"tools": [tool]}),
            }
            refused = []
            for name, (is_there, sampling, options) in ways.items():
                try:
                    runner.generate(self.chat, sampling, **options)
                except Unsupported:
                    refused.append(name)
                else:
                    assert is_there, name
            for verb, call in (
                ("embed", lambda: runner.embed(["a"])),
                ("rank", lambda: runner.rank("a", ["b"])),
            ):
                if verb not in can.verbs:
                    with pytest.raises(Unsupported):
                        await call()

        can_not = [name for name, way in ways.items() if not way[0]]
        assert set(can_not) <= set(refused)

    async def test_an_error_comes_after_what_was_said(self) -> None:
        """
        The reader has the deltas before it; it is raised again by the result.
        """
        async with skippable(self.failing()) as runner:
            needs(runner, "generate")
            text, errors = "", []
            async with runner.generate(self.prompt, params(max_tokens=9)) as run:
                try:
                    async for delta in run:
                        text += delta.text
                except PyllamaError as error:
                    errors.append(type(error))
            try:
                _ = run.result
            except PyllamaError as error:
                errors.append(type(error))

        assert text != ""
        assert len(errors) == 2
        assert errors[0] is errors[1]

    # -- the life of a run ----------------------------------------------------

    async def test_who_leaves_ends_the_request(self) -> None:
        """
        The result has what was read; nothing runs on, and the runner serves others.
        """
        async with skippable(self.made()) as runner:
            needs(runner, "generate")
            async with runner.generate(self.prompt, params(max_tokens=32)) as run:
                first = await anext(run)
            health = await settled(runner)
            after = await runner.generate(self.prompt, params()).collect()

        assert run.result.text == first.text
        assert run.result.finish_reason is FinishReason.CANCELLED
        assert health.ready
        assert after.usage.completion_tokens >= 1

    async def test_leaving_before_the_first_token_is_no_error(self) -> None:
        """
        The result is empty.
        """
        async with skippable(self.made()) as runner:
            needs(runner, "generate")
            async with runner.generate(self.prompt, params()) as run:
                pass
            await settled(runner)

        assert (run.result.text, run.result.finish_reason) == ("", "cancelled")

    async def test_cancel_ends_reading(self) -> None:
        """
        No further delta comes, and no error.
        """
        async with skippable(self.made()) as runner:
            needs(runner, "generate")
            deltas = []
            with anyio.fail_after(LIMIT_S):
                async with runner.generate(self.prompt, params(max_tokens=32)) as run:
                    async for delta in run:
                        deltas.append(delta)
                        run.cancel()

        assert len(deltas) == 1
        assert run.result.finish_reason is FinishReason.CANCELLED

    async def test_a_task_that_is_cancelled_leaves_the_runner_well(self) -> None:
        """
        Its request ends with it.
        """
        async with skippable(self.made()) as runner:
            needs(runner, "generate")
            with anyio.CancelScope() as scope:
                async with runner.generate(self.prompt, params(max_tokens=32)) as run:
                    await anext(run)
                    scope.cancel()
                    await anyio.sleep_forever()
            health = await settled(runner)

        assert health.ready

    async def test_a_run_is_read_once(self) -> None:
        """
        Its second reader and its second block are told so.
        """
        async with skippable(self.made()) as runner:
            needs(runner, "generate")
            run = runner.generate(self.prompt, params())
            async with run:
                await run.collect()
                with pytest.raises(WrongUse):
                    aiter(run)
            with pytest.raises(WrongUse):
                await run.__aenter__()

    async def test_a_repr_hides_what_was_said(self) -> None:
        """
        Logs have neither the prompt nor the text.
        """
        async with skippable(self.made()) as runner:
            needs(runner, "generate")
            run = runner.generate("A secret prompt", params())
            await run.collect()

        assert "secret" not in repr(run)
        assert run.result.text not in repr(run)

    async def test_requests_at_once_have_answers_of_their_own(self) -> None:
        """
        As many as a few slots, and one reader that is slow keeps nobody.
        """
        texts: dict[int, str] = {}

        async def ask(index: int) -> None:
            result = await runner.generate(self.prompt, params()).collect()
            texts[index] = result.text

        async with skippable(self.made()) as runner:
            needs(runner, "generate")
            with anyio.fail_after(LIMIT_S):
                async with runner.generate(self.prompt, params()) as slow:
                    async with anyio.create_task_group() as group:
                        for index in range(3):
                            group.start_soon(ask, index)
                    texts[3] = (await slow.collect()).text

        assert sorted(texts) == [0, 1, 2, 3]
        assert len(set(texts.values())) == 1

    # -- the life of a runner -------------------------------------------------

    async def test_closing_twice_is_closing(self) -> None:
        """
        Then it is not ready, and refuses requests without a wait.
        """
        async with skippable(self.made()) as runner:
            before = await runner.health()
            await runner.aclose()
            await runner.aclose()
            after = await runner.health()
            if "generate" in runner.capabilities.verbs:
                with pytest.raises(ClosedError):
                    await runner.generate(self.prompt, params()).collect()

        assert (before.live, before.ready) == (True, True)
        assert after.ready is False

    async def test_closing_ends_what_runs(self) -> None:
        """
        The reader is told, by an error or by the reason, and does not hang.
        """
        async with skippable(self.made()) as runner:
            needs(runner, "generate")
            with anyio.fail_after(LIMIT_S):
                async with runner.generate(self.prompt, params(max_tokens=64)) as run:
                    async with aclosing(runner):
                        pass
                    try:
                        reason = (await run.collect()).finish_reason
                    except PyllamaError:
                        reason = FinishReason.CLOSED

        assert reason in tuple(FinishReason)

    async def test_starting_twice_is_starting(self) -> None:
        """
        The second time does nothing.
        """
        async with skippable(self.made()) as runner:
            await runner.start()
            await runner.start()
            health = await runner.health()

        assert health.ready

    async def test_a_cost_is_no_less_than_nothing(self) -> None:
        """
        Or it is not known.
        """
        async with skippable(self.made()) as runner:
            needs(runner, "generate")
            result = await runner.generate(self.prompt, params()).collect()
            cost = runner.cost(result.usage)

        assert cost is None or cost.usd >= 0
