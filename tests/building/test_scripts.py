"""scripts/bootstrap, scripts/demo and scripts/test, as far as they go without a build."""

import fcntl
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import build_lib
from tests.support.limits import LIMIT_S


def test_bootstrap_ends_where_the_build_cannot_begin(tmp_path):
    """
    Without a compiler nothing is installed first.
    """
    (tmp_path / "scripts").mkdir()
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    bootstrap = shutil.copy(
        build_lib.ROOT / "scripts" / "bootstrap", tmp_path / "scripts"
    )
    python = tmp_path / ".venv" / "bin" / "python"
    python.write_text(
        '#!/bin/sh\necho "$1 $2" | cut -c 1-20 >>calls\n[ "$2" != --key ]\n'
    )
    python.chmod(0o755)

    done = subprocess.run([bootstrap], cwd=tmp_path, check=False, timeout=LIMIT_S)

    calls = (tmp_path / "calls").read_text().splitlines()
    assert (done.returncode, calls[1:]) == (1, ["build_lib.py --key"])


FAKE_PYTHON = """#!/bin/sh
case "$1 $2" in
    "-c "*) exec "{python}" "$@" ;;
    "build_lib.py --key") echo key; exit ;;
    "-VV ") exit ;;
esac
echo "$@" | sed -e "s/.*version-check install/install/" -e "s/ --no-.*//" >>calls
"""


TOOLS = ["build_lib.py --fetch", "install -r .venv/tools.txt"]


BUILT = ["build_lib.py", "install -r .venv/packages.txt"]


def make_checkout(folder: Path) -> Path:
    """A checkout with an environment whose Python notes its calls; returns scripts/bootstrap."""
    for name in ("scripts", ".venv/bin", "pyllama_raw/_ffi"):
        (folder / name).mkdir(parents=True)
    shutil.copy(build_lib.ROOT / "pyproject.toml", folder)
    python = folder / ".venv" / "bin" / "python"
    python.write_text(FAKE_PYTHON.format(python=sys.executable))
    python.chmod(0o755)
    (folder / "pyllama_raw" / "_ffi" / "_llama.abi3.so").touch()
    bootstrap = build_lib.ROOT / "scripts" / "bootstrap"
    return Path(shutil.copy(bootstrap, folder / "scripts"))


def test_an_environment_without_pip_gets_it(tmp_path):
    """
    As uv makes them, under the same name.
    """
    bootstrap = make_checkout(tmp_path)
    (tmp_path / "pip.py").write_text("raise ImportError")
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}

    subprocess.run(
        [bootstrap, "--demo"],
        cwd=tmp_path,
        env=environment,
        check=True,
        timeout=LIMIT_S,
    )

    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[0] == "-m ensurepip"


@pytest.mark.skipif(shutil.which("flock") is None, reason="without it none waits")
def test_of_two_in_one_checkout_the_second_waits(tmp_path):
    """
    Both would install into one environment.
    """
    bootstrap, calls = make_checkout(tmp_path), tmp_path / "calls"
    folder = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(folder, fcntl.LOCK_EX)
    with subprocess.Popen(
        [bootstrap, "--demo"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    ) as second:
        first_line = second.stderr.readline()
        has_begun = calls.exists()
        os.close(folder)  # the first one ends
        second.communicate(timeout=LIMIT_S)

    assert first_line == f"bootstrap: waiting for another one in {tmp_path}\n"
    assert (has_begun, second.returncode, calls.exists()) == (False, 0, True)


def test_a_demo_installs_what_a_program_needs(tmp_path):
    """
    And the model, each once. What tests need is added when it is asked for.
    """
    bootstrap, calls = make_checkout(tmp_path), tmp_path / "calls"

    ran, packages = [], []
    for options in (["--demo"], ["--demo"], []):
        calls.write_text("")
        subprocess.run([bootstrap, *options], cwd=tmp_path, check=True, timeout=LIMIT_S)
        ran.append(sorted(calls.read_text().splitlines()))
        packages.append((tmp_path / ".venv" / "packages.txt").read_text())

    stub = "-m scripts.sync_cdef --write-stub"
    model = "-W ignore -m pyllama_raw.options.models"
    assert ran == [
        sorted([*TOOLS, *BUILT, "install", model]),
        [],
        sorted([*TOOLS, *BUILT, "install", stub]),
    ]
    assert ["pytest" in text for text in packages] == [False, False, True]


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (["--cpu"], 2, "usage: scripts/test --cpu NAME [ARGUMENT OF PYTEST]..."),
        (["--llama"], 2, "usage: scripts/test --llama NAME [ARGUMENT OF PYTEST]..."),
        (
            ["--cpu", "haswel"],
            1,
            "build_lib: PYLLAMA_RAW_CPU=haswel: there is no such variant; variants are "
            "sse42, haswell, alderlake, skylakex, cascadelake, zen4, sapphirerapids, and "
            "sse42, avx2, avx512vnni, amx stand for some of them",
        ),
    ],
)
def test_a_wrong_name_is_refused_before_anything_is_built(
    tmp_path, arguments, code, line
):
    """
    A library for any CPU takes minutes, and another one to go back.
    """
    (tmp_path / "scripts").mkdir()
    tests = shutil.copy(build_lib.ROOT / "scripts" / "test", tmp_path / "scripts")
    bootstrap = tmp_path / "scripts" / "bootstrap"
    bootstrap.write_text("#!/bin/sh\ntouch bootstrapped\n")
    bootstrap.chmod(0o755)
    (tmp_path / "build_lib.py").symlink_to(build_lib.ROOT / "build_lib.py")

    process = subprocess.run(
        [tests, *arguments],
        cwd=tmp_path,
        env=os.environ | {"PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )

    assert (process.returncode, process.stderr.splitlines()) == (code, [line])
    assert not (tmp_path / "bootstrapped").exists()
