"""The benchmarks: their arithmetic, their workloads, and that the scripts run."""

import json
import math
import os
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.fakes import engine_host_s
from benchmarks.figures import over_http, served
from benchmarks.load.measure import Claim, Report, median_ratio, percentile
from benchmarks.load.workloads import Chat, generator, texts, turns
from benchmarks.peers import serving
from benchmarks.peers.openers import PEERS
from benchmarks.peers.ours import toml
from pyllama_raw import ContextConfig, EngineConfig, SchedulerConfig
from pyllama_raw.serve.deployment import Deployment, read
from tests.support.tiny import tiny_model

ROOT = Path(__file__).parents[1]
EMBEDDER = "a model of vectors"


def make_report(**options: object) -> Report:
    return Report("test", Namespace(out=None, **options), timed=False)


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1), (50, 2), (75, 3), (99, 4), (100, 4)]
)
def test_percentile_is_a_value_that_occurred(percent, expected):
    """
    It is the smallest value that so many per cent do not exceed.
    """
    assert percentile([4, 1, 3, 2], percent) == expected


def test_percentile_of_nothing_is_nan():
    """
    No value, no percentile; and nan keeps no limit.
    """
    value = percentile([], 50)

    assert math.isnan(value)
    assert not Claim("nothing", value, "<=", 1).holds
    assert not Claim("nothing", value, ">=", 1).holds


def test_ratio_is_taken_within_each_round():
    """
    A round that was slow for both does not move the ratio.
    """
    assert median_ratio([2, 20, 4], [1, 10, 1]) == 2


def test_report_fails_if_one_claim_does_not_hold(capsys):
    """
    The exit status is 1, and the line says which.
    """
    report = make_report()
    report.claim("fast", 0.9, ">=", 0.98)
    report.claim("small", 1.0, "<=", 1.0)

    status = report.finish()

    assert status == 1
    lines = capsys.readouterr().out.splitlines()
    assert "fast: 0.9 >= 0.98 DOES NOT HOLD" in lines
    assert "small: 1 <= 1 holds" in lines


class BusyNeighbour:
    def n_cpus(self) -> float:
        return 1.5


@pytest.mark.parametrize(("timed", "status"), [(True, 2), (False, 0)])
def test_times_beside_a_busy_neighbour_prove_nothing(timed, status, capsys):
    """
    Claims about time are void, others are not.
    """
    options = Namespace(out=None)
    report = Report("test", options, timed=timed, others=BusyNeighbour())
    report.claim("fast", 2.0, ">=", 1.0)

    assert report.finish() == status
    assert ("NO PROOF" in capsys.readouterr().out) is timed


def test_report_writes_rows_and_claims(tmp_path, capsys):
    """
    The file has what was printed, and where it was measured.
    """
    out = tmp_path / "result.json"
    report = Report("test", Namespace(out=str(out)), timed=False)
    report.add(system="ours", speed=2.0)
    report.claim("speed", 2.0, ">=", 1.0)

    report.finish()

    written = json.loads(out.read_text())
    assert written["rows"] == [{"system": "ours", "speed": 2.0}]
    assert [claim["holds"] for claim in written["claims"]] == [True]
    assert written["machine"]["n_cpus"] == os.cpu_count()


def test_every_seed_has_its_own_text():
    """
    The same seed gives the same text; others, negative ones included, do not.
    """
    first_texts = [texts(seed, 1, 20)[0] for seed in (-1, 0, 1, 2)]

    assert len(set(first_texts)) == 4
    assert first_texts[2] == texts(1, 1, 20)[0]


def test_a_turn_of_a_chat_repeats_all_before():
    """
    A prompt begins with the earlier prompt and its answer.
    """
    chat = Chat(generator(1), 2)
    first = chat.ask()
    chat.hear(" the answer")

    second = chat.ask()

    assert second.startswith(first + " the answer ")
    assert (len(first.split()), len(second.split())) == (300, 342)


def test_every_chat_has_all_its_turns():
    """
    The order is random, the number is not.
    """
    order = turns(generator(1), 4, 3)

    assert sorted(order) == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_host_time_is_taken_of_each_step():
    """
    As many times as were asked for, whatever the engine thread does afterwards.
    """
    times = engine_host_s(2, 5)

    assert len(times) == 5
    assert min(times) > 0


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_is_looked_for_when_it_is_started(name, monkeypatch):
    """
    Not before: --no-peers does without them, and to build them takes minutes.
    """
    monkeypatch.setattr("benchmarks.peers._installed", lambda *_: pytest.fail("built"))

    PEERS[name].start(Path("model.gguf"), n_slots=1, n_ctx=64, threads=1)


