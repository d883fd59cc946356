"""Replies that are cut, repeated or mixed up lose nothing."""

import os
import random

import pytest

from pyllama_raw.replies.spec import bundled
from scripts.mutate_replies import check
from tests.replies.written import is_special

N_CASES = int(os.environ.get("PYLLAMA_RAW_TEST_CASES", "40"))


@pytest.mark.chance
@pytest.mark.parametrize("family", sorted(bundled()))
def test_spoiled_replies_are_read_without_loss(family: str):
    """
    Spoiled replies of each family raise nothing, and are alike in any pieces.

    All their letters are in content, reasoning or calls. `scripts/mutate_replies.py` tries more.
    """
    plain = bundled()[family]
    specs = [plain, plain.bound(is_special)]

    for n in range(N_CASES):
        check(specs[n % 2], random.Random(f"{family} {n}"))  # noqa: S311
