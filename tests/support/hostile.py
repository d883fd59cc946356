"""Objects that no argument should be, for tests of what public functions refuse."""

from collections import UserDict
from itertools import count


class Unreadable:
    """Everything that can be asked of it raises."""

    def _refuse(self, *_):
        raise ZeroDivisionError("do not look at me")

    __repr__ = __str__ = __eq__ = __hash__ = __bool__ = __len__ = __iter__ = _refuse
    __getitem__ = __index__ = __float__ = __int__ = __lt__ = __gt__ = __fspath__ = (
        _refuse
    )
    __call__ = __contains__ = __next__ = __getattr__ = _refuse


class UnreadableList(list):
    """A list whose items nobody gets."""

    def __iter__(self):
        raise ZeroDivisionError("do not look at me")


class UncountableList(list):
    """A list that does not say how many items it has."""

    def __len__(self):
        raise ZeroDivisionError("do not count me")


class Unhashable(dict):
    """A dict with an order, so that a queue could take it at first."""

    def __lt__(self, other):
        return True

    __gt__ = __le__ = __ge__ = __lt__


class AngryInt(int):
    """A number that raises when it is compared or hashed."""

    def _refuse(self, *_):
        raise ZeroDivisionError("do not compare me")

    __eq__ = __hash__ = __lt__ = __gt__ = __le__ = __ge__ = __abs__ = _refuse
    __int__ = __index__ = __repr__ = _refuse


class AngryText(str):
    """Text that raises when it is compared or hashed."""

    __slots__ = ()

    def _refuse(self, *_):
        raise ZeroDivisionError("do not compare me")

    __eq__ = __hash__ = __len__ = __str__ = __repr__ = encode = _refuse


def nested(depth: int) -> list[object]:
    """A list in a list in a list."""
    value: list[object] = []
    for _ in range(depth):
        value = [value]
    return value


class EndlessMapping(UserDict):
    """A mapping whose items never end."""

    def items(self):
        return ((str(n), 1) for n in count())


class UnreadableMapping(UserDict):
    """A mapping that gives nothing out."""

    def items(self):
        raise ZeroDivisionError("do not look at me")


def endless():
    """An iterator that never ends."""
    return count(1)
