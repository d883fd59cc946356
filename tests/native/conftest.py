"""One model for all native tests; contexts are cheap."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from pyllama_raw.native.model import Model


@pytest.fixture(scope="session")
def model(model_path: Path) -> Iterator[Model]:
    with Model.load(model_path) as loaded:
        yield loaded
