"""What a snapshot costs, as a short decode tells."""

import pytest

from pyllama_raw.engine.probe import measure
from tests.native.support import EXACT, make_context, make_prompt, prefill

pytestmark = pytest.mark.native


@pytest.mark.parametrize("options", [{}, EXACT, {"kv_unified": False}])
@pytest.mark.parametrize("n_seq_max", [1, 4])
def test_no_snapshot_is_larger_than_the_bound(model, options, n_seq_max):
    """
    The bound holds, is close, and the context is empty again, also with a single slot.
    """
    with make_context(model, n_seq_max=n_seq_max, **options) as context:
        cost = measure(context)
        n_left = [context.seq_pos_max(slot) for slot in range(n_seq_max)]
        prefill(context, make_prompt(100))
        n_bytes = context.state_bytes(0)

    assert n_left == [None] * n_seq_max
    assert n_bytes <= cost.bound(100) <= n_bytes + 512
