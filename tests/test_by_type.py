"""The comparison with best-set peers: what they print, which settings count, the table."""

import importlib.util
import json
import os
import subprocess
import sys
from argparse import Namespace
from functools import partial
from importlib.machinery import SourceFileLoader
from itertools import product
from pathlib import Path

import pytest

from benchmarks import by_type
from benchmarks.by_type import Cell, Steps, conclude, markdown, winners
from benchmarks.load.limits import Limits, Weights
from benchmarks.load.measure import Report
from benchmarks.peers.batched_bench import SETTINGS, Phases, of_lines, of_table
from pyllama_raw.engine.watcher import StepRecord
from tests.support.tiny import tiny_model

ROOT = Path(__file__).parents[1]
LINE = {"n_kv_max": 512, "pp": 128, "tg": 64, "pl": 2, "n_kv": 384}
TABLE = """
main: n_kv_max = 2048, n_batch = 2048, n_ubatch = 512, flash_attn = 1, n_threads = 2

|    PP |     TG |    B |   N_KV |   T_PP s | S_PP t/s |   T_TG s | S_TG t/s |      T s |    S t/s |
|-------|--------|------|--------|----------|----------|----------|----------|----------|----------|
|   128 |     64 |    8 |   1536 |    2.500 |   409.60 |    2.000 |   256.00 |    4.500 |   341.33 |
|   128 |     64 |    8 |   1536 |    2.048 |   500.00 |    1.024 |   500.00 |    3.072 |   500.00 |

llama_print_timings:        load time =    1000.00 ms
"""


def phases(prefill_s: float, decode_s: float) -> Phases:
    return Phases(1000, prefill_s, 100, decode_s)


def test_phases_of_llama_cpp_are_read_beside_its_log():
    """
    Tokens are those of all streams; lines that are no JSON say nothing.
    """
    text = "\n".join(
        ["load_model: {", json.dumps(LINE | {"t_pp": 0.5, "t_tg": 2.0, "t": 2.5}), ""]
    )

    (run,) = of_lines(text)

    assert run == Phases(256, 0.5, 128, 2.0)
    assert run.prefill_tok_per_s == 512
    assert run.decode_tok_per_s == 64
    assert run.tok_per_s == 384 / 2.5


def test_phases_of_ik_llama_cpp_are_read_from_its_table():
    """
    Its head and its log are no rows; repeats add up.
    """
    runs = [*of_table(TABLE)]

    assert runs == [Phases(1024, 2.5, 512, 2.0), Phases(1024, 2.048, 512, 1.024)]
    assert sum(runs, Phases()) == Phases(2048, 4.548, 1024, 3.024)


def test_settings_that_win_a_figure_go_on():
    """
    Of each peer the best of each figure, which may be one or several; ours always.
    """
    trials = {
        "ours": [phases(9, 9)],
        "repack": [phases(1, 3)],
        "tiles": [phases(3, 1)],
        "plain": [phases(4, 4)],
        "ik": [phases(2, 2)],
        "ik-no-rtr": [phases(2.5, 2.5)],
    }

    assert winners(trials) == ["ours", "repack", "tiles", "ik"]


def step(at_s: float, n_prefill: int, n_decode: int) -> StepRecord:
    return StepRecord(at_s, 0.1, n_prefill, n_decode, 0, 0, 0, 0, 0, 0)


def test_prefill_ends_where_only_decodes_begin():
    """
    A step with both belongs to it; the next batch begins anew.
    """
    steps = Steps()
    for record in (step(1, 100, 0), step(3, 28, 4), step(4, 0, 8), step(5, 0, 8)):
        steps.stepped(record)
    first = steps.prefill_s()
    for record in (step(10, 100, 0), step(10.5, 0, 8)):
        steps.stepped(record)

    assert (first, steps.prefill_s()) == (3, 0.5)


