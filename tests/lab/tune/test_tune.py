"""The command on a tiny random model: all of it runs; what is faster is not asked."""

import json
from pathlib import Path

import pytest

from pyllama_raw import ConfigError, Profile
from pyllama_raw.cli import main
from pyllama_raw.lab import tune as tuning
from pyllama_raw.lab.tune import Knob, Work, find_settings
from pyllama_raw.options.machine import OtherLoad
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

TABLE = (
    Knob("threads", ({"context": {"n_threads": 1}},)),
    Knob("ubatch", ({}, {"context": {"n_ubatch": 64}})),
)
LITTLE = ("--slots", "2", "--prompt-tokens", "8", "--output-tokens", "2")


class QuietMachine(OtherLoad):
    """Nobody else runs, whatever this machine does."""

    cpus = 0.0


class BusyMachine(OtherLoad):
    """Others run all the time."""

    cpus = 0.83


@pytest.fixture(autouse=True)
def short_table(monkeypatch):
    monkeypatch.setattr(tuning, "knobs", lambda *_: TABLE)
    monkeypatch.setattr(tuning, "OtherLoad", QuietMachine)


def test_a_profile_is_found_shown_and_used(tmp_path: Path, capsys):
    """
    `tune` writes it, `generate --profile` runs with it and with its model.
    """
    out = tmp_path / "tiny.profile.json"
    model = tiny_model("llama")
    before = model.stat()

    status = main(["tune", str(model), "--out", str(out), *LITTLE])

    output = capsys.readouterr().out
    profile = Profile.load(out)
    assert status == 0
    lines = ("the defaults  ", "q4_0", "written:", "kernels: attention ")
    assert [output.count(line) for line in lines] == [1, 1, 1, 1]
    assert profile.path == model.absolute()
    assert profile.after is not None
    assert profile.after.perplexity is not None
    assert model.stat() == before
    arguments = ["generate", "ab", "--jsonl", "--max-tokens", "2", "--ignore-eos"]
    assert main([*arguments, "--profile", str(out)]) == 0
    assert len(json.loads(capsys.readouterr().out)["token_ids"]) == 2


def test_a_busy_machine_proves_nothing(tmp_path: Path, monkeypatch, capsys):
    """
    The profile is written and marked, the person is told, now and when it is used.
    """
    monkeypatch.setattr(tuning, "OtherLoad", BusyMachine)
    out = tmp_path / "tiny.profile.json"

    status = main(["tune", str(tiny_model("llama")), "--out", str(out), *LITTLE])

    last = capsys.readouterr().out.splitlines()[-1]
    assert status == 2
    assert last.startswith("NO PROOF: other processes used 0.83 CPUs meanwhile")
    assert Profile.load(out).others_cpus == 0.83
    assert main(["generate", "ab", "--max-tokens", "2", "--profile", str(out)]) == 0
    assert "other processes used 0.83 CPUs while" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["no/p.json", ""])
def test_a_profile_that_cannot_be_written_is_told_before_the_work(
    name, tmp_path: Path, monkeypatch, capsys
):
    """
    Nothing is measured, and the status is 2.
    """
    monkeypatch.setattr(tuning, "make_spaces", None)

    status = main(["tune", str(tiny_model("llama")), "--out", str(tmp_path / name)])

    assert status == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_requantised_file_is_kept_where_it_was_asked_for(tmp_path: Path, monkeypatch):
    """
    If it is the fastest, the profile names it; no scratch is left behind.
    """
    keep = tmp_path / "new.gguf"
    monkeypatch.setattr(
        tuning, "descend", lambda sizes, *_: (0, 0) if len(sizes) > 1 else (1,)
    )

    result = find_settings(tiny_model("llama"), _only(monkeypatch), keep=keep)

    assert result.profile.path == keep
    assert [p.name for p in tmp_path.iterdir()] == ["new.gguf"]
    assert result.requantised["q4_0"].perplexity == result.profile.after.perplexity


def _only(monkeypatch) -> Work:
    """Work of no size; speeds are made up."""
    measured = tuning.Measured(prefill_tok_per_s=1, decode_tok_per_s=1)
    monkeypatch.setattr(tuning, "measure", lambda *_, n_vocab: measured)
    return Work()


@pytest.mark.parametrize("name", ["there.gguf", "no/folder/new.gguf"])
def test_a_place_that_cannot_be_is_refused_before_the_work(name, tmp_path: Path):
    """
    No minutes pass before one learns of it.
    """
    (tmp_path / "there.gguf").touch()

    with pytest.raises(ConfigError, match=r"cannot be written|exists"):
        find_settings(tiny_model("llama"), keep=tmp_path / name)
