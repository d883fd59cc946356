"""One model for all native tests; contexts are cheap."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pyllama_raw.native.model import Model
from tests.native.support import best_level


@pytest.fixture(scope="session")
def model(model_path: Path) -> Iterator[Model]:
    with Model.load(model_path) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def at_best_level() -> Iterator[None]:
    """All tests of a file at the best level of woven weights."""
    with best_level():
        yield