def test_our_server_gets_the_configuration_that_is_measured(tmp_path):
    """
    The file for `serve` says what was given, and nothing else.
    """
    config = EngineConfig(
        context=ContextConfig(n_ctx=4096, type_k="q8_0", n_threads=None),
        scheduler=SchedulerConfig(n_slots=8, target_step_s=0.5),
    )
    file = tmp_path / "serve.toml"
    file.write_text(toml(config))

    fields = read(file)

    assert fields.keys() == {"context", "scheduler"}
    assert Deployment.of(fields).configs == {"default": config}


def test_a_server_that_tells_no_address_says_why():
    """
    What it has written is in the error.
    """
    command = [sys.executable, "-c", "print('no memory')"]

    with pytest.raises(RuntimeError, match="did not start:\nno memory"):
        serving(command, None).__enter__()


def test_figures_of_our_server_have_a_line_a_load():
    """
    Beside in process, and beside llama-server.
    """
    figures = {"8 streams": {"unit": "tokens/s", "in process": 200.0, "HTTP": 199.0}}
    loads = {"short requests": 400.0, "shared prefix": 100.0, "long prompts": 50.0}
    rows = {
        f"{load}, {system}": {"output_throughput": figure, "max_itl_ms": figure}
        for load, figure in loads.items()
        for system in ("ours", "llama-server")
    }

    lines = [*over_http(figures), *served(rows)]

    assert lines == [
        ("8 streams from `pyllama-raw serve`, tokens/s", "199", "in process 200"),
        ("short requests over HTTP, output tokens/s", "400", "llama-server 400"),
        ("shared prefix over HTTP, output tokens/s", "100", "llama-server 100"),
        (
            "long prompts over HTTP, longest gap in a stream, ms",
            "50",
            "llama-server 50",
        ),
    ]


def test_the_readme_lists_each_script():
    """
    And none that is not there.
    """
    folder = ROOT / "benchmarks"
    table = (folder / "README.md").read_text().partition("| --- | --- |")[2]

    scripts = {path.stem for path in folder.glob("*.py")} - {"fakes", "figures"}
    assert (
        set(re.findall(r"`(\w+)`", table.partition("\n\n")[0])) - {"bench"} == scripts
    )


def by_night(script: str, *arguments: str) -> object:
    """A script that takes seconds and shares its parts with one that is tried each time."""
    return pytest.param(script, list(arguments), marks=pytest.mark.nightly)


@pytest.mark.native
@pytest.mark.parametrize(
    ("script", "arguments"),
    [
        ("soak.py", ["--requests", "100", "--long", "40"]),
        ("interference.py", ["--no-peers"]),
        by_night("step_times.py"),
        by_night("step_simulated.py"),
        by_night("equal_arrivals.py", "--no-peers", "--requests", "12", "--rate", "9"),
        ("offline.py", ["--no-peers", "--slots", "2"]),
        (
            "over_http.py",
            [
                "--streams",
                "2",
                "--requests",
                "2",
                "--lists",
                "1",
                "--embedder",
                EMBEDDER,
            ],
        ),
        by_night("process_hop.py", "--streams", "2", "--requests", "2"),
        by_night("soak.py", "--tiny", "--requests", "3000"),  # 10,000 take 8 minutes
        by_night("same_bits.py", "--requests", "200", "--alone", "20"),
        by_night("fidelity.py"),
        by_night("preemption.py"),
        by_night(
            "neighbour.py", "--streams", "1", "--busy", "0", "1", "--seconds", "0.1"
        ),
        by_night("served.py", "--no-peers", "--requests", "6"),
        by_night(
            "media.py", "--no-peers", "--layers", "2", "--embd", "64", "--size", "56"
        ),
        by_night("observing.py", "--part", "model"),
        by_night("overload.py", "--requests", "200", "--streams", "1"),
        by_night(
            "overload.py", "--requests", "200", "--streams", "1", "--step-ms", "1"
        ),
        by_night("placement.py", "--prompts", "3", "--n-timed", "4"),
    ],
)
def test_script_runs(script, arguments, tmp_path):
    """
    A script ends without an error and writes its figures.
    """
    out = tmp_path / "result.json"
    command = [sys.executable, f"benchmarks/{script}", "--rounds", "1"]
    command += ["--model", str(tiny_model("llama")), "--out", str(out)]
    command += [str(tiny_model("bert")) if a == EMBEDDER else a for a in arguments]

    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "OMP_WAIT_POLICY": "passive"},  # share busy machines
        check=False,
        capture_output=True,
        text=True,
    )

    assert done.returncode in (0, 1, 2), done.stderr
    assert "Traceback" not in done.stderr
    written = json.loads(out.read_text())
    assert written["rows"]
    assert written["claims"] or "--no-peers" in arguments
