"""Lines of llama.cpp reach Python without a callback into it."""

import threading

import pytest

from pyllama_raw.errors import ModelLoadFailed
from pyllama_raw.native import libllama
from pyllama_raw.native.libllama import lib
from pyllama_raw.native.model import Model
from tests.native.support import make_context, run_python

pytestmark = pytest.mark.native


def test_lines_are_kept_until_drained(model):
    """
    Making a context writes lines with a level; drain() takes each line once.
    """
    libllama.drain()
    make_context(model).close()
    lines = libllama.drain()

    assert any("n_ctx" in line.text for line in lines)
    assert {line.level for line in lines} <= {
        libllama.INFO,
        libllama.WARN,
        libllama.ERROR,
    }
    assert not any("\n" in line.text or not line.text for line in lines)
    assert libllama.drain() == []


def test_errors_explain_a_failure(tmp_path):
    """
    What libllama said of a failed load is part of the exception, nothing older is.
    """
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF" + bytes([3, 0, 0, 0]) + bytes(16) + bytes(64))
    before = libllama.mark()
    with pytest.raises(ModelLoadFailed) as caught:
        Model.load(path)

    assert libllama.last_errors(before)
    assert libllama.last_errors(before, limit=1) in str(caught.value)
    assert libllama.last_errors(libllama.mark()) == ""


def test_the_ring_drops_the_oldest():
    """
    Nobody reads: memory stays bounded, and the newest lines survive.
    """
    libllama.drain()
    params = lib.llama_model_default_params()
    for i in range(800):
        lib.llama_model_load_from_file(f"no file {i}".encode(), params)
    lines = libllama.drain()

    assert sum(len(line.text) for line in lines) < 64 * 1024
    assert any("no file 799" in line.text for line in lines)
    assert not any("no file 0'" in line.text for line in lines)


def test_draining_from_many_threads_loses_nothing_twice(model):
    """
    Every line goes to one reader.
    """
    libllama.drain()
    make_context(model, n_ctx=256).close()
    expected = len(libllama.drain())
    make_context(model, n_ctx=256).close()
    found: list[int] = []
    threads = [
        threading.Thread(target=lambda: found.append(len(libllama.drain())))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert sum(found) == expected


def test_nothing_is_printed(model_path):
    """
    Loading and failing write nothing to stdout or stderr.
    """
    code = """
import sys
from pyllama_raw.native.context import Context
from pyllama_raw.native.libllama import lib
from pyllama_raw.native.model import Model
Context(Model.load(sys.argv[1]), n_seq_max=1, n_ctx=256).close()
try:
    Model.load(sys.argv[0])
except Exception:
    pass
"""
    done = run_python(code, model_path)

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_library_describes_itself():
    """
    Version, instruction sets and devices are there; one device is the CPU.
    """
    kinds = [device.kind for device in libllama.devices()]

    assert libllama.llama_version()
    assert "CPU" in libllama.system_info()
    assert kinds.count("cpu") == 1
    assert all(d.name and d.memory_total_bytes >= 0 for d in libllama.devices())
