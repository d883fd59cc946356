"""Results of runs with other options are told apart, wherever they are shown."""

import json

import anyio
import pytest

from pyllama_raw.cli.command import main
from pyllama_raw.lab.calls import told_apart
from pyllama_raw.lab.plot import bench_figures
from pyllama_raw.lab.report import doubts, headline, rows
from pyllama_raw.lab.targets import Point
from tests.lab.bench.test_report import collect

NAMES = ("engine", "openai=http://a")


def run(date, *, commit="c1", names=NAMES, **options):
    """The results of a command, of two rounds."""

    async def measured():
        results, _, _ = await collect([Point(clients=2)], names, rounds=2)
        return results

    about = {
        "date": date,
        "command": f"bench run of {date}",
        "workload": "offline",
        "model_id": "m.gguf",
        "machine": {"cpu": "X", "commit": commit, "date": date},
        "options": {"n_slots": None, "rounds": 2, "clients": [2], **options},
    }
    return [about | result for result in anyio.run(measured)]


def shown(results):
    """The target and the number of rounds of each row, and the lines that explain them."""
    apart = told_apart(results)
    lines = [line for line in headline(apart) if line.startswith(("engine", "openai"))]
    return [row["target"] for row in rows(apart)], lines


def test_each_set_of_options_has_rows_of_its_own():
    """
    What differs is named above the table; a ratio is to the first target of the same run.
    """
    results = run("monday", n_slots=4) + run("tuesday", n_slots=8)
    for result in results:
        fast = 2.0 if result["target"] != "engine" else 1.0
        result["output_throughput"] = fast * (result["options"]["n_slots"])

    targets, lines = shown(results)

    assert targets == ["engine-1", "openai-1", "engine-2", "openai-2"]
    assert lines == [
        "engine-1: n_slots 4",
        "openai-1: http://a, n_slots 4",
        "engine-2: n_slots 8",
        "openai-2: http://a, n_slots 8",
    ]
    bench_figures = [
        (row["tok/s"], row["ratio min-max"]) for row in rows(told_apart(results))
    ]
    twice = "2.00 2.00-2.00"
    assert bench_figures == [(4.0, ""), (8.0, twice), (8.0, ""), (16.0, twice)]


@pytest.mark.parametrize(
    ("first", "second", "label"),
    [
        ({"commit": "c1"}, {"commit": "c2"}, ["commit c1", "commit c2"]),
        ({}, {"policy": "sjf"}, ["policy default", "policy sjf"]),
    ],
)
def test_whatever_differs_tells_apart(first, second, label):
    """
    Another commit, and an option that one of them lacks.
    """
    results = run("monday", names=NAMES[:1], **first)
    results += run("tuesday", names=NAMES[:1], **second)

    _, lines = shown(results)

    assert lines == [f"engine-{n}: {text}" for n, text in enumerate(label, 1)]


def test_runs_of_equal_options_are_rounds_of_one_thing():
    """
    Another day, other loads and another number of rounds do not matter; ratios are within a
    run, and the rounds of both count.
    """
    results = run("monday") + run("tuesday", rounds=5, clients=[2, 4])

    targets, lines = shown(results)

    assert targets == ["engine", "openai"]
    assert lines == ["openai: http://a"]
    assert "4 rounds" in headline(results)[0]


def test_every_command_is_shown():
    """
    Not only that of the first file.
    """
    lines = headline(told_apart(run("monday") + run("tuesday", n_slots=8)))

    commands = [line for line in lines if line.startswith("bench run")]
    assert commands == ["bench run of monday", "bench run of tuesday"]


def test_a_report_of_two_files_has_a_row_for_each(tmp_path, capsys):
    """
    The headline says what each of them is.
    """
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for n_slots, file in zip((4, 8), files, strict=True):
        results = run(f"day {n_slots}", names=NAMES[:1], n_slots=n_slots)
        file.write_text("\n".join(map(json.dumps, results)))

    assert main(["bench", "report", *map(str, files)]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in out if line.startswith("engine-")] == [
        *("engine-1:", "engine-2:", "engine-1", "engine-2")
    ]


def test_a_plot_has_a_line_for_each():
    """
    Rounds of other options are not joined.
    """
    results = run("monday", names=NAMES[:1], n_slots=4)
    results += run("tuesday", names=NAMES[:1], n_slots=8)

    ax = bench_figures(results)["throughput-by-clients"].axes[0]

    assert ax.get_legend_handles_labels()[1] == ["engine-1", "engine-2"]


def test_a_file_of_several_options_proves_nothing():
    """
    Its rounds are not those of one thing.
    """
    mixed = run("monday", n_slots=4) + run("tuesday", n_slots=8)

    assert doubts(run("monday", n_slots=4), mixed)[0] == (
        "runs of several conditions in the second: n_slots 4; n_slots 8"
    )
