"""Random bodies for all endpoints, by seeds (scripts/fuzz_bodies.py)."""

import os

import anyio
import pytest

from scripts.fuzz_bodies import KEPT_BYTES, fuzz
from tests.support.tiny import tiny_model

COUNT = int(os.environ.get("PYLLAMA_RAW_TEST_CASES", "100"))
MODELS = ("llama", "bert", "bert-rank")


@pytest.mark.native
def test_no_body_fails_or_stalls_the_server():
    """
    No 500, the event loop is never late by much, and memory comes back.
    """
    models = {name: tiny_model(name) for name in MODELS}
    report = anyio.run(fuzz, models, 1, COUNT, COUNT // 5)

    assert report.failures == []
    assert sum(report.statuses.values()) == COUNT
    assert report.statuses[200] > 0
    assert report.kept_bytes < KEPT_BYTES
