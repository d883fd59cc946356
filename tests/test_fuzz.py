"""Readers of bytes from outside on bytes that nobody has written (scripts/fuzz.py)."""

import base64
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.fuzz import Report, fuzz
from scripts.fuzz_targets import TARGETS
from scripts.fuzz_targets.target import Target
from tests.support.limits import LIMIT_S

pytestmark = pytest.mark.native

ROOT = Path(__file__).parents[1]
N_CASES = int(os.environ.get("PYLLAMA_RAW_TEST_CASES", "60"))
NIGHTLY_S = float(os.environ.get("PYLLAMA_RAW_FUZZ_S", "300"))


def run(*arguments: str, limit_s: float = LIMIT_S) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "scripts.fuzz", *arguments]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False
    )


def test_no_bytes_end_a_reader():
    """
    Each reader returns or raises the errors that it promises, for the same cases in each run.
    """
    done = run("--count", str(N_CASES), "--seed", "1")

    wanted = "".join(f"{name}: {N_CASES} cases, 0 findings\n" for name in TARGETS)
    assert (done.stdout, done.stderr, done.returncode) == (wanted, "", 0)


@pytest.mark.nightly
@pytest.mark.parametrize("name", TARGETS)
def test_no_bytes_end_a_reader_in_minutes(name):
    """
    Five minutes for all, guided by what cases reach where atheris is installed.
    """
    seconds = NIGHTLY_S / len(TARGETS)
    done = run(name, "--seconds", str(seconds), "--guided", limit_s=seconds + LIMIT_S)

    assert done.returncode == 0, done.stdout[-10_000:]
    assert f"{name}: 0 cases" not in done.stdout


def broken(data: bytes) -> None:
    """A reader with a fault of each kind."""
    match data:
        case b"untyped":
            raise KeyError("a")
        case b"promised":
            raise ValueError
        case b"endless":
            while True:
                pass
        case b"large":
            bytearray(2**40)
        case b"abort":
            os.abort()


def found(*cases: bytes, **options) -> Report:
    fields = {"max_cpu_s": 0.2, "max_mib": 256} | options
    target = Target("broken", lambda: broken, lambda: [*cases], (ValueError,), **fields)
    return fuzz(target, LIMIT_S, len(cases), seed=1)


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        (b"untyped", "KeyError at test_fuzz.py"),
        (b"endless", "more than 0.2 s of CPU time"),
        (b"large", "MemoryError at test_fuzz.py"),
        (b"abort", "ended by SIGABRT"),
    ],
)
def test_a_fault_is_found_with_its_case(case, kind):
    """
    An error that is not promised, a limit that is passed, and the end of the process.
    """
    report = found(b"right", b"promised", case)

    [(name, (text, data))] = report.findings.items()
    assert name.partition(":")[0] == kind
    assert data == case
    assert "broken" in text
    assert report.n_cases == 3


def test_what_is_limited_elsewhere_may_exceed():
    """
    A reader that works in a process of its own has its limits of time and memory there.
    """
    report = found(b"endless", b"right", b"large", may_exceed=True)

    assert report.findings == {}


def test_a_case_can_be_tried_again():
    """
    In this process, where a debugger sees it.
    """
    done = run("regex", "--replay", base64.b64encode(b"(((").decode())

    assert done.returncode == 1
    assert "BadSchema" in done.stderr
