"""
Does a rule call itself before it has read anything? Then no reading of it ends.

Each rule is followed through what reads nothing, each of its nodes once; cycles among the
rules that are called there are left recursion.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import IntEnum
from graphlib import CycleError, TopologicalSorter

from pyllama_raw.errors import BadGrammar

WORDS = 3  # of a node: op, arg, next


class Op(IntEnum):
    """As in pyllama_raw/_ffi/grammar/grammar.h."""

    RETURN = 0
    SPLIT = 1
    CALL = 2
    BYTES = 3
    TOKEN = 4
    NOT_TOKEN = 5


def refuse_left_recursion(
    nodes: Sequence[int], starts: Mapping[str, int], calls: Mapping[int, str]
) -> None:
    """
    Args:
        starts: first node of each rule.
        calls: the rule that a node of op CALL names.

    Raises:
        BadGrammar: names the rules of one cycle.
    """
    search = _Search(nodes, starts, calls)
    search.run()
    try:
        TopologicalSorter(search.called_first).prepare()
    except CycleError as error:
        names = " > ".join(error.args[1])
        raise BadGrammar(f"left recursion: {names}", None) from None


class _Search:
    def __init__(
        self,
        nodes: Sequence[int],
        starts: Mapping[str, int],
        calls: Mapping[int, str],
    ) -> None:
        self._nodes, self._calls = nodes, calls
        self._names = list(starts)
        self._todo: list[int] = []  # places: a node in a rule, as one number
        self._seen = set[int]()
        self._empty: set[str] = set()  # rules that can read nothing
        self._after: dict[str, list[int]] = {name: [] for name in starts}
        self.called_first: dict[str, set[str]] = {name: set() for name in starts}
        for rule, start in enumerate(starts.values()):
            self._go_to(start, rule)

    def run(self) -> None:
        while self._todo:
            index, rule = divmod(self._todo.pop(), len(self._names))
            op, arg, following = self._nodes[WORDS * index : WORDS * (index + 1)]
            if op == Op.SPLIT:
                self._go_to(arg, rule)
                self._go_to(following, rule)
            elif op == Op.CALL:
                self._call(self._calls[index], following, rule)
            elif op == Op.RETURN and self._names[rule] not in self._empty:
                self._empty.add(self._names[rule])
                for place in self._after[self._names[rule]]:
                    self._look_at(place)

    def _call(self, called: str, following: int, rule: int) -> None:
        self.called_first[self._names[rule]].add(called)
        place = self._place(following, rule)
        self._after[called].append(place)
        if called in self._empty:
            self._look_at(place)

    def _place(self, node: int, rule: int) -> int:
        return node * len(self._names) + rule

    def _go_to(self, node: int, rule: int) -> None:
        self._look_at(self._place(node, rule))

    def _look_at(self, place: int) -> None:
        if place not in self._seen:
            self._seen.add(place)
            self._todo.append(place)
