"""
Results of calls that give them all at once: whole ones, of many prompts in order, and scores.

A call for many prompts is patient with a full queue. Cut text is no result of such calls.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

import anyio

from pyllama_raw.errors import (
    ClosedError,
    PyllamaError,
    QueueFull,
    of_prompt,
)
from pyllama_raw.prompts.prompt import Prompt

if TYPE_CHECKING:
    from pyllama_raw.api.results import Result


async def complete_all(
    complete: Callable[[Prompt], Awaitable[Result]],
    prompts: Iterable[Prompt],
    n_tasks: int,
    progress: Callable[[int], object] | None = None,
    *,
    returns_errors: bool = False,
) -> list[Result | PyllamaError]:
    """
    Complete *prompts* in order, *n_tasks* at a time.

    Args:
        progress: called with the number of prompts that have ended.
        returns_errors: the error of a prompt stands in the place of its result. Otherwise
            the first one ends all, and is raised bare, with the index of its prompt.
    """
    numbered = enumerate(prompts)
    results: dict[int, Result | PyllamaError] = {}
    errors: list[Exception] = []
    complete = _Patient(complete)

    async def end_of(index: int, prompt: Prompt) -> Result | PyllamaError:
        try:
            return await complete(prompt)
        except PyllamaError as error:
            if returns_errors:
                return of_prompt(error, index)
            raise of_prompt(error, index) from error.__cause__

    async def work() -> None:
        try:
            for index, prompt in numbered:
                results[index] = await end_of(index, prompt)
                if progress is not None:
                    progress(len(results))
        except Exception as error:  # noqa: BLE001 - raised below
            errors.append(error)
            group.cancel_scope.cancel()

    if isinstance(prompts, list | tuple):
        n_tasks = min(n_tasks, len(prompts))
    async with anyio.create_task_group() as group:
        for _ in range(n_tasks):
            group.start_soon(work)
    if errors:
        raise errors[0]
    return [results[index] for index in sorted(results)]


class _Patient:
    """Completes prompts; one that finds the queue full waits for another one to end."""

    def __init__(self, complete: Callable[[Prompt], Awaitable[Result]]) -> None:
        self._complete = complete
        self._n_trying = 0
        self._ended = anyio.Event()  # set when one of them ends, then replaced

    async def __call__(self, prompt: Prompt) -> Result:
        while True:
            result = await self._try(prompt)
            if result is not None:
                return result
            await self._ended.wait()

    async def _try(self, prompt: Prompt) -> Result | None:
        """None if the queue was full while others of these were under way."""
        self._n_trying += 1
        is_refused = False
        try:
            return await self._complete(prompt)
        except QueueFull:
            if self._n_trying == 1:
                raise  # nothing that we could wait for
            is_refused = True
            return None
        finally:
            self._n_trying -= 1
            if not is_refused:  # an error frees a place, too
                self._ended.set()
                self._ended = anyio.Event()


def whole(results: tuple[Result, ...]) -> tuple[Result, ...]:
    """The *results*. Raises ClosedError if the engine was closed before all had ended."""
    # By its word: FinishReason comes with what is imported while a model loads.
    if any(result.finish_reason == "closed" for result in results):
        raise ClosedError(
            "the engine was closed before the output was whole: `results` of this error "
            "has what there is; aclose(drain_s=...) waits for what runs",
            results,
        )
    return results
