"""A template's process is bounded in time and memory, and ends with whoever asks it."""

import gc
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from select import select
from threading import Thread

import pytest

from pyllama_raw.engine.guidance import N_PROCESSES
from pyllama_raw.errors import ClosedError
from pyllama_raw.prompts.rendering import processes
from pyllama_raw.prompts.rendering.processes import (
    Exceeded,
    TemplateHere,
    TemplateProcesses,
    TemplateRefused,
    Unreadable,
)
from tests.support.limits import LIMIT_S

CHAT = [{"role": "user", "content": "a"}]
ENDLESS = (
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
)


@pytest.fixture
def start():
    """Start processes of a template; they end with the test."""
    started = []

    def start(source: str, max_cpu_s: float = 5) -> TemplateProcesses:
        started.append(TemplateProcesses(source, {"bos_token": "<s>"}, max_cpu_s))
        return started[-1]

    yield start
    for one in started:
        one.close()


def pids(templates: TemplateProcesses) -> list[int]:
    return sorted(process._popen.pid for process in templates._all)


def test_a_process_is_kept(start):
    """
    All chats of a template go to one process, unless they come at once.
    """
    templates = start("{{ bos_token ~ messages[0].content }}")

    first = templates.render(CHAT)
    kept = pids(templates)
    second = templates.render(CHAT)

    assert first == second == ("<s>a", "tttm")
    assert pids(templates) == kept
    assert len(kept) == 1


def test_time_is_bounded(start):
    """
    A template that computes for too long is ended; the next chat has a new process.
    """
    source = "{% if messages[0].content == 'b' %}" + ENDLESS + "{% endif %}"
    templates = start(source, max_cpu_s=1)
    templates.render(CHAT)
    (pid,) = pids(templates)

    with pytest.raises(Exceeded, match="within 1 s of CPU time"):
        templates.render([{"role": "user", "content": "b"}])

    assert templates.render(CHAT) == ("", "")
    assert pids(templates) != [pid]


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10**9 }}",
        "{{ '%1000000000d' % 1 }}",
        "{{ '{:1000000000}'.format(1) }}",
        "{{ 'x'|center(10**9) }}",
        "{{ messages|tojson(indent=10**9) }}",
        "{{ 'x' * 20000000 }}",
    ],
)
def test_memory_is_bounded(start, source):
    """
    No operation takes more memory than is allowed, and no prompt is larger.
    """
    with pytest.raises(Exceeded, match="512 MiB"):
        start(source).render(CHAT)


@pytest.mark.parametrize(
    "source",
    [
        "{% if %}",
        "{% break %}",
        "{% continue %}",
        "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
        "{% if 1 %}" * 200 + "{% endif %}" * 200,
        "{{ " + "-" * 3000 + "1 }}",
        "{{ 1" + "0" * 5000 + " }}",
    ],
)
def test_what_cannot_be_compiled_is_unreadable(start, source):
    """
    Whatever Jinja or Python raises for a template, it is one error with a reason.
    """
    with pytest.raises(Unreadable) as caught:
        start(source).render(CHAT)
    assert str(caught.value)


@pytest.mark.parametrize(
    "source",
    ["{{ messages[0].a.b.c }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}"],
)
def test_errors_of_a_template_leave_its_process(start, source):
    """
    Errors that Python can raise, recursion without end among them, end nothing.
    """
    templates = start(source)
    for _ in range(2):
        with pytest.raises(TemplateRefused):
            templates.render(CHAT)

    assert len(pids(templates)) == 1


def test_close_ends_what_is_rendered(start):
    """
    close() does not wait for a template, nor do those who waited for their turn.
    """
    templates = start(ENDLESS)
    errors = []

    def render() -> None:
        with pytest.raises(ClosedError) as caught:
            templates.render(CHAT)
        errors.append(caught.type)

    threads = [Thread(target=render) for _ in range(N_PROCESSES + 2)]
    for thread in threads:
        thread.start()
    templates.close()
    for thread in threads:
        thread.join(timeout=LIMIT_S)

    assert errors == [ClosedError] * len(threads)
    assert pids(templates) == []


def test_a_crash_ends_one_chat(start):
    """
    A process that is killed is an error of its chat; the next one has another.
    """
    templates = start("{{ messages[0].content }}")
    templates.render(CHAT)
    os.kill(pids(templates)[0], signal.SIGSEGV)

    with pytest.raises(Exceeded, match="without ending its process"):
        templates.render(CHAT)

    assert templates.render(CHAT) == ("a", "m")


def test_an_interrupt_at_the_start_is_not_for_it(start, monkeypatch):
    """
    Ctrl-C reaches a process that has no session of its own yet; it starts all the same.
    """

    class Interrupted(subprocess.Popen):
        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.send_signal(signal.SIGINT)

    monkeypatch.setattr(processes.subprocess, "Popen", Interrupted)

    assert start("{{ messages[0].content }}").render(CHAT) == ("a", "m")


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="waits by Linux's pidfd")
def test_a_process_ends_with_its_parent():
    """
    A program that is killed leaves no process: the input of its templates ends.
    """
    code = f"""
import os, signal
from pyllama_raw.prompts.rendering.processes import TemplateProcesses
templates = TemplateProcesses("x", {{}})
templates.render({CHAT!r})
print(*(process._popen.pid for process in templates._all), flush=True)
input()
os.kill(os.getpid(), signal.SIGKILL)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent, closing_fd(os.pidfd_open(int(parent.stdout.readline()))) as pidfd:
        parent.communicate("\n", timeout=LIMIT_S)
        ended, _, _ = select([pidfd], [], [], 60)

    assert parent.returncode == -signal.SIGKILL
    assert ended == [pidfd]


@contextmanager
def closing_fd(fd: int):
    """Close *fd* at the end."""
    try:
        yield fd
    finally:
        os.close(fd)


def test_surroundings_do_not_matter(start, monkeypatch, tmp_path):
    """
    Neither modules of the current folder nor Python's variables reach the process.
    """
    (tmp_path / "json.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PYTHONSTARTUP", str(tmp_path / "json.py"))

    assert start("{{ messages[0].content }}").render(CHAT) == ("a", "m")


def test_no_python_to_start(start, monkeypatch):
    """
    A program that is no Python says so when a chat comes.
    """
    monkeypatch.setattr(processes.sys, "executable", "/no/such/app")
    monkeypatch.setattr(processes.sys, "_base_executable", None)
    monkeypatch.setattr(processes.sys, "base_prefix", "/no/such/folder")

    with pytest.raises(OSError, match="PYLLAMA_RAW_PYTHON"):
        start("x").render(CHAT)


def test_what_runs_between_lines_of_a_template_is_not_stopped():
    """
    As a callback of the garbage collector, whose error would be lost; the template is stopped. One of
    them ends the processes of an engine that nobody holds any more.
    """
    template = TemplateHere(ENDLESS, {"bos_token": "<s>"}, max_cpu_s=0.05)
    endings = []

    def callback(phase, _):
        processes._end_all(set())
        endings.append(phase)

    gc.callbacks.append(callback)
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        with pytest.raises(Exceeded):
            template.render(CHAT)
    finally:
        gc.set_threshold(*threshold)
        gc.callbacks.remove(callback)

    assert "stop" in endings
