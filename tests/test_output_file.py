"""Files are complete or as they were."""

import os
import stat
from pathlib import Path

import pytest

from pyllama_raw import ConfigError
from pyllama_raw.options.profile import check_writable, replacing


def test_what_was_there_stays_until_the_end(tmp_path: Path):
    """
    The new text takes the place of the old at once, with the permissions of the old.
    """
    path = tmp_path / "out"
    path.write_text("old")
    path.chmod(0o640)

    with replacing(path) as file:
        file.write("new")
        file.flush()
        meanwhile = path.read_text()

    assert (meanwhile, path.read_text()) == ("old", "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, SystemExit])
def test_a_failure_loses_neither_the_old_nor_the_new(error, tmp_path: Path):
    """
    What was written so far stays beside what was there, however the block ended.
    """
    path = tmp_path / "out"
    path.write_text("old")

    with pytest.raises(error):
        _fail_in_the_middle(path, error)

    (part,) = tmp_path.glob("*.part")
    assert (path.read_text(), part.read_text()) == ("old", "half")


def _fail_in_the_middle(path: Path, error: type[BaseException]) -> None:
    with replacing(path) as file:
        file.write("half")
        raise error


def test_a_failure_before_the_first_word_leaves_nothing(tmp_path: Path):
    """
    No empty file is left beside, and none in the place.
    """
    with pytest.raises(ValueError, match="early"), replacing(tmp_path / "out"):
        raise ValueError("early")

    assert list(tmp_path.iterdir()) == []


def test_a_link_stays_a_link(tmp_path: Path):
    """
    The file that it leads to is replaced.
    """
    (tmp_path / "real").write_text("old")
    (tmp_path / "link").symlink_to("real")

    with replacing(tmp_path / "link") as file:
        file.write("new")

    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_text() == "new"


def test_devices_are_written_directly():
    """
    /dev/null and pipes are not replaced by files.
    """
    with replacing(Path(os.devnull)) as file:
        file.write("gone")

    assert not Path(os.devnull).is_file()


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "it is a folder"),
        ("no/out", "there is no folder"),
        ("file/out", "no folder"),
    ],
)
def test_a_place_that_cannot_be_written_is_refused(name, reason, tmp_path: Path):
    """
    Before anything is done there, with the reason.
    """
    (tmp_path / "file").touch()

    with pytest.raises(ConfigError, match=reason):
        check_writable(tmp_path / name)


def test_a_model_is_not_replaced(tmp_path: Path):
    """
    A name in the wrong place, as `--out model.gguf`, costs nobody a model.
    """
    model = tmp_path / "model.gguf"
    model.write_bytes(b"GGUF\x03\0\0\0")

    with pytest.raises(ConfigError, match="it is a model, name another file"):
        check_writable(model)
