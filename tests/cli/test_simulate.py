"""`simulate`: one table for several policies, and cost models from step logs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pyllama_raw.cli import main
from pyllama_raw.lab.sim import CostModel

ROOT = Path(__file__).resolve().parents[2]
FEW = ["simulate", "--requests", "120", "--rate", "20", "--slots", "4"]


def test_policies_are_compared_in_one_table_and_one_figure(
    tmp_path, monkeypatch, capsys
):
    """
    The output ends with a line for each policy, in the order that was asked for, and the name
    of the figure.
    """
    monkeypatch.chdir(tmp_path)
    status = main([*FEW, "--compare", "sjf,fcfs", "--output", "uniform:9"])

    lines = capsys.readouterr().out.splitlines()
    assert status == 0
    starts = ["policy", "sjf", "fcfs", "seconds;", "figure:"]
    assert [line.split()[0] for line in lines] == starts
    assert lines[-1] == "figure: compared.svg"
    assert "</svg>" in (tmp_path / "compared.svg").read_text()


def test_a_figure_without_a_place_is_no_failure(tmp_path, monkeypatch, capsys):
    """
    The table is there, and the last line says why there is no figure.
    """
    monkeypatch.chdir(tmp_path)
    (tmp_path / "compared.svg").mkdir()

    assert main([*FEW, "--compare", "sjf,fcfs"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "no figure: compared.svg cannot be written: it is a folder"
    )


def test_a_cost_model_is_fitted_to_a_step_log(tmp_path, capsys):
    """
    Steps that were written become a cost model, which another simulation reads.
    """
    steps, cost = tmp_path / "steps.jsonl", tmp_path / "cost.json"

    assert main([*FEW, "--steps", str(steps)]) == 0
    assert main(["simulate", "--fit", str(steps), str(cost)]) == 0
    assert main([*FEW, "--cost", str(cost)]) == 0

    out = capsys.readouterr().out
    assert "R2 1.000; of steps held out: median error 0.0%" in out
    assert CostModel.load(cost).prefill_token == pytest.approx(1e-3, rel=0.01)
    rows = [line for line in out.splitlines() if line.startswith("fcfs")]
    assert rows[0] == rows[1]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--compare", "fcfs,sfj"], "policy 'sfj' is not known"),
        (["--cost", "FILE"], "FILE is no cost model"),
        (["--fit", "FILE", "OUT"], "FILE is no step log"),
    ],
)
def test_mistakes_are_told(flags, words, tmp_path, capsys):
    """
    A wrong policy or file is an error of one line.
    """
    (tmp_path / "FILE").write_text("{}x")
    paths = {"FILE": str(tmp_path / "FILE"), "OUT": str(tmp_path / "OUT")}

    status = main(["simulate", *(paths.get(flag, flag) for flag in flags)])

    said = capsys.readouterr().err.replace(str(tmp_path) + "/", "")
    assert status == 2
    assert words in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "text", ['{"step": -1}', '{"step": "x"}', "[]", '{"other": 1}']
)
def test_costs_are_numbers_of_seconds(tmp_path, text, capsys):
    """
    A cost model has known names, and nothing below 0.
    """
    (tmp_path / "cost.json").write_text(text)

    assert main([*FEW, "--cost", str(tmp_path / "cost.json")]) == 2
    assert "cost.json" in capsys.readouterr().err


POLICY = """
from pyllama_raw.policy import SchedulingPolicy

class Mine(SchedulingPolicy):
    name = "mine"

class Broken(SchedulingPolicy):
    name = "broken"

    def order_key(self, request, view):
        raise RuntimeError("mine is broken")
"""


def test_a_policy_of_the_current_folder_is_compared_and_a_broken_one_costs_no_table(
    tmp_path,
):
    """
    The table has those that ran, in a line each; the broken one is named behind it.
    """
    (tmp_path / "own_policies.py").write_text(POLICY)
    names = "own_policies:Mine,own_policies:Broken,fcfs"
    command = [sys.executable, "-m", "pyllama_raw", *FEW, "--compare", names]
    variables = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
    run = subprocess.run(
        command,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=variables,
        check=False,
    )

    assert run.returncode == 1
    starts = [line.split()[0] for line in run.stdout.splitlines()]
    assert starts == ["policy", "own_policies:Mine", "fcfs", "seconds;", "figure:"]
    *lines, failure = run.stderr.splitlines()
    assert [line.split()[0] for line in lines[-3:]] == ["1/3", "2/3", "3/3"]
    assert failure.startswith("error: policy broken: order_key ")


def test_an_engine_that_speculates_is_simulated(capsys):
    """
    Outputs that say every token again come faster with drafts than without.
    """
    speeds = []
    for mode in ("off", "lookup"):
        flags = ["--slots", "2", "--speculation", mode, "--repetition", "1"]
        assert main(["simulate", "--requests", "40", "--rate", "20", *flags]) == 0
        heading, row = capsys.readouterr().out.splitlines()[:2]
        assert heading.split()[:2] == ["policy", "tok/s"]
        speeds.append(float(row.split()[1]))

    assert speeds[1] > speeds[0]
