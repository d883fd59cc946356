"""Rounds, tables and plots."""

import json
from functools import partial

import anyio
import pytest

from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.plot import BUSY, bench_figures
from pyllama_raw.lab.report import digits, failures, headline, read_results, rows, table
from pyllama_raw.lab.targets import Plan, Point, ReadyTarget
from pyllama_raw.lab.workloads import WORKLOADS, generator
from tests.lab.bench.support import FakeTarget, make_writer


class Openings:
    """Keeps which target was opened when, and that only one is open."""

    def __init__(self, name, log):
        self.name, self.log, self.target = name, log, FakeTarget()

    def __call__(self):
        return self

    async def __aenter__(self):
        self.log.append(self.name)
        return ReadyTarget(self.target)

    async def __aexit__(self, *_):
        self.log.append("closed")


async def collect(points, names=("a", "b"), **options):
    log = []
    openers = {name: Openings(name, log) for name in names}
    workload, writer = WORKLOADS["offline"], make_writer()
    shape = workload.shape.changed({"requests": 3, "output_tokens": 2})
    plan = Plan(
        openers,
        points,
        lambda seed: workload.calls(shape, writer, generator(seed)),
        **options,
    )
    return [result async for result in plan.results()], log, openers


@pytest.mark.anyio
async def test_targets_are_interleaved_and_open_one_at_a_time():
    """
    In each round all have their turn, and who is first rotates.
    """
    results, log, _ = await collect([Point(clients=2)], rounds=2)

    assert log == ["a", "closed", "b", "closed", "b", "closed", "a", "closed"]
    assert [(r["round"], r["target"]) for r in results] == [
        (0, "a"),
        (0, "b"),
        (1, "b"),
        (1, "a"),
    ]


@pytest.mark.anyio
async def test_all_targets_get_the_same_text_and_rounds_get_new_text():
    """
    Warm-up included, which does not count as a result.
    """
    results, _, openers = await collect([Point(clients=1)], rounds=2, warm_up=1)
    a, b = openers["a"].target.prompts, openers["b"].target.prompts

    assert a == b
    assert len({tuple(prompt) for prompt in a}) == len(a) == 2 * (1 + 3)
    assert [result["completed"] for result in results] == [3] * 4


@pytest.mark.anyio
async def test_results_have_vllms_keys_and_become_lines(tmp_path):
    """
    A result survives its file.
    """
    points = [Point(clients=2), Point(rate=1000.0, burstiness=0.5)]
    results, _, _ = await collect(points, rounds=1, names=("a",))
    path = tmp_path / "results.jsonl"
    path.write_text("".join(json.dumps(result) + "\n" for result in results))

    assert read_results(path) == results
    assert [(r["max_concurrency"], r["request_rate"]) for r in results] == [
        (2, "inf"),
        (None, 1000.0),
    ]
    assert set(results[0]) >= VLLM_KEYS
    assert results[0]["total_output_tokens"] == 6
    assert results[0]["peak_rss_bytes"] is None  # nobody knows the process


VLLM_KEYS = {
    *("num_prompts", "request_rate", "burstiness", "max_concurrency", "duration"),
    *("completed", "failed", "total_input_tokens", "total_output_tokens"),
    *("request_throughput", "request_goodput", "output_throughput"),
    "total_token_throughput",
    *("input_lens", "output_lens", "ttfts", "itls", "start_times", "latencies"),
    *("generated_texts", "errors"),
    *(
        f"{figure}_{name}_ms"
        for figure in ("mean", "median", "std", "p99")
        for name in ("ttft", "tpot", "itl", "e2el")
    ),
}


@pytest.mark.parametrize("text", ["", "{", '{"target": "a"}', "3"])
def test_a_file_without_results_is_refused(tmp_path, text):
    """
    The error names the file.
    """
    path = tmp_path / "wrong.jsonl"
    path.write_text(text)

    with pytest.raises(ConfigError, match=r"wrong\.jsonl"):
        read_results(path)


@pytest.mark.anyio
async def test_a_ratio_is_taken_within_each_round():
    """
    A round that was slow for both does not move it; the spread is shown.
    """
    results, _, _ = await collect([Point(clients=2)], rounds=3)
    for result in results:
        speed = {0: 1.0, 1: 100.0, 2: 4.0}[result["round"]]
        twice = 2.0 if result["target"] == "b" and result["round"] != 2 else 1.0
        result["output_throughput"] = speed * twice

    a, b = rows(results)

    heading = "ratio min-max"
    assert (a[heading], b[heading]) == ("", "2.00 1.00-2.00")
    assert a["tok/s"] == 4.0


