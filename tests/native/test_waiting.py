"""How threads of libllama wait for each other in an operation (_ffi/kernels/custom_node.h)."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from build_lib import FFI_DIR
from scripts.sync_cdef import built_include
from tests.support.limits import LIMIT_S

pytestmark = pytest.mark.native

SOURCE = Path(__file__).with_name("waiting.cpp")


def test_who_waits_long_sleeps_and_is_woken(tmp_path):
    """
    A thread that waits leaves its CPU to others, and goes on when the last one is here.
    """
    include = built_include()
    if include is None:
        pytest.skip("the headers of libllama are not here")
    program = tmp_path / "waiting"
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    folders = [f"-I{FFI_DIR}", f"-I{FFI_DIR / 'kernels'}", f"-I{include}"]
    command = [*compiler, "-std=c++17", "-pthread", *folders]
    subprocess.run([*command, str(SOURCE), "-o", str(program)], check=True)

    done = subprocess.run(
        [str(program)], capture_output=True, text=True, timeout=LIMIT_S, check=True
    )

    assert done.stdout == "woken\n"
