"""Many prompts at once where the queue is full and some of them fail."""

import anyio
import pytest

from pyllama_raw.api.batches import complete_all
from pyllama_raw.errors import DecodeFailed, QueueFull
from tests.support.limits import LIMIT_S
from tests.support.loops import anyio_backend  # noqa: F401

pytestmark = pytest.mark.anyio


class Places:
    """An engine with one place, which is free again once its prompt has ended."""

    def __init__(self) -> None:
        self.is_taken = False

    async def complete(self, prompt: str) -> str:
        if self.is_taken:
            raise QueueFull("max_waiting", 2, 1)
        self.is_taken = True
        try:
            await anyio.wait_all_tasks_blocked()
            if prompt == "bad":
                raise DecodeFailed("decode", -2, "no memory")
        finally:
            self.is_taken = False
        return prompt


async def test_a_prompt_that_waits_for_a_place_goes_on_after_one_that_fails():
    """
    Another prompt of the call frees its place by an error as well as by a result.
    """
    with anyio.fail_after(LIMIT_S):
        results = await complete_all(
            Places().complete, ["bad", "good"], 2, returns_errors=True
        )

    assert [type(r).__name__ for r in results] == ["DecodeFailed", "str"]


async def test_prompts_that_find_no_place_at_all_end():
    """
    Where others hold all places, each prompt ends with QueueFull; none waits for another one.
    """

    async def refuse(prompt: str) -> str:
        await anyio.wait_all_tasks_blocked()
        raise QueueFull("max_waiting", 2, 1)

    with anyio.fail_after(LIMIT_S):
        results = await complete_all(refuse, ["a", "b", "c"], 3, returns_errors=True)

    assert [type(r).__name__ for r in results] == ["QueueFull"] * 3
