"""
How far a reader walks who follows a request from its call to its end.

Rules:
1. `scripts/walk.py` says what a function, a file and a turn is. It lists a walk, too.
2. The fakes stand for a model, and what they do themselves does not count.
3. Whoever makes a walk shorter lowers its limit. Nobody raises one.
"""

from array import array
from dataclasses import replace

import pytest

from pyllama_raw import AsyncEngine
from pyllama_raw.api.model import Opener
from pyllama_raw.core.step import Encode, StepPlan, StepResult, Vector
from pyllama_raw.engine.parts import EngineParts
from pyllama_raw.testing import FakeExecutor, fake_limits, fake_parts
from scripts.walk import Function, Walk, Walker, walks_of
from tests.serve.support import TEMPLATE

N_TRIES = 5  # two threads may meet so that a walk is one function longer
# Functions, files and turns of each request. They may fall and must not rise.
# Up to three turns of each are the threads', which meet at other places from run to run.
LIMITS = {
    "generate": (212, 34, 120),
    "chat": (332, 47, 168),
    "embed": (134, 30, 94),
    "reload": (172, 35, 115),
}


class VectorExecutor(FakeExecutor):
    """Fakes that make a vector of each text, too."""

    def is_ready(self, pooling: str) -> bool:
        return True

    def execute(self, plan: StepPlan) -> StepResult:
        if not plan.lot.makes_vectors:
            return super().execute(plan)
        vector = Vector(array("f", [1.0]).tobytes())
        return StepResult(
            outputs=tuple(
                vector for work in plan.works if type(work) is Encode and work.is_last
            )
        )


def parts() -> EngineParts:
    executor = VectorExecutor(fake_limits())
    made = fake_parts(executor, chat_template=TEMPLATE)
    return replace(made, texts=executor)


def test_a_walk_counts_what_a_reader_reads():
    """
    A function counts where it comes first, and each change of file is a turn.
    """
    a, b, c = (
        Function("one.py", "a", 3),
        Function("two.py", "b", 3),
        Function("one.py", "c", 9),
    )

    walk = Walk({"caller": (a, b, c), "engine": (b, a)})

    assert walk.functions == [a, b, c]
    assert walk.size == (3, 2, 2)


@pytest.mark.anyio
async def test_walks_do_not_grow(monkeypatch):
    """
    A feature that makes a walk longer is put where the walk comes by anyway.
    """
    monkeypatch.setattr(Opener, "parts", lambda *_, **__: parts())
    walker = Walker()
    sizes = dict.fromkeys(LIMITS, (10**6,) * 3)
    with walker.installed():
        async with AsyncEngine(parts(), Opener("fake.gguf", None, None)) as engine:
            for _ in range(N_TRIES):
                for name, walk in (await walks_of(engine, walker)).items():
                    sizes[name] = tuple(map(min, sizes[name], walk.size))
                if not above(sizes):
                    break

    assert above(sizes) == {}


def above(sizes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Those of *sizes* that are above their limits."""
    return {
        name: size
        for name, size in sizes.items()
        if any(n > limit for n, limit in zip(size, LIMITS[name], strict=True))
    }
