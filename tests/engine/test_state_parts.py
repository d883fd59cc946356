"""A state in parts, as it stands in a file."""

import pytest

from pyllama_raw.engine.state_files import PART_TOKENS, make_head, n_parts_of, parts_of
from pyllama_raw.errors import SnapshotFailed

WHOLE = make_head([(3, 128), (2, 5)]) + b"aaabb"


def test_parts_are_found_again():
    """
    Each with the indices that it holds.
    """
    parts = parts_of(memoryview(WHOLE))

    assert [(start, stop, bytes(state)) for start, stop, state in parts] == [
        (0, 128, b"aaa"),
        (128, 133, b"bb"),
    ]


@pytest.mark.parametrize(
    "data",
    [b"", WHOLE[:3], WHOLE[:20], WHOLE[:-1], WHOLE + b"c", b"\xff" * 40],
)
def test_what_is_no_state_in_parts_is_refused(data):
    """
    Anybody may have written it: it fails like a restore.
    """
    with pytest.raises(SnapshotFailed):
        parts_of(memoryview(data))


@pytest.mark.parametrize(
    ("n_tokens", "n_parts"), [(1, 1), (PART_TOKENS, 1), (PART_TOKENS + 1, 2)]
)
def test_the_last_part_may_be_short(n_tokens, n_parts):
    """
    All others have PART_TOKENS.
    """
    assert n_parts_of(n_tokens) == n_parts
