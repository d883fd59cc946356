"""What an import of runners brings in, and what brings in runners."""

import json
import subprocess
import sys

import pytest

PROBE = """
import json, sys
import pyllama_raw
first = set(sys.modules)
import pyllama_raw.runners
print(json.dumps([sorted(first), sorted(set(sys.modules) - first)]))
"""


@pytest.fixture(scope="module")
def modules() -> tuple[list[str], list[str]]:
    process = subprocess.run(
        [sys.executable, "-c", PROBE], capture_output=True, text=True, check=True
    )
    first, then = json.loads(process.stdout)
    return first, then


def test_the_package_imports_no_runner(modules):
    """
    Nor what the runners need.
    """
    first, _ = modules

    assert not [name for name in first if name.startswith("pyllama_raw.runners")]
    assert "httpx2" not in first


def test_runners_import_neither_engine_nor_library(modules):
    """
    Until a model is loaded; clients of HTTP and prices come later, too.
    """
    _, then = modules
    deep = (
        *(
            "pyllama_raw.engine.build",
            "pyllama_raw.engine.thread",
            "pyllama_raw._ffi._llama",
        ),
        *("numpy", "httpx2", "genai_prices"),
    )

    assert [name for name in then if name.startswith(deep)] == []
    assert "pyllama_raw.runners.local" in then
