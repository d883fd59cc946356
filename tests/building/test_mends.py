"""Mends of the sources of llama.cpp."""

from pathlib import Path

import pytest

import build_lib
from build_lib import BuildError
from scripts import llama_source
from tests.support.builds import make_prefix

MENDS = (*build_lib.MENDS, *build_lib.MENDS_OF_OLDER)


EACH_MEND = pytest.mark.parametrize("mend", MENDS, ids=range(len(MENDS)))


def make_mended(folder: Path, mend: build_lib.Mend, text: str) -> Path:
    """A source tree with all that is right, but *text* in place of what *mend* makes right."""
    for other in MENDS:
        path = folder / other.file
        path.parent.mkdir(parents=True, exist_ok=True)
        content = text if other == mend else f"a {other.right} b"
        path.write_text((path.read_text() if path.exists() else "") + content + "\n")
    return folder / mend.file


@EACH_MEND
@pytest.mark.parametrize("is_right", [False, True])
def test_a_source_is_mended_once(mend, is_right, tmp_path):
    """
    A later llama.cpp that has the right text is fine as it is.
    """
    path = make_mended(tmp_path, mend, mend.right if is_right else mend.wrong)
    before = build_lib.is_mended(tmp_path)
    build_lib.mend(tmp_path)
    once = path.read_text()
    build_lib.mend(tmp_path)

    assert (before, build_lib.is_mended(tmp_path)) == (is_right, True)
    assert (once.count(mend.right), once.count(mend.wrong)) == (1, 0)
    assert path.read_text() == once


@EACH_MEND
@pytest.mark.parametrize("n_wrong", [0, 2])
def test_a_source_that_cannot_be_mended_is_refused(mend, n_wrong, tmp_path):
    """
    A mend is never lost in silence.
    """
    make_mended(tmp_path, mend, "another text " + mend.wrong * n_wrong)

    with pytest.raises(BuildError, match=r"llama-\S+\.cpp .* change MENDS"):
        build_lib.mend(tmp_path)


@EACH_MEND
def test_a_source_of_the_cache_is_mended_by_a_later_checkout(
    mend, monkeypatch, tmp_path
):
    """
    An earlier one has unpacked it, and had fewer mends.
    """
    monkeypatch.setenv("PYLLAMA_RAW_CACHE", str(tmp_path))
    make_mended(llama_source.home_of(llama_source.WINDOW["before"]), mend, mend.wrong)

    assert build_lib.is_mended(llama_source.tree("before"))


def test_the_pinned_library_is_kept_when_older_ones_are_mended(monkeypatch):
    """
    Its source has what is right, so it is not built anew.
    """
    key = build_lib.build_key()
    monkeypatch.setattr(build_lib, "MENDS_OF_OLDER", ())

    assert build_lib.build_key() == key


def test_a_library_of_the_user_is_not_taken_for_mended(tmp_path):
    """
    Only what was built from a mended source is.
    """
    library = build_lib.installed_at(make_prefix(tmp_path / "prefix"))
    before = library.is_mended
    (library.prefix / build_lib.MENDED).touch()

    assert (before, library.is_mended) == (False, True)
