"""`bench` as a person runs it, on a tiny model."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pyllama_raw.cli.command import main
from pyllama_raw.engine.logs import (
    RequestLog,
    RequestRecord,
    read_records,
    write_records,
)
from pyllama_raw.lab.sim import Lengths, Machine, Workload, simulate
from tests.support.limits import LIMIT_S
from tests.support.tiny import tiny_model

ROOT = Path(__file__).parents[2]


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pyllama_raw", "bench", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},  # share busy machines
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.native
def test_run_measures_shows_and_compares(tmp_path: Path):
    """
    Clients leave, others stay; the file has one result a round and point, and comparing
    the file with itself finds no change.
    """
    out = tmp_path / "out.jsonl"

    done = bench(
        *("run", "cancel-storm", "--model", str(tiny_model("llama")), "--rounds", "2"),
        *("--requests", "8", "--prompt-tokens", "9", "--output-tokens", "6"),
        *("--clients", "2", "4", "--slots", "2", "--n-ctx", "256", "--warm-up", "1"),
        *("--goodput", "e2el:100000", "--out", str(out)),
    )

    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in out.read_text().splitlines()]
    options = results[0]["options"]
    assert [name for name, value in options.items() if "<" in str(value)] == []
    assert [(r["round"], r["max_concurrency"]) for r in results] == [
        (0, 2),
        (0, 4),
        (1, 2),
        (1, 4),
    ]
    for result in results:
        assert result["completed"] + result["left"] == 8
        assert result["failed"] == 0
        assert result["request_goodput"] == result["request_throughput"]
        assert result["p99_queue_ms"] is not None
        assert result["engine"]["steps"] > 0
        assert result["peak_rss_bytes"] > 0
    for result in results:
        result["others_cpus"] = 0.0  # whatever runs beside this test
    out.write_text("\n".join(map(json.dumps, results)))
    compared = bench("compare", str(out), str(out))
    assert compared.returncode == 0, compared.stderr
    assert "too few rounds" in compared.stdout
    assert "worse" not in compared.stdout


@pytest.mark.native
def test_memory_pressure_makes_the_engine_preempt_or_wait(tmp_path: Path):
    """
    It opens with half of the cells that its slots need, and every call completes.
    """
    out = tmp_path / "out.jsonl"

    done = bench(
        *("run", "memory-pressure", "--model", str(tiny_model("llama"))),
        *("--rounds", "1", "--requests", "6", "--slots", "4", "--prompt-tokens", "9"),
        *("--output-tokens", "40", "--out", str(out)),
    )

    assert done.returncode == 0, done.stderr
    (result,) = map(json.loads, out.read_text().splitlines())
    assert (result["completed"], result["options"]["n_ctx"]) == (6, 98)


@pytest.mark.native
def test_an_interrupted_run_loses_nothing(tmp_path: Path):
    """
    What the file held stays, and what was measured lies beside it.
    """
    out = tmp_path / "out.jsonl"
    out.write_text("of last week\n")
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "pyllama_raw", "bench", "run", "offline"),
            *("--model", str(tiny_model("llama")), "--requests", "2", "--slots", "2"),
            *("--prompt-tokens", "9", "--output-tokens", "6", "--n-ctx", "256"),
            *("--rounds", "100000", "--out", str(out)),
        ],
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        first = process.stderr.readline()
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=LIMIT_S)

    (part,) = tmp_path.glob("*.part")
    assert first.startswith("1/100000 engine")
    assert process.returncode == 130
    assert out.read_text() == "of last week\n"
    assert json.loads(part.read_text().splitlines()[0])["completed"] == 2
    assert rest.splitlines()[-1] == f"{out} is as it was; unfinished: {part}"


@pytest.mark.native
def test_a_place_that_cannot_be_written_is_told_before_the_run(tmp_path, capsys):
    """
    Nothing is measured; status 2.
    """
    model, wrong = str(tiny_model("llama")), str(tmp_path / "no" / "file")

    status = main(["bench", "run", "offline", "--model", model, "--out", wrong])

    assert (status, capsys.readouterr().err) == (
        2,
        f"error: {wrong} cannot be written: there is no folder {tmp_path}/no\n",
    )


def recorded(tmp_path: Path) -> Path:
    """A request log of two clients."""
    log = RequestLog()
    simulate(
        Workload(6, 500.0, prompt=Lengths(9), output=Lengths(3), n_clients=2),
        Machine(n_slots=2, n_ctx_slot=64),
        watchers=[log],
    )
    write_records(tmp_path / "recorded.jsonl", log)
    return tmp_path / "recorded.jsonl"


@pytest.mark.native
def test_a_log_is_replayed_with_its_clients(tmp_path: Path):
    """
    The request log of the run has who sent what; calls that warm up are marked in it.
    """
    recorded_log, logged = recorded(tmp_path), tmp_path / "requests.jsonl"

    done = bench(
        *("run", "trace", "--trace", str(recorded_log), "--rounds", "1"),
        *("--model", str(tiny_model("llama")), "--slots", "2", "--n-ctx", "256"),
        *("--warm-up", "2", "--request-log", str(logged), "--policy", "vtc"),
    )

    records = read_records(logged, RequestRecord)
    clients = sorted(r.client for r in read_records(recorded_log, RequestRecord))
    assert done.returncode == 0, done.stderr
    assert sorted(r.client for r in records if not r.warms_up) == clients
    assert [r.client for r in records if r.warms_up] == [None, None]
    assert len(set(clients)) == 2


@pytest.mark.native
def test_what_a_server_is_not_sent_is_told(tmp_path: Path, capsys):
    """
    Before the run, which fails here because nobody listens.
    """
    command = ["bench", "run", "trace", "--trace", str(recorded(tmp_path))]
    command += ["--target", "openai=http://127.0.0.1:1", "--rounds", "1"]

    status = main([*command, "--model", str(tiny_model("llama")), "--warm-up", "0"])

    assert status == 1
    assert capsys.readouterr().err.startswith(
        "openai=http://127.0.0.1:1: requests have client, which no server is sent\n"
    )


@pytest.mark.native
def test_a_mistake_in_a_trace_is_named(tmp_path: Path, capsys):
    """
    Turns of text cannot follow turns of ids; the error is no group and no traceback.
    """
    trace = tmp_path / "trace.jsonl"
    turns = [{"prompt_tokens": 3, "max_tokens": 2}]
    turns.append({"prompt": "x", "max_tokens": 1, "after": 0})
    trace.write_text("\n".join(map(json.dumps, turns)))
    model = str(tiny_model("llama"))

    status = main(["bench", "run", "trace", "--trace", str(trace), "--model", model])

    assert status == 2
    assert "error: turns of one chat are all text" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["run", "offline", "--clients", "2", "--rate", "1"], "not both"),
        (["run", "offline", "--burstiness", "1"], "give --rate"),
        (["run", "offline", "--target", "x"], "give engine, openai=URL"),
        (["run", "offline", "--turns", "3"], "turns=3"),
        (["run", "trace"], "needs --trace"),
        (["run", "offline", "--trace", "x"], "is for the workload trace"),
        (["run", "offline", "--goodput", "fast"], "goodput='fast'"),
        (["compare", os.devnull, os.devnull], "no results"),
        (["report", os.devnull], "no results"),
    ],
)
def test_mistakes_are_named(arguments, message, capsys):
    """
    Before anything is loaded or measured; status 2.
    """
    if arguments[0] == "run":
        arguments = [*arguments, "--model", str(tiny_model("llama"))]

    assert main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_without_the_extra_it_says_what_to_install(monkeypatch, capsys):
    """
    The other commands need none of it.
    """
    monkeypatch.delattr("pyllama_raw.lab.bench", raising=False)
    monkeypatch.setitem(sys.modules, "pyllama_raw.lab.bench", None)

    assert main(["bench", "report", "x"]) == 2
    assert "pip install 'pyllama_raw[bench]'" in capsys.readouterr().err
