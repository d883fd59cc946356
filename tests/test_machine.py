"""Threads for computing, what others use of the machine, and the Python of child processes."""

import os
import subprocess
import sys
import textwrap

import pytest

from pyllama_raw import ContextConfig
from pyllama_raw.options import machine
from pyllama_raw.options.machine import (
    SIBLINGS,
    VARIABLE,
    NoInterpreter,
    OtherLoad,
    busy_s,
    interpreter,
    n_cpus,
    n_threads,
    threads_for,
)
from tests.support.tiny import tiny_model

V2 = {
    "/proc/self/mountinfo": (
        "23 1 0:5 / /proc rw,relatime - proc proc rw\n"
        "41 31 0:38 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw\n"
    ),
    "/proc/self/cgroup": "0::/a/b\n",
}
V1 = {
    "/proc/self/mountinfo": (
        "31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755\n"
        "32 31 0:29 /docker/x /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu,cpuacct\n"
        "33 31 0:30 / /sys/fs/cgroup/cpuset rw - cgroup cgroup rw,cpuset\n"
    ),
    "/proc/self/cgroup": "9:cpuset:/other\n8:cpu,cpuacct:/docker/x/y\n0::/\n",
}
V1_FOLDER = "/sys/fs/cgroup/cpu"


def siblings(*cores: str) -> dict[str, str]:
    """The files of a machine whose cores are these lists of CPUs."""
    return {
        SIBLINGS.format(cpu): f"{core}\n"
        for core in cores
        for part in core.split(",")
        for cpu in _range(part)
    }


def _range(part: str) -> range:
    first, _, last = part.partition("-")
    return range(int(first), int(last or first) + 1)


def v1(quota: int, period: int, folder: str = V1_FOLDER) -> dict[str, str]:
    return {
        f"{folder}/cpu.cfs_quota_us": f"{quota}\n",
        f"{folder}/cpu.cfs_period_us": f"{period}\n",
    }


def v2(text: str, folder: str) -> dict[str, str]:
    return {f"/sys/fs/cgroup{folder}/cpu.max": f"{text}\n"}


SMT = siblings("0,4", "1,5", "2,6", "3,7")
PAIRS = siblings("0-1", "2-3")


@pytest.mark.parametrize(
    ("cpus", "files", "expected"),
    [
        pytest.param({0, 1, 2}, {}, 3, id="nothing known: every CPU is a core"),
        pytest.param(set(range(8)), SMT, 4, id="siblings count once"),
        pytest.param({0, 1, 2, 3}, PAIRS, 2, id="siblings written as a range"),
        pytest.param({0, 4}, SMT, 1, id="both threads of one core"),
        pytest.param({4, 5}, SMT, 2, id="second threads of two cores"),
        pytest.param(set(), {}, 1, id="at least one"),
        pytest.param(set(range(8)), SMT | V2, 4, id="no quota file"),
        *(
            pytest.param(
                set(range(8)), SMT | V2 | v2(text, folder), expected, id=f"v2 {text}"
            )
            for text, folder, expected in (
                ("max 100000", "/a/b", 4),
                ("800000 100000", "/a/b", 4),
                ("300000 100000", "/a/b", 3),
                ("150000 100000", "/a/b", 1),
                ("50000 100000", "/a/b", 1),
                ("200000 100000", "/a", 2),
                ("200000 100000 ", "", 2),
                ("", "/a/b", 4),
                ("garbage", "/a/b", 4),
                ("100000 0", "/a/b", 4),
            )
        ),
        *(
            pytest.param(
                set(range(8)), SMT | V1 | v1(quota, 100_000, V1_FOLDER + folder), n,
                id=f"v1 {quota}{folder}",
            )
            for quota, folder, n in (
                (-1, "/y", 4), (250_000, "/y", 2), (99_999, "/y", 1),
                (300_000, "", 3), (900_000, "/y", 4), (100_000, "/z", 4),
            )
        ),
        pytest.param(
            set(range(8)),
            SMT | V2 | v2("300000 100000", "/a/b") | v2("200000 100000", "/a"),
            2,
            id="the tightest of a cgroup and what it lies in",
        ),
        pytest.param(
            set(range(8)),
            dict.fromkeys(V2, "\n: - :\n0\n") | SMT,
            4,
            id="files of another form",
        ),
        pytest.param(
            set(range(8)),
            SMT | V2 | {"/proc/self/cgroup": "0::/../gone\n"} | v2("200000 100000", ""),
            2,
            id="a cgroup outside of what is mounted",
        ),
    ],
)  # fmt: skip
def test_one_thread_a_core_within_the_quota(cpus, files, expected):
    """
    What /proc and /sys say decides; what they do not say limits nothing.
    """
    assert threads_for(cpus, files.get) == expected


