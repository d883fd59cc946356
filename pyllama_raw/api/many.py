"""Many prompts on one engine: their results in order, and patience with a full queue."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import TYPE_CHECKING

import anyio

from pyllama_raw.errors import QueueFull
from pyllama_raw.prompts.prompt import Prompt

if TYPE_CHECKING:
    from pyllama_raw.api.results import Result


async def complete_all(
    complete: Callable[[Prompt], Awaitable[Result]],
    prompts: Iterable[Prompt],
    n_tasks: int,
) -> list[Result]:
    """Complete *prompts* in order, *n_tasks* at a time; raises the first error bare."""
    numbered = enumerate(prompts)
    results: dict[int, Result] = {}
    errors: list[Exception] = []
    complete = _Patient(complete)

    async def work() -> None:
        try:
            for index, prompt in numbered:
                results[index] = await complete(prompt)
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
        try:
            result = await self._complete(prompt)
        except QueueFull:
            if self._n_trying == 1:
                raise  # nothing that we could wait for
            return None
        finally:
            self._n_trying -= 1
        self._ended.set()
        self._ended = anyio.Event()
        return result
