"""`trace`: from log files to a file that Perfetto opens."""

import pytest

from pyllama_raw import LogConfig, SamplingParams
from pyllama_raw.cli import main
from pyllama_raw.engine.logs import open_logs
from pyllama_raw.lab.chrome_trace import write_trace
from pyllama_raw.testing import fake_engine
from tests.engine.test_chrome_trace import Checked


@pytest.mark.anyio
async def test_a_trace_of_files_is_that_of_the_engine(tmp_path):
    """
    The command writes what write_trace() does, from logs that files have.
    """
    steps, requests = tmp_path / "steps", tmp_path / "requests"
    by_engine, by_command = tmp_path / "1.json", tmp_path / "2.json"
    config = LogConfig(
        max_steps=100, max_requests=100, step_log=steps, request_log=requests
    )
    async with fake_engine(logs=open_logs(config)) as engine:
        await engine.complete("hello", SamplingParams(max_tokens=3))
    with by_engine.open("w") as file:
        write_trace(file, engine.step_log(), engine.request_log())

    files = [str(steps), "--requests", str(requests), "--out", str(by_command)]

    assert main(["trace", *files]) == 0
    assert by_command.read_text() == by_engine.read_text()
    assert len(Checked(by_engine.read_text()).flows) == 1


def test_a_file_that_is_no_log_is_named(tmp_path, capsys):
    """
    With its line; nothing is written.
    """
    (tmp_path / "steps").write_text("[]")

    assert main(["trace", str(tmp_path / "steps"), "--out", str(tmp_path / "o")]) == 2
    assert "steps, line 1" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()
