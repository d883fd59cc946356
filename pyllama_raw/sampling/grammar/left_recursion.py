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

Node = tuple[int, int, int]  # op, arg, next


class Op(IntEnum):
    """As in pyllama_raw/_ffi/grammar/grammar.h."""

    RETURN = 0
    SPLIT = 1
    CALL = 2
    BYTES = 3
    TOKEN = 4
    NOT_TOKEN = 5


def refuse_left_recursion(
    nodes: Sequence[Node], starts: Mapping[str, int], calls: Mapping[int, str]
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
        nodes: Sequence[Node],
        starts: Mapping[str, int],
        calls: Mapping[int, str],
    ) -> None:
        self._nodes, self._calls = nodes, calls
        self._todo = [(start, name) for name, start in starts.items()]
        self._seen = set(self._todo)
        self._empty: set[str] = set()  # rules that can read nothing
        self._after: dict[str, list[tuple[int, str]]] = {name: [] for name in starts}
        self.called_first: dict[str, set[str]] = {name: set() for name in starts}

    def run(self) -> None:
        while self._todo:
            index, name = self._todo.pop()
            op, arg, following = self._nodes[index]
            if op == Op.SPLIT:
                self._go_to(arg, name)
                self._go_to(following, name)
            elif op == Op.CALL:
                self._call(self._calls[index], following, name)
            elif op == Op.RETURN and name not in self._empty:
                self._empty.add(name)
                for place in self._after[name]:
                    self._go_to(*place)

    def _call(self, called: str, following: int, name: str) -> None:
        self.called_first[name].add(called)
        self._after[called].append((following, name))
        if called in self._empty:
            self._go_to(following, name)

    def _go_to(self, node: int, name: str) -> None:
        if (node, name) not in self._seen:
            self._seen.add((node, name))
            self._todo.append((node, name))
