"""Commands whose standard streams the caller has closed: one line where there is a place."""

import subprocess
import sys
from pathlib import Path

import pytest

from pyllama_raw.options import models
from tests.support.limits import LIMIT_S
from tests.support.tiny import tiny_model

OUT = "error: stdout is closed: nothing can be written to it\n"
IN = "error: stdin is closed: nothing can be read from it\n"
COMMANDS = {
    "chat": ["chat", "--max-tokens", "1", "--model"],
    "generate": ["generate", "hi", "--max-tokens", "1", "--model"],
    "generate a file": ["generate", "--input", "-", "--max-tokens", "1", "--model"],
    "embed": ["embed", "--input", "-", "--model"],
    "rank": ["rank", "--query", "hi", "hi", "--model"],
    "info": ["info"],
    "tune": ["tune"],
    "simulate": ["simulate"],
    "trace": ["trace"],
    "plot": ["plot"],
    "bench": ["bench", "report"],
    "help": ["--help"],
    "version": ["--version"],
}


def each_night(*names: str) -> list[object]:
    """All commands, of which others than *names* are tried by night, since each is a process."""
    night = pytest.mark.nightly
    return [
        name if name in names else pytest.param(name, marks=night) for name in COMMANDS
    ]


def python(close: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Python, started by a shell that closes streams."""
    shell = ["/bin/sh", "-c", f'exec "$@" {close}', "sh", sys.executable]
    return subprocess.run(
        [*shell, *arguments],
        input="",
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


def ended(name: str, close: str) -> tuple[int, str, str]:
    """Status, stdout and stderr of a command without the streams that are closed."""
    command = COMMANDS[name]
    if command[-1] == "--model":
        command = [*command, str(tiny_model("llama"))]
    done = python(close, "-m", "pyllama_raw", *command)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize("name", each_night("info", "bench", "help"))
def test_without_stdout_a_command_says_so(name):
    """
    In one line and with status 1, before it does anything.
    """
    assert ended(name, ">&-") == (1, "", OUT)


def test_without_any_stream_the_status_tells():
    """
    Nothing can be told, so there is only the status.
    """
    assert ended("info", "<&- >&- 2>&-") == (1, "", "")


@pytest.mark.native
@pytest.mark.parametrize("name", ["chat", "generate a file", "embed"])
def test_without_stdin_who_reads_it_says_so(name):
    """
    In one line and with status 1.
    """
    status, out, err = ended(name, "<&-")

    assert (status, out, err.splitlines(keepends=True)[-1:]) == (1, "", [IN])
    assert "Traceback" not in err


@pytest.mark.native
def test_who_does_not_read_stdin_does_not_miss_it():
    """
    Prompts that are arguments are completed.
    """
    status, out, _ = ended("generate", "<&-")

    assert status == 0
    assert out


@pytest.mark.native
@pytest.mark.parametrize(("name", "status"), [("generate", 0), ("embed", 1)])
def test_without_stderr_a_command_does_its_work(name, status):
    """
    Its result is on stdout, and what went wrong is the status.
    """
    found, out, err = ended(name, "2>&-")

    assert (found, bool(out), err) == (status, not status, "")


def test_no_file_takes_the_number_of_a_closed_stream(tmp_path: Path):
    """
    What C writes to stderr would go into that file.
    """
    code = """
import os, sys
from pyllama_raw.cli import open_missing
open_missing()
print(os.open(sys.argv[1], os.O_WRONLY | os.O_CREAT) > 2)
"""
    done = python("<&- 2>&-", "-c", code, str(tmp_path / "file"))

    assert done.stdout == "True\n"


def test_a_program_without_stderr_downloads_in_silence(monkeypatch):
    """
    A line that nobody can see is no reason to fail.
    """
    monkeypatch.setattr(sys, "stderr", None)

    with models._shown(progress=True) as on_bytes:
        on_bytes(1)
