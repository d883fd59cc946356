"""Pictures: what is in them, and which there are; not how they look."""

from xml.etree import ElementTree as ET

import pytest

from pyllama_raw.cli import main
from pyllama_raw.engine.records import write_records
from pyllama_raw.engine.request_log import RequestLog
from pyllama_raw.engine.step_log import StepLog
from pyllama_raw.engine.watcher import StepRecord
from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.plot import compared, pictures
from pyllama_raw.lab.plot.requests import goodput
from pyllama_raw.lab.plot.timeline import Bar, bars, gantt
from pyllama_raw.lab.sim import Lengths, Machine, Workload, simulate

BUSY = Workload(60, 10.0, n_clients=2, heavy=4, deadline_s=Lengths(20))
MACHINE = Machine(n_slots=4, n_ctx_slot=512)


def logged(tmp_path, name="fcfs", workload=BUSY):
    """A step log and a request log of a simulation."""
    steps, requests = StepLog(), RequestLog()
    simulate(workload, MACHINE, log=steps, watchers=[requests])
    paths = tmp_path / f"{name}-steps.jsonl", tmp_path / f"{name}.jsonl"
    write_records(paths[0], steps)
    write_records(paths[1], requests)
    return paths


def record(at_s, decodes=(), chunks=()):
    return StepRecord(at_s, 1.0, 0, 0, 0, 0, 0, 0, 0, 0, decodes=decodes, chunks=chunks)


def test_steps_of_a_request_are_one_bar():
    """
    A bar ends where a prompt becomes a stream, another request comes, or a step goes without.
    """
    steps = [
        record(0.0, chunks=((7, 0, 5),)),
        record(1.0, decodes=((7, 0),), chunks=((8, 1, 2),)),
        record(2.0, decodes=((7, 0),), chunks=((8, 1, 3),)),
        record(3.0, chunks=((9, 0, 2),)),
        record(4.0, decodes=((8, 1),)),
    ]

    assert sorted(bars(steps)) == [
        Bar(0, 0.0, 1.0, 7, True),
        Bar(0, 1.0, 3.0, 7, False),
        Bar(0, 3.0, 4.0, 9, True),
        Bar(1, 1.0, 3.0, 8, True),
        Bar(1, 4.0, 5.0, 8, False),
    ]


def test_a_long_timeline_is_cut_and_says_so():
    """
    More bars than can be told apart are not drawn.
    """
    steps = [record(float(i), decodes=((i, 0),)) for i in range(2000)]

    figure = gantt(steps)

    assert "the first 900 s" in figure.axes[0].get_title(loc="left")


def test_logs_become_pictures(tmp_path):
    """
    Each is a whole SVG and PNG; the same logs give the same files.
    """
    paths = logged(tmp_path)
    drawn = pictures(*paths)
    for folder in ("a", "b"):
        pictures(*paths).save(tmp_path / folder)
    found = {path.name: path.read_bytes() for path in (tmp_path / "a").iterdir()}

    names = {"fcfs-steps-slots", "fcfs-steps-load", "latency-cdf", "fairness"}
    assert set(drawn) == names
    assert set(found) == {f"{name}.{end}" for name in names for end in ("svg", "png")}
    assert all(found[name] == (tmp_path / "b" / name).read_bytes() for name in found)
    assert all(ET.fromstring(found[f"{name}.svg"]) is not None for name in names)  # noqa: S314


def test_logs_of_several_rates_become_a_line(tmp_path):
    """
    What came and what was in time, as many a second, by rising rate.
    """
    logs = {}
    for rate in (40.0, 2.0):
        requests = RequestLog()
        workload = Workload(100, rate, deadline_s=Lengths(3))
        simulate(workload, MACHINE, watchers=[requests])
        logs[f"fcfs@{rate}"] = list(requests)
    (line,) = (
        line for line in goodput(logs).axes[0].lines if line.get_label() == "fcfs"
    )
    (slow, fast), (slow_good, fast_good) = line.get_xdata(), line.get_ydata()

    assert (slow, fast) == pytest.approx((2, 40), rel=0.3)
    assert slow_good == pytest.approx(slow, rel=0.1)
    assert fast_good < fast / 2


def test_pictures_show_themselves():
    """
    A notebook gets HTML: a table of each result, and the figures as SVG.
    """
    results = [simulate(BUSY, Machine(policy=name)) for name in ("fcfs", "sjf")]

    assert compared(results)._repr_html_().count("<svg ") == 1
    assert results[1]._repr_html_().startswith("<table><tr><th>policy</th>")


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"submitted_s": 1}', "x"])
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
