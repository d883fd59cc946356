"""What is tried of a product of parameters each time."""

from tests.support.products import in_turn


def test_each_value_is_tried_each_time():
    """
    And what is asked for as a whole; the rest is nightly and not lost.
    """
    params = in_turn("abc", (1, 2), whole=lambda letter, _: letter == "a")

    tried = [param.values for param in params if not param.marks]
    assert tried == [("a", 1), ("a", 2), ("b", 2), ("c", 1)]
    assert [param.values for param in params if param.marks] == [("b", 1), ("c", 2)]
