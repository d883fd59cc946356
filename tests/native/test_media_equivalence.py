"""Text, image and text through our own batches give the logits of mtmd's helper."""

import numpy as np
import pytest

from tests.native.media_support import evaluate, helper_logits, loaded, sample
from tests.native.support import EXACT, make_context
from tests.support.last_digits import assert_near
from tests.support.tiny import PROJECTORS

pytestmark = pytest.mark.native

KINDS = {
    "unified": {"kv_unified": True},
    "split": {"kv_unified": False},
    "exact": EXACT,
    "without our kernels": {"kv_unified": True, "fast_kernels": False},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", PROJECTORS)
def test_logits_are_those_of_the_helper(name, kind):
    """
    The logits after the prompt are bit for bit those of mtmd_helper_eval_chunks on a
    fresh context, if the decodes are cut at the same places.
    """
    options = {"n_seq_max": 2, "n_ctx": 2048, **KINDS[kind]}
    with loaded(name) as projector, sample(projector) as bitmap:
        model = projector.model
        with (
            projector.cut(bitmap) as cut,
            make_context(model, **options) as ours,
            make_context(model, **options) as theirs,
        ):
            found = evaluate(ours, projector, cut)

            expected = helper_logits(theirs, projector, bitmap)

    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", PROJECTORS)
def test_a_neighbour_and_other_cuts_change_digits_only(name):
    """
    Beside another image in another slot, and cut elsewhere, the logits stay close.
    """
    options = {"n_seq_max": 2, "n_ctx": 4096, "kv_unified": True}
    with loaded(name) as projector:
        model = projector.model
        with (
            sample(projector) as bitmap,
            sample(projector, 1) as other,
            projector.cut(bitmap) as cut,
            projector.cut(other) as other_cut,
            make_context(model, **options) as context,
            make_context(model, **options) as alone,
        ):
            neighbour = evaluate(context, projector, other_cut, slot=0)

            found = evaluate(context, projector, cut, slot=1, most=7)

            expected = helper_logits(alone, projector, bitmap)

    assert_near(found, expected, 5e-3)
    assert np.abs(neighbour - found).max() > 0.05  # the image matters
