"""The Python that child processes run in."""

import os
import subprocess
import sys
import textwrap

import pytest

from pyllama_raw.options import machine as module
from pyllama_raw.options.machine import VARIABLE, NoInterpreter, interpreter
from tests.tiny import tiny_model


@pytest.fixture
def program(monkeypatch, tmp_path):
    """A program whose name is not Python's, as sys.executable."""
    path = tmp_path / "app"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(module.sys, "executable", str(path))
    return path


def alone(monkeypatch):
    """No Python lies where one is looked for."""
    monkeypatch.setattr(module.sys, "_base_executable", None)
    monkeypatch.setattr(module.sys, "base_prefix", "/no/such/folder")


def test_it_is_the_python_of_this_process():
    """
    Unless it is named.
    """
    assert interpreter() == sys.executable


def test_a_program_that_embeds_python_is_never_started(monkeypatch, program):
    """
    The Python that its library belongs to is, or there is a sentence.
    """
    found = interpreter()
    alone(monkeypatch)

    assert found != str(program)
    with pytest.raises(NoInterpreter, match=f"embeds Python.*{VARIABLE}"):
        interpreter()


@pytest.mark.parametrize("executable", [None, ""])
def test_a_process_without_a_program_has_no_python(monkeypatch, program, executable):
    """
    As where C began Python.
    """
    monkeypatch.setattr(module.sys, "executable", executable)
    alone(monkeypatch)

    with pytest.raises(NoInterpreter, match=VARIABLE):
        interpreter()


def test_a_frozen_application_is_not_started(monkeypatch, program):
    """
    Also if its name is Python's.
    """
    monkeypatch.setattr(module.sys, "frozen", True, raising=False)
    monkeypatch.setattr(module.sys, "executable", "/usr/bin/python3")
    monkeypatch.setattr(module.sys, "_base_executable", "/usr/bin/python3")
    monkeypatch.setattr(module.sys, "base_prefix", "/no/such/folder")

    with pytest.raises(NoInterpreter, match=f"frozen application.*{VARIABLE}"):
        interpreter()


def test_the_variable_wins(monkeypatch, program):
    """
    A name that is no program is said to be none.
    """
    monkeypatch.setenv(VARIABLE, str(program))
    named = interpreter()
    monkeypatch.setenv(VARIABLE, "/no/such/python")

    assert named == str(program)
    with pytest.raises(NoInterpreter, match="no program"):
        interpreter()


APPLICATION = """
import importlib.metadata, sys
with open({log!r}, "a") as log:
    log.write("started\\n")
sys.executable, sys.frozen = {start!r}, True
def version(name):
    raise importlib.metadata.PackageNotFoundError(name)
importlib.metadata.version = version
from pyllama_raw import Engine, SamplingParams
from pyllama_raw.runners.spawned import OwnServer
params = SamplingParams(max_tokens=4, ignore_eos=True)
OwnServer().check()
with Engine.open({model!r}) as engine:
    result = engine.complete([{{"role": "user", "content": "Hi"}}], params)
    print(len(result.token_ids), engine.info.versions["pyllama_raw"])
"""


@pytest.mark.native
def test_a_frozen_application_chats_and_starts_once(tmp_path):
    """
    Without metadata of the package, too.
    """
    log, program, start = (tmp_path / name for name in ("log", "app.py", "app"))
    model = str(tiny_model("llama"))
    source = APPLICATION.format(log=str(log), start=str(start), model=model)
    program.write_text(textwrap.dedent(source))
    start.write_text(f'#!/bin/sh\nexec {sys.executable} {program} "$@"\n')
    start.chmod(0o755)

    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [start], capture_output=True, text=True, env=env, check=False, timeout=120
    )

    assert done.stdout.split()[:1] == ["4"], done.stderr
    assert log.read_text().count("started") == 1
