"""How long a long job gives way to steps at a border (_ffi/step/runner.h)."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from build_lib import FFI_DIR
from scripts.sync_cdef import built_include
from tests.support.limits import LIMIT_S

pytestmark = pytest.mark.native

SOURCE = Path(__file__).with_name("give_way.cpp")


@pytest.fixture(scope="module")
def player(tmp_path_factory) -> Path:
    """The program of SOURCE."""
    include = built_include()
    if include is None:
        pytest.skip("the headers of libllama are not here")
    path = tmp_path_factory.mktemp("native") / "give_way"
    folders = [f"-I{FFI_DIR}", f"-I{include}"]
    compiler = shlex.split(os.environ.get("CXX") or "c++")
    command = [*compiler, "-std=c++17", "-pthread", *folders]
    subprocess.run([*command, str(SOURCE), "-o", str(path)], check=True)
    return path


def borders(player: Path, *steps: str) -> set[str]:
    """
    What is computed at a border, by kind; borders that no step reaches in time do not count.

    Nor do the first one, because steps begin before the job, and the last one.
    """
    parts = played(player, *steps).split("L")[1:-1]
    return {"".join(sorted(part)) for part in [p for p in parts if p][1:]}


def played(player: Path, *steps: str) -> str:
    command = [str(player), *steps]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=LIMIT_S, check=True
    )
    return done.stdout.strip()


def test_steps_have_as_long_as_the_part_took(player):
    """
    Streams go on until they have had the time of a part, and a long step is the only one.
    """
    found = [borders(player, step) for step in ("T30", "T60", "T120")]

    assert found == [{"TTTT"}, {"TT"}, {"T"}]


def test_a_stream_waits_for_one_part_only(player):
    """
    Where streams go on in every second or third step, each border waits for that step.
    """
    found = [
        borders(player, "R150", "T60"),
        borders(player, "R110", "R110", "T110"),
    ]

    assert found == [{"RT"}, {"RRT"}]


def test_prompts_without_streams_do_not_hold_a_job_up(player):
    """
    Steps that no stream goes on with have four times as long as the part, at most.
    """
    found = [borders(player, step) for step in ("R150", "R500")]

    assert found == [{"RRR"}, {"R"}]


def test_a_job_goes_on_where_no_step_waits(player):
    """
    Each part follows the one before it.
    """
    assert played(player) == "LLLLL"
