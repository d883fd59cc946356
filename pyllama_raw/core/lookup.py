"""
Where the latest tokens of a sequence stood before, and how often what followed follows again.

An index has the earlier places of each run of N_GRAM tokens, by a hash and chained, the latest
first. It grows with the sequence and has a fixed size but for 4 bytes a token. Of a few places the
one with the longest match is the source of what is expected, until a token is another one.

Source: the index is that of LZ77, as zlib has it.
"""

from __future__ import annotations

from array import array

N_GRAM = 3  # the least tokens that match
MAX_MATCH = 32  # a longer one says no more
MAX_TRIES = 8  # earlier places that are compared, the latest first
N_HEADS = 2**14  # of an index: 64 KiB, and 4 bytes for each token
MAX_INDEXED = 4096  # tokens of one sequence in a step: about a millisecond

# Chances of the next token to be as expected, after matches of at least so many tokens.
LENGTHS = (N_GRAM, 5, 9, 17)
FIRST_CHANCES = (0.3, 0.45, 0.6, 0.8)
WEIGHT = 0.15  # of the newest comparison, for its request
SHARED_WEIGHT = 0.02  # of the newest comparison, for requests to come
BUCKETS = tuple(
    sum(n_matched >= least for least in LENGTHS[1:])
    for n_matched in range(MAX_MATCH + 1)
)


class Lookup:
    """
    Where the latest tokens of a sequence stood before, and what is expected to follow.

    `source` is the place of the token that is expected next; 0: none is. Earlier places of equal
    hashes are chained, the latest first.
    """

    __slots__ = ("_before", "_heads", "chances", "n_matched", "source")

    def __init__(self, chances: list[float]) -> None:
        self.chances = chances
        self.source = self.n_matched = 0
        # The end of the latest run of N_GRAM tokens by its hash, and of the one before that by
        # the index of its last token; 0: there is none.
        self._heads = array("i", bytes(4 * N_HEADS))
        self._before = array("i", bytes(4 * (N_GRAM - 1)))

    def follow(self, tokens: array[int], shared: list[float]) -> bool:
        """
        Take in what *tokens* have grown by; whether all of it is taken in.

        Args:
            shared: chances of new requests, which learn, too.
        """
        start, n_tokens = len(self._before), len(tokens)
        stop = min(n_tokens, start + MAX_INDEXED)
        # A source says what was expected of each new token.
        for index in range(start, stop):
            if not self.source:
                break
            is_right = tokens[self.source] == tokens[index]
            self._learn(shared, is_right)
            if is_right:
                self.source += 1
                self.n_matched = min(self.n_matched + 1, MAX_MATCH)
            else:
                self.source = self.n_matched = 0
        self._index(tokens, start, stop)
        if stop < n_tokens:
            return False
        if not self.source and start < stop:
            self._search(tokens)
        return True

    def draft(self, tokens: array[int], n_tokens: int) -> array[int]:
        """The next *n_tokens*, if all go on as before; a text that repeats itself goes on so."""
        draft = tokens[self.source : self.source + n_tokens]
        # Between source and end is what repeats.
        while len(draft) < n_tokens:
            draft += draft[: n_tokens - len(draft)]
        return draft

    def chance(self, n_ahead: int) -> float:
        """The chance of the token after *n_ahead* others that were right."""
        return self.chances[BUCKETS[min(self.n_matched + n_ahead, MAX_MATCH)]]

    def _learn(self, shared: list[float], is_right: bool) -> None:
        bucket = BUCKETS[self.n_matched]
        self.chances[bucket] += WEIGHT * (is_right - self.chances[bucket])
        shared[bucket] += SHARED_WEIGHT * (is_right - shared[bucket])

    def _index(self, tokens: array[int], start: int, stop: int) -> None:
        """Chain the runs that end with the tokens [start, stop)."""
        if start >= stop:
            return
        # Names of the loop, because a long prompt comes through here token by token.
        heads, append = self._heads, self._before.append
        first, second = tokens[start - 2], tokens[start - 1]
        for end in range(start + 1, stop + 1):
            third = tokens[end - 1]
            number = ((first * 31 + second) * 31 + third) * 40503 >> 4 & (N_HEADS - 1)
            append(heads[number])
            heads[number] = end
            first, second = second, third

    def _search(self, tokens: array[int]) -> None:
        """Find the longest match of the end of *tokens*; of equal ones the latest."""
        n_tokens, end = len(tokens), self._before[-1]
        n_longest = N_GRAM - 1
        for _ in range(MAX_TRIES):
            if not end:
                break
            n_most, n_equal = min(end, MAX_MATCH), 0
            while (
                n_equal < n_most and tokens[end - 1 - n_equal] == tokens[-1 - n_equal]
            ):
                n_equal += 1
            if n_equal > n_longest:
                self.source, n_longest = end, n_equal
            end = self._before[end - 1]
        if self.source:
            assert self.source < n_tokens
            self.n_matched = n_longest