@pytest.mark.native
def test_ratios_are_to_the_best_setting_of_each_peer(capsys):
    """
    A figure has its own best setting; the ratio is the median of the rounds'. Shares are of
    the median speed.
    """
    report = Report("by_type", Namespace(out=None), timed=False)
    cell = Cell("tiny", "F32", 2, tiny_model("llama"))
    runs = {
        "ours": [phases(1, 1), phases(1, 1), phases(2, 1)],
        "repack": [phases(2, 4), phases(3, 4), phases(4, 4)],
        "tiles": [phases(8, 0.5), phases(8, 0.5), phases(8, 0.5)],
    }
    peak = Limits("AVX2", 100.0, 10.0)

    conclude(report, cell, runs, peak)

    rows = {(row["figure"], row["system"]): row for row in report.rows}
    prefill, decode = rows["prefill", "llama.cpp"], rows["decode", "llama.cpp"]
    assert (prefill["setting"], decode["setting"]) == ("repack", "tiles")
    ratios = [prefill[name] for name in ("smallest", "ours_to_it", "largest")]
    assert ratios == [2, 2, 3]
    assert decode["ours_to_it"] == 0.5
    weights = Weights.of(cell.path)
    assert decode["of_read"] == pytest.approx(weights.n_bytes * 100 / 10e9)
    assert decode["of_int8"] == pytest.approx(
        2 * (weights.n_layers + weights.n_output) * 200 / 100e9
    )
    assert [claim.name for claim in report.claims if not claim.holds] == [
        "tiny F32, 2 streams, decode, to llama.cpp",
    ]


def test_the_table_has_a_line_for_each_cell_and_figure():
    """
    A peer that did not run has no columns; shares that nobody knows are left out.
    """
    cell = {"model": "230m", "weights": "Q4_0", "streams": 8, "figure": "decode"}
    ours = cell | {"system": "ours", "setting": "", "tok_per_s": 250.0, "of_read": 0.5}
    peer = {"system": "llama.cpp", "setting": "plain", "tok_per_s": 200.0}
    ratio = {"ours_to_it": 1.25, "smallest": 1.2, "largest": 1.3}

    lines = markdown([ours, cell | peer | ratio])

    assert lines == [
        "| model | weights | streams | figure | ours, tokens/s | of limits | llama.cpp "
        "| set as | of limits | ours to it |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        "| 230m | Q4_0 | 8 | decode | 250 | read 50% | 200 | plain |  "
        "| **1.25** [1.20, 1.30] |",
    ]


def test_a_table_says_where_its_figures_are_from():
    """
    The CPU, what it can do at most, threads, rounds and versions.
    """
    peak = Limits("AVX2", 380.4, 34.56)._asdict()
    facts = {"cpu_level": "native", "limits": peak, "ik_commit": "8337e4cd3"}

    first, limits, end = by_type.heading(Namespace(threads=2, rounds=3), facts)

    assert "built for native, 2 threads; 3 rounds; commit " in first
    assert "ik_llama.cpp 8337e4cd3" in first
    assert limits == "Limits: 380 G operations/s of bytes (AVX2), 34.6 GB/s read."
    assert end == ""


@pytest.mark.native
def test_weights_are_those_that_products_read():
    """
    Matrices of layers, and that of logits; embeddings are looked up, and norms are no matrix.
    """
    model = tiny_model("llama")

    weights = Weights.of(model)

    assert weights.n_bytes == 4 * (weights.n_layers + weights.n_output)
    assert weights.gops(10, 1) == 2e-9 * (10 * weights.n_layers + weights.n_output)
    assert weights.type_name == "F32"


def test_peers_that_are_not_built_do_not_run(monkeypatch, capsys):
    """
    A line says which.
    """
    monkeypatch.setattr(by_type, "is_there", lambda name: not name.startswith("ik"))
    options = Namespace(no_peers=False, settings=["repack", "ik", "plain"])

    assert by_type.settings_of(options) == ["repack", "plain"]
    assert (
        "no ik-llama-batched-bench: benchmarks/peers/setup" in capsys.readouterr().err
    )


def fail(why):
    raise RuntimeError(why)


