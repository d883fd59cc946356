"""Logs of an engine that runs: in memory and in files."""

import os
import resource
import stat
from pathlib import Path

import pytest

from pyllama_raw import LogConfig, SamplingParams
from pyllama_raw.engine.logs import (
    Logs,
    RecordFile,
    RequestLog,
    RequestRecord,
    StepLog,
    open_logs,
    read_records,
)
from pyllama_raw.engine.watcher import StepRecord
from pyllama_raw.errors import ConfigError
from pyllama_raw.testing import fake_engine

pytestmark = pytest.mark.anyio
RECORD = StepRecord(0.0, 1.0, 2, 3, 4, 5, 6, 7, 8, 9)


async def test_files_have_all_that_memory_has(tmp_path):
    """
    A closed engine has written every step and request, of which memory keeps the last.
    """
    steps, requests = tmp_path / "steps.jsonl", tmp_path / "requests.jsonl"
    config = LogConfig(
        max_steps=3, max_requests=2, step_log=steps, request_log=requests
    )
    async with fake_engine(logs=open_logs(config)) as engine:
        for n in range(1, 5):
            await engine.complete("hello", SamplingParams(max_tokens=n))

    assert len(engine.step_log()) == 3
    assert read_records(steps, StepRecord)[-3:] == engine.step_log()
    assert read_records(requests, RequestRecord)[-2:] == engine.request_log()
    assert [record.n_output for record in read_records(requests, RequestRecord)] == [
        1,
        2,
        3,
        4,
    ]
    assert (
        sum(len(record.decodes) for record in read_records(steps, StepRecord))
        == 0 + 1 + 2 + 3
    )


async def test_without_options_nothing_is_kept():
    """
    An engine has no logs unless it is told to.
    """
    async with fake_engine() as engine:
        await engine.complete("hello", SamplingParams(max_tokens=2))

    logs = open_logs(LogConfig())

    assert (logs.steps, logs.requests, logs.watchers) == (None, None, ())
    assert (engine.step_log(), engine.request_log()) == ([], [])


def test_a_file_that_cannot_be_written_is_refused_at_once(tmp_path):
    """
    The error names it; the other one, which was opened before, is closed.
    """
    config = LogConfig(step_log=tmp_path / "steps", request_log=tmp_path / "no" / "r")

    with pytest.raises(ConfigError, match="r cannot be written"):
        open_logs(config)


def test_a_file_has_one_log(tmp_path):
    """
    A second log is refused while the first one is open, and takes nothing from it.
    """
    file = RecordFile(tmp_path / "steps", StepRecord)
    file.put(RECORD)
    with pytest.raises(ConfigError, match="steps belongs to another log"):
        RecordFile(tmp_path / "steps", StepRecord)
    file.close()

    assert read_records(tmp_path / "steps", StepRecord) == [RECORD]
    RecordFile(tmp_path / "steps", StepRecord).close()
    assert read_records(tmp_path / "steps", StepRecord) == []


def test_a_record_that_cannot_be_written_ends_the_file(tmp_path, caplog):
    """
    The log says so, and nobody waits for the rest.
    """
    file = RecordFile(tmp_path / "steps", StepRecord)
    file.put(RECORD._replace(status=object()))
    file.close()

    (record,) = caplog.records
    assert "steps is not written any more" in record.getMessage()


class RaisingLog(StepLog):
    """Raises in the second step."""

    def stepped(self, step):
        if list(self):
            raise SystemExit("no more")
        super().stepped(step)


async def test_an_engine_goes_on_without_a_step_log_that_raises(caplog):
    """
    Requests get all their tokens; the log of Python tells it once, and it is counted.
    """
    logs = Logs(steps=RaisingLog(), requests=RequestLog())
    async with fake_engine(logs=logs) as engine:
        for _ in range(2):
            await engine.complete("hello", SamplingParams(max_tokens=3))
        stats = engine.stats()

    assert [record.n_output for record in engine.request_log()] == [3, 3]
    assert len(engine.step_log()) == 1
    assert stats.watcher_faults == 1
    assert [r.getMessage() for r in caplog.records if r.levelname == "ERROR"] == [
        "RaisingLog raised; it is told nothing more"
    ]


def test_a_full_disk_ends_the_file_and_nothing_else(tmp_path, caplog):
    """
    The log says so, and put() and close() go on as before.
    """
    file = RecordFile(tmp_path / "steps", StepRecord)
    file.put(RECORD)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1, limits[1]))
    try:
        file.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    file.put(RECORD)
    file.close()

    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "steps is not written any more" in caplog.text


@pytest.mark.parametrize("option", ["step_log", "request_log"])
@pytest.mark.parametrize("kind", ["pipe", "read pipe", "folder", "device", "nul"])
def test_what_is_no_regular_file_is_refused_at_once(option, kind, tmp_path):
    """
    Opening a pipe does not wait for a reader, and one that is read gets nothing.
    """
    path = tmp_path / "log"
    if kind == "folder":
        path.mkdir()
    elif kind == "device":
        path = Path(os.devnull)
    elif kind == "nul":
        path = Path("log\0")
    else:
        os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK) if kind == "read pipe" else None

    with pytest.raises(ConfigError, match=r"is no regular file|cannot be written"):
        open_logs(LogConfig(**{option: path}))

    if reader is not None:
        assert os.read(reader, 1) == b""
        os.close(reader)


@pytest.mark.parametrize(
    "content", [b"GGUF\x03\0\0\0", b"notes\n", b'{"request_id": 1}\n', b"\n"]
)
@pytest.mark.parametrize("is_link", [False, True])
def test_a_file_of_somebody_else_keeps_what_it_has(content, is_link, tmp_path):
    """
    A model that is mapped, notes, and a log of another kind are refused and untouched.
    """
    file, path = tmp_path / "file", tmp_path / "log"
    file.write_bytes(content)
    (path.symlink_to if is_link else path.hardlink_to)(file)
    config = LogConfig(step_log=path)

    with pytest.raises(ConfigError, match="has something else than such a log"):
        open_logs(config)

    assert file.read_bytes() == content


def test_a_log_is_for_its_user_alone(tmp_path):
    """
    Others of the machine cannot read when users sent what.
    """
    steps, requests = tmp_path / "steps", tmp_path / "requests"
    open_logs(LogConfig(step_log=steps, request_log=requests)).close()

    modes = {stat.S_IMODE(path.stat().st_mode) for path in (steps, requests)}
    assert modes == {0o600}


def test_records_beyond_the_limit_are_counted(tmp_path, caplog, monkeypatch):
    """
    The oldest that wait are lost, and the log says how many.
    """
    monkeypatch.setattr("pyllama_raw.engine.logs.MAX_WAITING", 2)
    monkeypatch.setattr("pyllama_raw.engine.logs.WRITE_S", 60.0)
    file = RecordFile(tmp_path / "steps", StepRecord)
    for n in range(5):
        file.put(RECORD._replace(at_s=float(n)))
    file.close()

    assert [record.at_s for record in read_records(tmp_path / "steps", StepRecord)] == [
        3.0,
        4.0,
    ]
    assert "steps lacks 3 records" in caplog.text
