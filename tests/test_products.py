"""What is tried of a product of parameters each time."""

from tests.support.products import in_turn


def test_each_value_is_tried_each_time():
    """
    And what is asked for as a whole; the rest is nightly and not lost.
    """
    params = in_turn("abc", (1, 2), always=lambda letter, _: letter == "a")

    tried = [param.values for param in params if not param.marks]
    assert tried == [("a", 1), ("a", 2), ("b", 2), ("c", 2)]
    assert [param.values for param in params if param.marks] == [("b", 1), ("c", 1)]


def test_equal_axes_do_not_go_side_by_side():
    """
    Of four, two and two values each pair is tried.
    """
    params = in_turn(range(4), "ab", "xy")

    tried = [param.values[1:] for param in params if not param.marks]
    assert sorted(tried) == [("a", "x"), ("a", "y"), ("b", "x"), ("b", "y")]
