"""What is told of a profile that does not fit."""

from argparse import Namespace
from pathlib import Path

import pytest

from pyllama_raw.cli import options as profiles
from pyllama_raw.cli.options import note_of
from pyllama_raw.options.profile import MachineFacts, Profile

HERE = MachineFacts(cpu="this CPU", n_cpus=4)


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr(profiles, "cpu_name", lambda: HERE.cpu)
    monkeypatch.setattr(profiles, "n_cpus", lambda: HERE.n_cpus)


def noted(folder: Path, model: str | None = None, **facts: object) -> str | None:
    """The note of a profile of the file `a.gguf`, which has 3 bytes."""
    (folder / "a.gguf").write_bytes(b"abc")
    (folder / "other").mkdir()
    (folder / "other" / "a.gguf").write_bytes(b"other")
    (folder / "copy").mkdir()
    (folder / "copy" / "a.gguf").write_bytes(b"abc")
    known = {"path": folder / "a.gguf", "machine": HERE, "model_bytes": 3}
    Profile(**(known | facts)).save(folder / "p.json")
    named = None if model is None else str(folder / model)
    note = note_of(Namespace(profile=str(folder / "p.json"), model=named))
    return note and note.removeprefix(f"note: profile {folder}/p.json: ")


@pytest.mark.parametrize(
    ("model", "facts", "note"),
    [
        (None, {}, None),
        ("copy/a.gguf", {}, None),  # a model may move
        ("b.gguf", {}, "it was measured with another model, a.gguf"),
        ("other/a.gguf", {}, "it was measured with another model, a.gguf"),
        (None, {"model_bytes": 4}, "it was measured with another model, a.gguf"),
        (
            None,
            {"machine": MachineFacts(cpu="that CPU", n_cpus=2)},
            "it was measured on another machine, that CPU with 2 CPUs",
        ),
        (None, {"others_cpus": 0.05}, None),
        (None, {"machine": None, "model_bytes": None, "path": None}, None),  # older
        (
            "b.gguf",
            {"others_cpus": 1.5},
            "it was measured with another model, a.gguf; "
            "other processes used 1.50 CPUs while it was measured",
        ),
    ],
)
def test_what_does_not_fit_is_one_line(model, facts, note, tmp_path: Path):
    """
    Another model, another machine, a busy one; a profile that fits is not mentioned.
    """
    assert noted(tmp_path, model, **facts) == note


def test_without_a_profile_there_is_no_note():
    """
    Also for commands that have no such flag.
    """
    assert note_of(Namespace(profile=None)) is note_of(Namespace()) is None