def test_the_default_is_what_this_machine_has():
    """
    ContextConfig takes it where nobody names a number; a number is taken as it is.
    """
    assert ContextConfig().threads == n_threads()
    assert 1 <= n_threads() <= n_cpus() <= (os.cpu_count() or 1)
    assert ContextConfig(n_threads=7).threads == 7


class Counters:
    """Seconds so far: of the machine, of this process, and on the wall."""

    def __init__(self, *steps: tuple[float, float, float]) -> None:
        self.steps, self.now = list(steps), [0.0, 0.0, 0.0]

    def others(self) -> OtherLoad:
        return OtherLoad(*(lambda i=i: self.now[i] for i in range(3)))

    def step(self) -> None:
        self.now = [a + b for a, b in zip(self.now, self.steps.pop(0), strict=True)]


@pytest.mark.parametrize(
    ("steps", "cpus"),
    [
        ([(2.0, 2.0, 1.0)], 0.0),  # all of it is our own
        ([(2.0, 1.0, 1.0), (1.0, 1.0, 1.0)], 0.5),  # the mean over both
        ([(0.9, 1.0, 1.0)], 0.0),  # counters have ticks: never below 0
        ([], None),
    ],
)
def test_others_are_what_is_busy_and_not_our_own(steps, cpus):
    """
    Seconds of others by seconds of the wall, over all that was watched.
    """
    counters = Counters(*steps)
    others = counters.others()

    while counters.steps:
        with others.watched():
            counters.step()

    assert others.cpus == cpus


def test_a_machine_that_does_not_tell_is_not_called_quiet(monkeypatch, tmp_path):
    """
    Without its counters there is no figure.
    """
    monkeypatch.setattr(machine, "STAT", tmp_path / "none")
    others = OtherLoad()

    with others.watched():
        pass

    assert (busy_s(), others.cpus) == (None, None)


def test_idle_waiting_and_guests_are_not_busy(monkeypatch, tmp_path):
    """
    Linux counts guests in user, too; interrupts and what is stolen are work of others.
    """
    stat = tmp_path / "stat"
    stat.write_text("cpu  100 200 300 4000 5000 10 20 30 40 50\ncpu0 1 2 3\n")
    monkeypatch.setattr(machine, "STAT", stat)
    monkeypatch.setattr(machine.os, "sysconf", lambda name: 10)

    assert busy_s() == 66.0


@pytest.fixture
def program(monkeypatch, tmp_path):
    """A program whose name is not Python's, as sys.executable."""
    path = tmp_path / "app"
    path.write_text("#!/bin/sh\n")
    path.chmod(0o755)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr(machine.sys, "executable", str(path))
    return path


def alone(monkeypatch):
    """No Python lies where one is looked for."""
    monkeypatch.setattr(machine.sys, "_base_executable", None)
    monkeypatch.setattr(machine.sys, "base_prefix", "/no/such/folder")


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
    monkeypatch.setattr(machine.sys, "executable", executable)
    alone(monkeypatch)

    with pytest.raises(NoInterpreter, match=VARIABLE):
        interpreter()


def test_a_frozen_application_is_not_started(monkeypatch, program):
    """
    Also if its name is Python's.
    """
    monkeypatch.setattr(machine.sys, "frozen", True, raising=False)
    monkeypatch.setattr(machine.sys, "executable", "/usr/bin/python3")
    monkeypatch.setattr(machine.sys, "_base_executable", "/usr/bin/python3")
    monkeypatch.setattr(machine.sys, "base_prefix", "/no/such/folder")

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
