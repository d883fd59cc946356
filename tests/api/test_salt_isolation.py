"""
Under scope="salt" nobody gets a cached token of another salt or of none.

PYLLAMA_RAW_TEST_HISTORIES sets how many histories are drawn.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pyllama_raw import AsyncEngine, SamplingParams
from pyllama_raw.core.memory.cache import PrefixCache
from pyllama_raw.core.memory.snapshots import SnapshotKind
from pyllama_raw.core.memory.tiers import SnapshotCost
from pyllama_raw.core.request import Private
from pyllama_raw.errors import InvalidRequest
from pyllama_raw.testing import FakeExecutor, fake_limits, fake_parts
from pyllama_raw.testing.executor import HEAD_BYTES, TOKEN_BYTES
from tests.support.hostile import AngryText, Unhashable
from tests.support.limits import LIMIT_S

N_HISTORIES = int(os.environ.get("PYLLAMA_RAW_TEST_EXAMPLES", "40"))
HANG_S = LIMIT_S

# What a salt is for the engine; REFUSED: it is none.
REFUSED = object()
SALTS = {
    "none": (None, None),
    "text": ("a", "a"),
    "number as text": ("1", "1"),
    "none as text": ("None", "None"),
    "class": (AngryText("a"), "a"),
    "ids": (1, REFUSED),
    "later ids": (2, REFUSED),
    "true": (True, REFUSED),
    "float": (1.0, REFUSED),
    "bytes": (b"a", REFUSED),
    "empty": ("", REFUSED),
    "tuple": (("a",), REFUSED),
    "list": (["a"], REFUSED),
    "dict": (Unhashable(a=1), REFUSED),
    "private": (Private(), REFUSED),
}


@dataclass(frozen=True)
class Asked:
    salt: str  # a name of SALTS
    prompt: str
    n_tokens: int


PROMPTS = st.builds(
    lambda stem, n_same, tail: stem * n_same + tail,
    st.sampled_from(["ab", "xyz"]),
    st.integers(5, 12),
    st.text("ab", max_size=3),
)
ASKED = st.builds(Asked, st.sampled_from(sorted(SALTS)), PROMPTS, st.integers(1, 6))
HISTORIES = st.lists(st.lists(ASKED, min_size=1, max_size=3), min_size=1, max_size=4)


def salted_engine(kind: SnapshotKind) -> AsyncEngine:
    executor = FakeExecutor(fake_limits(kind=kind))
    parts = fake_parts(
        executor,
        cache=PrefixCache(kind, max_bytes=10**6, max_entries=100),
        snapshot_cost=SnapshotCost(HEAD_BYTES, TOKEN_BYTES),
        snapshot_interval_tokens=8,
    )
    return AsyncEngine(replace(parts, cache_scope="salt"))


@dataclass(frozen=True)
class Answered:
    salt: str | None  # as the engine takes it
    tokens: tuple[int, ...]  # of prompt and output
    n_cached: int


async def ask(engine: AsyncEngine, asked: Asked, answers: list[Answered]) -> None:
    salt, meant = SALTS[asked.salt]
    params = SamplingParams(max_tokens=asked.n_tokens)
    try:
        generation = engine.generate(asked.prompt, params, cache_salt=salt)
    except InvalidRequest:
        assert meant is REFUSED
        return
    assert meant is not REFUSED
    async with generation:
        result = await generation.collect()
        tokens = (*generation.prompt_token_ids, *result.token_ids)
    answers.append(Answered(meant, tokens, result.usage.cached_tokens))


async def play(history: list[list[Asked]], kind: SnapshotKind) -> list[Answered]:
    """Those of a group run at once; the answers in the order in which they came."""
    answers: list[Answered] = []
    async with salted_engine(kind) as engine:
        for group in history:
            async with anyio.create_task_group() as tasks:
                for asked in group:
                    tasks.start_soon(ask, engine, asked, answers)
    return answers


def n_allowed(answer: Answered, answers: list[Answered]) -> int:
    """The most tokens that others with the salt of *answer* could have left for it."""
    own = [a for a in answers if a.salt is not None and a.salt == answer.salt]
    return max(
        (n_common(answer.tokens, a.tokens) for a in own if a is not answer), default=0
    )


def n_common(tokens: tuple[int, ...], other: tuple[int, ...]) -> int:
    pairs = zip(tokens, other, strict=False)
    return next(
        (i for i, (a, b) in enumerate(pairs) if a != b), min(len(tokens), len(other))
    )


@settings(max_examples=N_HISTORIES, suppress_health_check=list(HealthCheck))
@given(history=HISTORIES, kind=st.sampled_from(SnapshotKind))
def test_no_token_crosses_between_salts(history, kind):
    """
    What a request took from the cache, requests of its own salt had computed.
    """

    async def bounded() -> list[Answered]:
        with anyio.fail_after(HANG_S):
            return await play(history, kind)

    answers = anyio.run(bounded)

    assert all(a.n_cached <= n_allowed(a, answers) for a in answers)


@pytest.mark.anyio
@pytest.mark.parametrize("kind", SnapshotKind)
async def test_a_salt_shares_with_itself_only(kind):
    """
    The same prompt is cached for its own salt, and for neither another one nor none.
    """
    prompt, params = "abcdefgh" * 5, SamplingParams(max_tokens=1)
    n_cached = []
    async with salted_engine(kind) as engine:
        for salt in ("a", "b", None, None, "a"):
            result = await engine.complete(prompt, params, cache_salt=salt)
            n_cached.append(result.usage.cached_tokens)

    assert n_cached[:4] == [0, 0, 0, 0]
    assert n_cached[4] > 0


@pytest.mark.anyio
async def test_numbers_name_no_request():
    """
    A request without a salt cannot be named: by its id, as a number or as text.
    """
    prompt, params = "abcdefgh" * 5, SamplingParams(max_tokens=1)
    n_cached = []
    async with salted_engine(SnapshotKind.RANGE) as engine:
        await engine.complete(prompt, params)
        for request_id in range(10):
            with pytest.raises(InvalidRequest, match="cache_salt"):
                await engine.complete(prompt, params, cache_salt=request_id)
            salt = str(request_id)
            result = await engine.complete(prompt, params, cache_salt=salt)
            n_cached.append(result.usage.cached_tokens)

    assert n_cached == [0] * 10