def load_setup():
    path = str(ROOT / "benchmarks" / "peers" / "setup")
    spec = importlib.util.spec_from_loader(
        "peers_setup", SourceFileLoader("peers_setup", path)
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("named", [None, "gcc-12"])
def test_peers_are_built_by_clang_where_nobody_names_a_compiler(named, monkeypatch):
    """
    Only they: afterwards the environment is as before.
    """
    setup = load_setup()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    if named:
        monkeypatch.setenv("CC", named)
    monkeypatch.setattr(setup.shutil, "which", lambda name: f"/usr/bin/{name}")

    with setup.best_compiler(build_lib=None):
        inside = os.environ.get("CC"), os.environ.get("CXX")

    assert inside == ((named, None) if named else ("clang", "clang++"))
    assert (os.environ.get("CC"), os.environ.get("CXX")) == (named, None)


def test_a_source_that_is_no_ik_llama_cpp_is_refused(tmp_path):
    """
    Before minutes of building, and it is not written to.
    """
    setup = load_setup()
    build_lib = setup.load_build_lib()
    source = tmp_path / "llama.cpp"
    (source / "ggml" / "src").mkdir(parents=True)
    (source / "CMakeLists.txt").touch()

    with pytest.raises(build_lib.BuildError, match="has no ggml/src/iqk"):
        setup.ik_programs(build_lib, tmp_path, str(source))

    assert sorted(path.name for path in source.iterdir()) == ["CMakeLists.txt", "ggml"]


def test_a_build_that_was_broken_off_goes_on(tmp_path):
    """
    Its folder stays, and complete sources are not written again; after the build it is gone.
    """
    setup = load_setup()
    written = []

    def write(tree):
        written.append(tree.name)
        tree.mkdir()

    def build(end):
        with setup.workplace(tmp_path / "built") as place:
            assert setup.sources(place, write).is_dir()
            end()

    with pytest.raises(RuntimeError, match="broken off"):
        build(partial(fail, "broken off"))
    build(lambda: None)

    assert written == ["source"]
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize(
    ("peer", "settings"),
    [
        ("ik_llama.cpp", {"ik", "ik-no-rtr"}),
        ("OpenVINO GenAI", {"openvino", "openvino-f32"}),
    ],
)
def test_settings_of_other_peers_have_their_names(peer, settings):
    """
    All others are llama.cpp's.
    """
    assert {name for name in SETTINGS if by_type.peer_of(name) == peer} == settings


def test_a_peer_does_not_run_a_type_that_it_cannot_read():
    """
    OpenVINO GenAI reads no IQ4_XS; what most weights of Q4_K_M have is Q4_K.
    """
    weights = ("Q4_1", "Q4_K_M", "Q4_K", "IQ4_XS")
    cells = [Cell("230m", name, 1, ROOT) for name in weights]

    assert [by_type.knows("openvino", cell) for cell in cells] == [True] * 3 + [False]
    assert all(by_type.knows("ik", cell) for cell in cells)


@pytest.mark.native
def test_the_script_runs(tmp_path):
    """
    It ends without an error, and writes its figures and a table.
    """
    out = tmp_path / "by_type.json"
    command = [sys.executable, "-m", "benchmarks.by_type", "--rounds", "1"]
    command += [
        "--no-peers",
        "--models",
        "default",
        "--trials",
        "0",
        "--streams",
        "1",
        "2",
    ]
    command += ["--model", str(tiny_model("llama")), "--out", str(out)]

    done = subprocess.run(
        command, cwd=ROOT, check=False, capture_output=True, text=True
    )

    assert done.returncode in (0, 2), done.stderr
    rows = json.loads(out.read_text())["rows"]
    assert [(row["streams"], row["figure"]) for row in rows] == [
        *product((1, 2), ("prefill", "decode", "all"))
    ]
    lines = out.with_suffix(".md").read_text().splitlines()
    assert [line.startswith("| default |") for line in lines[-6:]] == [True] * 6
