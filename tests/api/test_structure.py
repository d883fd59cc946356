"""A random model answers in forms and calls tools, with thoughts and without."""

import pytest

pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

from scripts.try_structure import tried

pytestmark = [pytest.mark.native, pytest.mark.anyio]


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


async def test_what_ends_by_itself_is_what_was_asked_for():
    """
    An answer fits its form, or is a whole call; the script of this name tries 300 schemas.
    """
    trial = await tried(n_schemas=8, n_seeds=1)

    assert not trial.wrong
    assert trial.counts["answers"] >= 8
    assert trial.counts["calls"] >= 4
    assert trial.counts["with thoughts"] >= 4