@pytest.mark.anyio
async def test_what_matters_fits_a_hundred_columns():
    """
    Six figures of targets with long addresses, with a ratio and busy rounds; the rest is
    there when asked for.
    """
    names = (
        "engine",
        "llama-server=http://127.0.0.1:8080",
        "openai=http://a",
        "openai=b",
    )
    results, _, _ = await collect(
        [Point(clients=2), Point(clients=256)], names, rounds=2
    )
    for result in results:
        result |= {"others_cpus": 1.0, "output_throughput": 123456.0}
        result |= {"max_itl_ms": 123456.0, "p99_itl_ms": 123456.0}

    lines = table(rows(results))
    wide = table(rows(results, wide=True))

    columns = "target clients tok/s ratio min-max TTFT p50 TTFT p99 ITL p99 ITL max failed busy"
    assert " ".join(lines[0].split()) == columns
    assert max(map(len, lines)) <= 100
    assert [line.split()[0] for line in lines[1::2]] == [
        "engine",
        "llama-server",
        "openai-1",
        "openai-2",
    ]
    assert set(columns.split()) < set(wide[0].split())


@pytest.mark.anyio
async def test_how_calls_were_sent_is_a_column_only_if_it_varies():
    """
    One way is in the headline alone; clients have a column of their own.
    """
    ways = [Point(clients=1), Point(rate=500.0), Point(rate=500.0, burstiness=0.5)]
    results, _, _ = await collect(ways, rounds=1, names=("a",))

    (alone,) = rows(results[:1])

    sent = [(row.get("clients"), row.get("sent")) for row in rows(results)]
    assert sent == [(1, None), (None, "500/s"), (None, "500/s, burstiness 0.5")]
    assert not alone.keys() & {"clients", "sent"}


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.012345, "0.0123"),
        (0.9996, "1.00"),
        (4.0, "4.00"),
        (97.25, "97.2"),
        (999.6, "1000"),
        (123456.0, "123000"),
        (-1.5, "-1.50"),
        (float("inf"), "inf"),
    ],
)
def test_a_number_has_three_digits_and_no_exponent(value, text):
    """
    Whatever its size; nothing is not measured to three digits.
    """
    assert digits(value) == text


def test_the_headline_says_what_where_and_how():
    """
    Versions, commit, model, machine, command and addresses; what is unknown is left out.
    """
    point = {"max_concurrency": 1, "round": 0}
    conditions = {
        "workload": "offline",
        "model_id": "m.gguf",
        "date": "today",
        "command": "pyllama-raw bench run offline",
        "machine": {
            "cpu": "X",
            "n_cpus": 2,
            "devices": [],
            "python": "3.11",
            "pyllama_raw": "0.1.0",
            "llama_cpp": "b1",
            "commit": "abc",
        },
    }

    assert headline([{"target": "openai=http://a", **point, **conditions}]) == [
        "offline, m.gguf, 1 round, 1 client",
        "cpu X, n_cpus 2, python 3.11, pyllama_raw 0.1.0, llama_cpp b1, commit abc, today",
        "pyllama-raw bench run offline",
        "openai: http://a",
    ]
    assert headline([{"target": "engine", **point}]) == ["benchmark, 1 round, 1 client"]


@pytest.mark.anyio
async def test_failed_calls_name_their_reasons():
    """
    By target and point, the commonest first, with how many; the rest is counted.
    """
    results, _, _ = await collect([Point(clients=2)], rounds=2, names=("a",))
    results[0]["errors"] = ["x", "y", "y"]
    results[1]["errors"] = ["z", "w", ""]

    lines = failures(results)

    assert lines == [
        "failed, a, 2 clients: 2 of 6: y",
        "failed, a, 2 clients: 1 of 6: x",
        "failed, a, 2 clients: 1 of 6: z",
        "failed, a, 2 clients: 1 for other reasons",
    ]


def test_a_busy_round_is_marked():
    """
    In the table and the plots; a quiet run has no such mark.
    """
    measure = partial(collect, [Point(clients=1), Point(clients=2)], rounds=2)
    results, _, _ = anyio.run(measure)
    texts = []
    for others_cpus in (0.0, 0.5):
        results[0]["others_cpus"] = others_cpus
        axes = bench_figures(results)["throughput-by-clients"].axes[0]
        labels = axes.get_legend_handles_labels()[1]
        busy = [row.get("busy") for row in rows(results)]
        texts.append((BUSY in labels, "1/2" in busy))

    assert texts == [(False, False), (True, True)]
