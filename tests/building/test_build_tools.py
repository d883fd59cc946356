"""Compilers and tools, and what a user is told of them."""

import os
import subprocess
import sys

import pytest

import build_lib
from build_lib import BuildError
from tests.support.builds import forbidden
from tests.support.limits import LIMIT_S


@pytest.mark.parametrize("variable", ["CC", "CXX", "PYLLAMA_RAW_CMAKE_ARGS"])
def test_a_quotation_that_is_not_closed_is_named(monkeypatch, variable):
    """
    With the variable and its text, before anything is built.
    """
    monkeypatch.setenv(variable, "gcc -DNAME='two words")

    with pytest.raises(
        BuildError, match=rf"^{variable}=gcc -DNAME='two words: No closing quotation: "
    ):
        build_lib.find_or_build()


def test_a_compiler_of_no_word_is_the_default(monkeypatch):
    """
    Scripts set variables to nothing, or to a space.
    """
    monkeypatch.delenv("CC", raising=False)
    key = build_lib.build_key()
    monkeypatch.setenv("CC", " ")

    assert build_lib.build_key() == key


def test_pip_shows_one_line_for_a_mistake(tmp_path):
    """
    No frame of setuptools, for an editable installation neither.
    """
    build = subprocess.run(
        [sys.executable, "setup.py", "build_ext", "--build-lib", str(tmp_path)],
        cwd=build_lib.ROOT,
        env=os.environ | {"PYLLAMA_RAW_CPU": "AVX2"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )

    assert build.returncode == 1
    assert build.stderr.splitlines() == [
        "error: PYLLAMA_RAW_CPU=AVX2: there is no such level; levels are native, any, "
        "sse42, avx2, avx512vnni, amx"
    ]


def test_missing_compiler_says_what_to_install(monkeypatch):
    """
    Without a compiler the error names the packages and the variable.
    """
    monkeypatch.setenv("CXX", "no-such-compiler")

    with pytest.raises(BuildError, match=r"no-such-compiler.*build-essential.*set CXX"):
        build_lib.build_key()


@pytest.mark.parametrize("named", [None, "PYLLAMA_RAW_PREFIX", "PYLLAMA_RAW_SOURCE"])
@pytest.mark.parametrize("compiler", ["CC", "CXX"])
def test_a_missing_compiler_is_said_first(monkeypatch, tmp_path, compiler, named):
    """
    Before a download, and before anything is wrong with what the user names.
    """
    monkeypatch.setenv(compiler, "no-such-compiler")
    monkeypatch.setattr(build_lib.fetch, "fetch", forbidden)
    if named:
        monkeypatch.setenv(named, str(tmp_path))

    with pytest.raises(BuildError, match=f"no compiler.*set {compiler}"):
        build_lib.find_or_build()


def test_a_missing_tool_is_said_before_a_download(monkeypatch):
    """
    Nobody waits for the source to learn that cmake is not there.
    """

    def missing(name: str) -> str:
        raise BuildError(f"no {name}")

    monkeypatch.setattr(build_lib.toolchain, "find_tool", missing)
    monkeypatch.setattr(build_lib.fetch, "fetch", forbidden)

    with pytest.raises(BuildError, match="no cmake"):
        build_lib.find_or_build()


def test_missing_tool_says_what_to_install(monkeypatch, tmp_path):
    """
    Without cmake the error gives the pip command.
    """
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(build_lib.toolchain.sysconfig, "get_path", lambda _: "")

    with pytest.raises(BuildError, match="-m pip install cmake"):
        build_lib.toolchain.find_tool("cmake")


def test_python_without_headers_says_what_to_install(monkeypatch, tmp_path):
    """
    A Python without Python.h is refused before the compiler stumbles over it.
    """
    monkeypatch.setattr(
        build_lib.toolchain.sysconfig, "get_path", lambda _: str(tmp_path)
    )

    with pytest.raises(BuildError, match="python3-dev"):
        build_lib.toolchain.check_python_headers()


def test_failed_command_shows_its_errors():
    """
    A failed build shows the error lines and what to check, with the command.
    """
    code = "print('note'); print('x.cpp:1: error: no such type'); raise SystemExit(3)"

    with pytest.raises(BuildError, match="failed with code 3") as caught:
        build_lib.toolchain.run(sys.executable, "-c", code)

    assert "x.cpp:1: error: no such type" in str(caught.value)
    assert "PYLLAMA_RAW_CMAKE_ARGS" in str(caught.value)


def test_long_build_says_how_far_it_is(capsys):
    """
    Every tenth of the steps of ninja is one line.
    """
    code = "for n in range(1, 101): print(f'[{n}/100] compiling')"

    build_lib.toolchain.run(sys.executable, "-c", code)

    lines = capsys.readouterr().err.splitlines()
    assert lines == [f"build_lib: compiled {n} of 100" for n in range(10, 101, 10)]


@pytest.mark.parametrize(("setting", "number"), [("3", 3), ("0", 1), ("", 2), ("x", 2)])
def test_compilers_are_as_many_as_the_user_says(monkeypatch, setting, number):
    """
    By the variable of cmake; else one for each CPU.
    """
    monkeypatch.setattr(build_lib.toolchain, "n_cpus", lambda: 2)
    monkeypatch.setenv("CMAKE_BUILD_PARALLEL_LEVEL", setting)

    assert build_lib.toolchain.n_jobs() == number
