"""Pictures: what is in them, and which there are; not how they look."""

import json
from functools import partial
from xml.etree import ElementTree as ET

import anyio
import pytest

from pyllama_raw.cli import main
from pyllama_raw.engine.logs import RequestLog, write_records
from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.plot import compared, pictures
from pyllama_raw.lab.sim import Lengths, Machine, Workload, simulate
from pyllama_raw.lab.targets import Point
from tests.lab.bench.test_report import collect

BUSY = Workload(60, 10.0, n_clients=2, heavy=4, deadline_s=Lengths(20))
MACHINE = Machine(n_slots=4, n_ctx_slot=512)


def logged(tmp_path):
    """A request log of a simulation."""
    requests = RequestLog()
    simulate(BUSY, MACHINE, watchers=[requests])
    write_records(tmp_path / "fcfs.jsonl", requests)
    return tmp_path / "fcfs.jsonl"


def test_logs_become_pictures(tmp_path):
    """
    Each is a whole SVG and PNG; the same logs give the same files.
    """
    path = logged(tmp_path)
    figures = pictures(path)
    for folder in ("a", "b"):
        pictures(path).save(tmp_path / folder)
    files = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}

    names = {"latency-cdf", "fairness"}
    assert set(figures) == names
    assert set(files) == {f"{name}.{end}" for name in names for end in ("svg", "png")}
    assert all(files[name] == (tmp_path / "b" / name).read_bytes() for name in files)
    assert all(ET.fromstring(files[f"{name}.svg"]) is not None for name in names)  # noqa: S314


def test_pictures_show_themselves():
    """
    A notebook gets the figures as SVG.
    """
    results = [simulate(BUSY, Machine(policy=name)) for name in ("fcfs", "sjf")]

    assert compared(results)._repr_html_().count("<svg ") == 1


def test_results_of_bench_become_pictures(tmp_path):
    """
    Of several clients and rates each as SVG and PNG; of one there is no line.
    """
    points = [Point(clients=1), Point(clients=2), Point(rate=500.0)]
    results, _, _ = anyio.run(partial(collect, points, rounds=1, names=("<a>", "b")))
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(result) + "\n" for result in results))
    pictures(path).save(tmp_path / "plots")

    names = ("itl-timeline", "latency-by-rate", "latency-cdf", "throughput-by-clients")
    assert sorted(path.name for path in (tmp_path / "plots").iterdir()) == sorted(
        f"{name}.{end}" for name in names for end in ("png", "svg")
    )


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", '{"submitted_s": 1}', '{"n_prefill": 1}', "x"]
)
def test_other_files_are_refused(tmp_path, text):
    """
    What is no log and no result is named.
    """
    path = tmp_path / "file.jsonl"
    path.write_text(text)

    with pytest.raises(ConfigError, match=r"file\.jsonl"):
        pictures(path)


def test_commands_draw(tmp_path, capsys):
    """
    `simulate` ends with a table and a figure, `plot` with the names of its pictures.
    """
    figure, logs = tmp_path / "policies.png", tmp_path / "logs"
    simulation = ["simulate", "--requests", "50", "--compare", "fcfs,sjf"]
    status = main([*simulation, "--figure", str(figure), "--request-logs", str(logs)])
    files = sorted(map(str, logs.iterdir()))

    assert status == 0
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert main(["plot", *files, "--out", str(tmp_path / "plots")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith("latency-cdf.svg, .png")
