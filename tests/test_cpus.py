"""One thread a physical core, within the CPUs and the quota that a process has."""

import os

import pytest

from pyllama_raw import ContextConfig
from pyllama_raw.options.machine import SIBLINGS, n_cpus, n_threads, threads_for

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
