"""Requantising: what comes out runs, and nothing ends the process or replaces a file."""

import os
from pathlib import Path

import pytest

from pyllama_raw import ConfigError
from pyllama_raw.errors import ModelLoadFailed, QuantizeFailed
from pyllama_raw.native.gguf import check_gguf
from pyllama_raw.native.model import FILE_TYPES, Model, quantize
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native


@pytest.mark.parametrize("file_type", FILE_TYPES)
def test_every_type_makes_a_model(file_type, tmp_path: Path):
    """
    The new file loads with tensors of the same shapes; nothing else is left.
    """
    target = tmp_path / "new.gguf"

    quantize(tiny_model("llama"), target, file_type)

    with Model.load(tiny_model("llama")) as old, Model.load(target) as new:
        of_new, of_old = [
            {tensor.name: tensor.dims for tensor in model.header.tensors}
            for model in (new, old)
        ]
        assert of_new == of_old
    assert os.listdir(tmp_path) == ["new.gguf"]  # noqa: PTH208


def test_no_file_is_replaced(tmp_path: Path):
    """
    Neither another one nor the model itself.
    """
    target = tmp_path / "new.gguf"
    target.write_text("mine")

    for there in (target, tiny_model("llama")):
        with pytest.raises(ConfigError, match="exists"):
            quantize(tiny_model("llama"), there, "q4_0")

    assert target.read_text() == "mine"
    check_gguf(str(tiny_model("llama")))


@pytest.mark.parametrize(
    ("source", "target", "file_type", "error"),
    [
        ("nowhere.gguf", "new.gguf", "q4_0", ModelLoadFailed),
        ("text.gguf", "new.gguf", "q4_0", ModelLoadFailed),
        (None, "no/folder/new.gguf", "q4_0", ConfigError),
        (None, "a\0b.gguf", "q4_0", ConfigError),
        (None, "new.gguf", "iq1_s", ConfigError),
    ],
)
def test_bad_input_is_refused_first(source, target, file_type, error, tmp_path: Path):
    """
    Missing files, text, bad places and unknown types; nothing is written.
    """
    (tmp_path / "text.gguf").write_text("not a model")
    path = tiny_model("llama") if source is None else tmp_path / source

    with pytest.raises(error):
        quantize(path, tmp_path / target, file_type)

    assert os.listdir(tmp_path) == ["text.gguf"]  # noqa: PTH208


@pytest.mark.parametrize("kept", [0.5, 0.9, 0.999])
def test_a_file_that_ends_early_fails_and_leaves_nothing(kept, tmp_path: Path):
    """
    The vocabulary can be read, weights are missing: an error, not a crash.
    """
    whole = tiny_model("llama").read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(whole[: int(len(whole) * kept)])

    with pytest.raises((ModelLoadFailed, QuantizeFailed)):
        quantize(cut, tmp_path / "new.gguf", "q4_0")

    assert os.listdir(tmp_path) == ["cut.gguf"]  # noqa: PTH208
