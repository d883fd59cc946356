"""What a process uses while it is watched."""

import os
import subprocess
import sys

from pyllama_raw.lab.targets import machine, watching

BUSY = """
import sys, time

held = bytearray(64 * 2**20)
held[::4096] = b"x" * len(held[::4096])
until = time.process_time() + 0.2
while time.process_time() < until:
    pass
print("done", flush=True)
sys.stdin.read()
"""


def test_a_process_is_watched():
    """
    Its CPU time and the largest memory that was seen.
    """
    command = [sys.executable, "-c", BUSY]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, **pipes) as process:
        with watching(process.pid) as use:
            process.stdout.readline()
        process.communicate()

    assert use.peak_rss_bytes > 64 * 2**20
    assert 0.1 < use.cpu_s <= use.wall_s + 0.1


def test_this_process_is_watched():
    """
    CPU time is that between begin and end.
    """
    with watching(os.getpid()) as use:
        sum(range(3_000_000))

    assert 0 < use.cpu_s <= use.wall_s + 0.1
    assert use.peak_rss_bytes > 0


def test_an_unknown_process_is_not_watched():
    """
    Nothing is known of it.
    """
    with watching(None) as use:
        pass

    assert (use.cpu_s, use.peak_rss_bytes) == (0.0, 0)


def test_the_machine_is_named():
    """
    Results say where they come from.
    """
    assert {"cpu", "n_cpus", "devices", "commit", "date"} <= set(machine())
