"""
Rules of a grammar as a program that reads bytes: nodes that point to what follows.

_ffi/grammar/grammar.h says what the nodes mean. Repetitions are written out, so their size
is limited. Rules that would call themselves before they read anything are refused.

Nodes are numbers in one array, because Python looks through all objects of the process
after so many new ones, and no other thread runs meanwhile.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass

from pyllama_raw.errors import BadGrammar
from pyllama_raw.options.grammar.charset import byte_ranges, complement
from pyllama_raw.options.grammar.gbnf import MAX_ITEMS
from pyllama_raw.options.grammar.left_recursion import WORDS, Op, refuse_left_recursion
from pyllama_raw.options.grammar.rules import (
    Chars,
    Group,
    Item,
    Literal,
    Ref,
    Repeat,
    Rules,
    Token,
)

FindToken = Callable[[int | str], int | None]
MAX_NODES = 2 * MAX_ITEMS
RETURN = 0  # the node that ends every rule


@dataclass(frozen=True, slots=True)
class Program:
    """What plr_grammar_new() takes; bit b of a set is byte b."""

    nodes: array[int]  # op, arg and next of each
    sets: list[int]
    start: int


def compile_rules(rules: Rules, find_token: FindToken) -> Program:
    """Write *rules* out. Raises BadGrammar: too large, left-recursive, no such token."""
    return _Compiler(find_token).run(rules)


class _Compiler:
    def __init__(self, find_token: FindToken) -> None:
        self._find_token = find_token
        self._nodes = array("i", (Op.RETURN, 0, RETURN))
        self._sets: dict[int, int] = {}  # to their index
        self._calls: dict[int, str] = {}  # node: name of the rule
        self._n_items = 0

    def run(self, rules: Rules) -> Program:
        starts = {name: self._item(body, RETURN) for name, body in rules.bodies.items()}
        for index, name in self._calls.items():
            self._nodes[WORDS * index + 1] = starts[name]
        refuse_left_recursion(self._nodes, starts, self._calls)
        return Program(self._nodes, list(self._sets), starts[rules.root])

    def _item(self, item: Item, following: int) -> int:
        """Write *item* before the node *following*; returns its first node."""
        self._count()
        match item:
            case Literal(text):
                return self._literal(text, following)
            case Chars():
                return self._chars(item, following)
            case Token():
                return self._token(item, following)
            case Ref(name):
                call = self._add(Op.CALL, RETURN, following)
                self._calls[call] = name
                return call
            case Group(alternatives):
                starts = [self._sequence(items, following) for items in alternatives]
                return self._any_of(starts)
            case Repeat():
                return self._repeat(item, following)

    def _count(self) -> None:
        self._n_items += 1
        if self._n_items > MAX_ITEMS:
            text = f"more than {MAX_ITEMS} items with repetitions written out"
            raise BadGrammar(text, None)

    def _literal(self, text: str, following: int) -> int:
        for byte in reversed(text.encode()):
            following = self._bytes(1 << byte, following)
        return following

    def _sequence(self, items: list[Item], following: int) -> int:
        for item in reversed(items):
            following = self._item(item, following)
        return following

    def _any_of(self, starts: list[int]) -> int:
        start = starts[-1]
        for other in reversed(starts[:-1]):
            start = self._add(Op.SPLIT, other, start)
        return start

    def _repeat(self, repeat: Repeat, following: int) -> int:
        item, least, most = repeat.item, repeat.least, repeat.most
        if most is None:
            loop = self._add(Op.SPLIT, RETURN, following)
            start = self._item(item, loop)
            self._nodes[WORDS * loop + 1] = start
            following = start if least else loop
            least -= bool(least)
        else:
            end = following
            for _ in range(most - least):
                following = self._add(Op.SPLIT, self._item(item, following), end)
        for _ in range(least):
            following = self._item(item, following)
        return following

    def _chars(self, chars: Chars, following: int) -> int:
        """Sequences that end alike share their ends."""
        ranges = complement(chars.ranges) if chars.negated else chars.ranges
        tails: dict[tuple[int, int], int] = {}  # set and following node: node
        firsts: dict[int, int] = {}  # following node: set of first bytes
        for first, *others in byte_ranges(ranges):
            node = following
            for byte_range in reversed(others):
                key = _bits(byte_range), node
                if key not in tails:
                    tails[key] = self._bytes(*key)
                node = tails[key]
            firsts[node] = firsts.get(node, 0) | _bits(first)
        starts = [self._bytes(bits, node) for node, bits in firsts.items()]
        return self._any_of(starts or [self._bytes(0, following)])

    def _token(self, item: Token, following: int) -> int:
        token = self._find_token(item.token)
        if token is None:
            raise BadGrammar(f"{item.token!r} is no single token", item.position)
        return self._add(Op.NOT_TOKEN if item.negated else Op.TOKEN, token, following)

    def _bytes(self, bits: int, following: int) -> int:
        return self._add(
            Op.BYTES, self._sets.setdefault(bits, len(self._sets)), following
        )

    def _add(self, op: Op, arg: int, following: int) -> int:
        node = len(self._nodes) // WORDS
        if node == MAX_NODES:
            text = f"more than {MAX_NODES} nodes with repetitions written out"
            raise BadGrammar(text, None)
        self._nodes.extend((op, arg, following))
        return node


def _bits(byte_range: tuple[int, int]) -> int:
    low, high = byte_range
    return (1 << (high + 1)) - (1 << low)
