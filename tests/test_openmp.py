"""How long threads of libgomp spin, unless the user has chosen."""

import os
import re
import subprocess
import sys

import pytest

from pyllama_raw._ffi.openmp import CHOICE
from tests.support.limits import LIMIT_S

LOAD = """
import os
from pyllama_raw.native import libllama
libllama.load()
print(sorted({"GOMP_SPINCOUNT", "OMP_WAIT_POLICY"} & set(os.environ)))
"""


def spins(**chosen: str) -> tuple[int, str]:
    """What libgomp says it has read, and what a child of the process would inherit."""
    env = {name: value for name, value in os.environ.items() if name not in CHOICE}
    done = subprocess.run(
        [sys.executable, "-c", LOAD],
        env={**env, "OMP_DISPLAY_ENV": "verbose", **chosen},
        capture_output=True,
        check=True,
        text=True,
    )
    found = re.search(r"GOMP_SPINCOUNT = '(\d+)'", done.stderr)
    assert found is not None, done.stderr
    return int(found[1]), done.stdout.strip()


@pytest.mark.native
def test_threads_spin_as_we_choose():
    """
    libgomp is loaded with our count, and children inherit nothing of it.
    """
    assert spins() == (int(CHOICE["GOMP_SPINCOUNT"]), "[]")


@pytest.mark.native
def test_short_waits_have_a_pool_that_ends():
    """
    More threads than CPUs are there until nobody wants them.
    """
    code = """
import os, time
from pyllama_raw._ffi.openmp import SHORT_SPINS
from pyllama_raw.native import libllama

def n_threads():
    return len(os.listdir("/proc/self/task"))

def wait_until(holds):
    while not holds():
        time.sleep(0.01)

libllama.load()
libllama.system_info()
before = n_threads()
for _ in range(2):
    SHORT_SPINS.begin()
    SHORT_SPINS.begin()
    wait_until(lambda: n_threads() > before + os.cpu_count())
    SHORT_SPINS.end()
    SHORT_SPINS.end()
    wait_until(lambda: n_threads() == before)
"""
    env = {name: value for name, value in os.environ.items() if name not in CHOICE}

    subprocess.run([sys.executable, "-c", code], env=env, check=True, timeout=LIMIT_S)


@pytest.mark.native
@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [("GOMP_SPINCOUNT", "77", 77), ("OMP_WAIT_POLICY", "passive", 0)],
)
def test_a_choice_of_the_user_stays(name, value, expected):
    """
    Either variable alone is a choice.
    """
    assert spins(**{name: value}) == (expected, f"['{name}']")
