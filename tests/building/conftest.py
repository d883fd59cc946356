"""Builds that no variable of the user changes."""

import os

import pytest


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch, tmp_path):
    for name in tuple(os.environ):
        if name.startswith("PYLLAMA_RAW_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PYLLAMA_RAW_CACHE", str(tmp_path / "cache"))
