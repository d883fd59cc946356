"""`chat` as a person types it, on the default model, in a terminal and with pipes."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from select import select

import pytest

from tests.support.limits import LIMIT_S

pytestmark = pytest.mark.native

COMMAND = ("-m", "pyllama_raw", "chat", "--temperature", "0", "--n-ctx", "1024")
ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "passive", "TERM": "xterm"}

# Makes the pipe end that a child gets its controlling terminal: ^C is a signal then.
IN_TERMINAL = """
import os, sys
os.login_tty(0)
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


class Screen:
    """A terminal with the program in it."""

    def __init__(self, fd: int, process: subprocess.Popen) -> None:
        self.fd, self.process = fd, process
        self.shown = ""

    def type(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def until(self, pattern: str) -> str:
        """Wait for *pattern*; what came up to its end."""
        while not (found := re.search(pattern, self.shown)):
            assert select([self.fd], [], [], LIMIT_S)[0], (
                f"no {pattern}: {self.shown!r}"
            )
            self.shown += os.read(self.fd, 4096).decode(errors="replace")
        text, self.shown = self.shown[: found.end()], self.shown[found.end() :]
        return text

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.type("\x03")

    def end(self) -> int:
        """The exit status; reads on, so that the program can write."""
        with suppress(OSError):  # Linux: the other side is closed
            self.until("nothing is like this")
        return self.process.wait(LIMIT_S)


@contextmanager
def chat(*arguments: str) -> Iterator[Screen]:
    fd, other = os.openpty()
    command = [sys.executable, "-c", IN_TERMINAL, *COMMAND, *arguments]
    with subprocess.Popen(
        command, stdin=other, stdout=other, stderr=other, env=ENVIRONMENT
    ) as process:
        os.close(other)
        try:
            yield Screen(fd, process)
        finally:
            process.kill()
            os.close(fd)


def test_an_interrupt_stops_the_answer_and_not_the_program(model_path: Path):
    """
    After Ctrl-C there is a prompt, the next answer begins with what is cached, and the
    end of the input is the end.
    """
    with chat("--model", str(model_path), "--ignore-eos") as screen:
        screen.until("> ")
        screen.type("Count to one thousand.\n")
        screen.until(r"thousand\.\r\n.*\w")
        screen.interrupt()
        stopped = screen.until(r"stopped\]")
        screen.until("> ")
        screen.type("/system Say yes.\n")
        screen.until("system message set")
        screen.until("> ")
        screen.type("/reset\n")
        screen.until("forgotten")
        screen.until("> ")
        screen.type("Are you there?\n")
        screen.until(r"there\?\r\n.*\w")
        screen.interrupt()
        again = screen.until(r"stopped\]")
        screen.until("> ")
        screen.type("\x04")
        status = screen.end()

    assert status == 0
    for line in (stopped, again):
        assert re.search(
            r"\x1b\[2m\[\d+ of \d+ prompt tokens cached, first token", line
        )
        assert re.search(r"tokens( at [\d.]+ tokens/s)?, stopped\]$", line)


def test_an_interrupt_at_any_moment_leaves_a_prompt(model_path: Path):
    """
    With the line, between line and answer, and in the answer: the next line is read.
    """
    with chat("--model", str(model_path), "--ignore-eos") as screen:
        screen.until("> ")
        for line, seen in (
            ("Count", "Count"),
            ("Count to one thousand.\n", "thousand"),
            ("Count to one thousand.\n", "\n"),
            ("Count to one thousand.\n", r"\n.*\w"),
        ):
            screen.type(line)
            screen.until(seen)
            screen.interrupt()
            screen.until(r"Ctrl-C again ends|stopped\]")
            screen.until("> ")
            screen.type("/help\n")
            screen.until(r"/quit +end")
            screen.until("> ")
        screen.type("/quit\n")
        status = screen.end()

    assert status == 0


def test_two_interrupts_at_the_prompt_end_it(model_path: Path):
    """
    The first says so; a line between them begins anew.
    """
    with chat("--model", str(model_path)) as screen:
        screen.until("> ")
        screen.type("half a line")
        screen.until("half a line")
        screen.interrupt()
        screen.until("Ctrl-C again ends")
        screen.until("> ")
        screen.type("/help\n")
        screen.until("/quit +end")
        screen.until("> ")
        screen.interrupt()
        screen.until("Ctrl-C again ends")
        screen.until("> ")
        screen.interrupt()
        status = screen.end()

    assert status == 130


def test_piped_lines_are_answered(model_path: Path):
    """
    stdout has the answers alone; the second turn takes the first from the cache, and a
    message that does not fit is told and makes the status 1.
    """
    too_long = "word " * 1100
    lines = ["What is the capital of France?", "/nothing", "And of Italy?", too_long]

    done = subprocess.run(
        [sys.executable, *COMMAND, "--model", model_path, "--system", "Be brief."],
        input="\n".join([*lines, "/quit", "not read"]),
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )

    first, nothing, second, refused = done.stderr.splitlines()
    assert done.returncode == 1
    assert "Paris" in done.stdout
    assert "\x1b" not in done.stdout + done.stderr
    assert first.startswith("[0 of ")
    assert nothing == "/nothing is no command: /help lists them"
    assert int(re.match(r"\[(\d+) of ", second)[1]) > 30
    assert refused.endswith("/reset begins anew")


def test_a_model_that_cannot_be_loaded_is_one_line(tmp_path: Path):
    """
    No traceback and no group of errors; status 1.
    """
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"not a model")

    done = subprocess.run(
        [sys.executable, *COMMAND, "--model", path],
        input="hello",
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )

    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"error: .*bad\.gguf.*\n", done.stderr)
