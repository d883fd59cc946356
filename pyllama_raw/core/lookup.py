"""
What is expected to follow a sequence, and how often it does.

Whatever was expected is compared with each token that comes, so chances are learned by the way.
`Lookup` expects what followed the latest tokens where they stood before:

1. An index has the earlier places of each run of N_GRAM tokens, by a hash and chained, the latest
   first. It grows with its text and has a fixed size but for 4 bytes a token.
2. A sequence looks at its own tokens, and at those of requests that have ended and shared their
   prefixes with it: `NamespaceTexts`. Nobody sees a text of another namespace.
3. Of a few places the one with the longest match is the source of what is expected, until a token
   is another one; of equal ones the latest. A place in another text has to match twice as long.

`Drafting` expects what a draft model has said.

Source: the index is that of LZ77, as zlib has it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Items

from pyllama_raw.core.request import Namespace, Private, is_of

N_GRAM = 3  # the least tokens that match
N_GRAM_OTHERS = 5  # likewise in texts of other requests, where short runs say little
MAX_MATCH = 32  # a longer one says no more
MAX_TRIES = 8  # earlier places that are compared, the latest first
N_HEADS = 2**14  # of an index: 64 KiB, and 4 bytes for each token
MAX_INDEXED = 4096  # tokens of one sequence in a step: about a millisecond

# Texts of requests that have ended take about 700 KiB a namespace at most.
MAX_NAMESPACES = 16  # those that were used last
MAX_TEXT = 2**15  # tokens of one of the two texts of a namespace
BORDER = -1  # no token: stands between two texts

# Chances of the next token to be as expected, after matches of at least so many tokens: first those
# of own places, then those of other requests'.
LENGTHS = (N_GRAM, 5, 9, 17)
FIRST_CHANCES = (0.3, 0.45, 0.6, 0.8, 0.2, 0.3, 0.5, 0.7)
WEIGHT = 0.15  # of the newest comparison, for its request
SHARED_WEIGHT = 0.02  # of the newest comparison, for requests to come
# Which of them holds, by the tokens that match.
OWN_KINDS = tuple(
    sum(n_matched >= least for least in LENGTHS[1:])
    for n_matched in range(MAX_MATCH + 1)
)
OTHERS_KINDS = tuple(len(LENGTHS) + kind for kind in OWN_KINDS)

# Of a draft model: chances of its tokens to be right, by the probability that it gave, in fifths.
FIRST_OF_MODEL = (0.1, 0.3, 0.5, 0.7, 0.92)
FIRST_MEAN = 0.7
MODEL_WEIGHT = 0.1  # of the newest comparison, for its request


class TextIndex:
    """Where runs of N_GRAM tokens end in a text that grows. A text of MAX_INDEXED takes about 1 ms."""

    __slots__ = ("_before", "_heads")

    def __init__(self) -> None:
        # The end of the latest run of N_GRAM tokens by its hash, and of the one before that by
        # the index of its last token; 0: there is none.
        self._heads = array("i", bytes(4 * N_HEADS))
        self._before = array("i", bytes(4 * (N_GRAM - 1)))

    def grow(self, text: array[int], stop: int) -> None:
        """Chain the runs of *text* up to *stop*, which is at most its length."""
        start = len(self._before)
        if start >= stop:
            return
        # Names of the loop, because a long prompt comes through here token by token.
        heads, append = self._heads, self._before.append
        first, second = text[start - 2], text[start - 1]
        for end in range(start + 1, stop + 1):
            third = text[end - 1]
            number = ((first * 31 + second) * 31 + third) * 40503 >> 4 & (N_HEADS - 1)
            append(heads[number])
            heads[number] = end
            first, second = second, third

    def places(self, tokens: array[int]) -> Iterator[int]:
        """
        Places that may be as the end of *tokens*, the latest first.

        In the index of *tokens* themselves the first of them is this end.
        """
        if len(tokens) < N_GRAM:
            return
        first, second, third = tokens[-N_GRAM:]
        number = ((first * 31 + second) * 31 + third) * 40503 >> 4 & (N_HEADS - 1)
        end = self._heads[number]
        for _ in range(MAX_TRIES + 1):
            if not end:
                return
            yield end
            end = self._before[end - 1]


class NamespaceTexts:
    """
    Prompts and outputs of requests of one namespace that have ended, the latest ones.

    Two texts with an index each, of which the older one goes when the younger one is full.
    """

    __slots__ = ("parts",)

    def __init__(self) -> None:
        self.parts: list[tuple[array[int], TextIndex]] = []  # the younger one first

    def add(self, tokens: array[int]) -> None:
        """Take in *tokens*; of a long text the end."""
        tokens = tokens[-MAX_INDEXED:]
        if not self.parts or len(self.parts[0][0]) + len(tokens) >= MAX_TEXT:
            self.parts = [(array("i", [BORDER] * N_GRAM), TextIndex()), *self.parts[:1]]
        text, index = self.parts[0]
        text += tokens
        text.append(BORDER)
        index.grow(text, len(text))


class SharedTexts:
    """Texts that requests share, by namespace; one of an engine."""

    def __init__(self) -> None:
        self._texts: dict[Namespace, NamespaceTexts] = {}  # in the order of their use

    def of(self, namespace: Namespace) -> NamespaceTexts | None:
        """Those of *namespace*, which is used now; None: it shares with nobody."""
        if isinstance(namespace, Private):
            return None
        texts = self._texts.pop(namespace, None) or NamespaceTexts()
        self._texts[namespace] = texts
        # The namespace that was not used for longest goes.
        if len(self._texts) > MAX_NAMESPACES:
            del self._texts[next(iter(self._texts))]
        return texts

    def clear(self, salt: str | None) -> None:
        """Forget the texts of *salt*, None: all; also those that running requests look at."""
        for namespace in [name for name in self._texts if is_of(name, salt)]:
            self._texts.pop(namespace).parts = []


class Lookup:
    """
    Where the latest tokens of a sequence stood before, and what is expected to follow.

    `source` is the place, in `text`, of the token that is expected next; 0: none is.

    Args:
        chances: of this request, which it learns.
        texts: those of its namespace; None: only its own.
    """

    __slots__ = (
        "_index",
        "_n_followed",
        "_texts",
        "chances",
        "n_matched",
        "source",
        "text",
    )

    def __init__(
        self, chances: list[float], texts: NamespaceTexts | None = None
    ) -> None:
        self.chances = chances
        self.source = self.n_matched = 0
        self.text: array[int] | None = None  # of another request; None: its own
        self._index = TextIndex()
        self._n_followed = 0  # first tokens that are taken in
        self._texts = texts

    def follow(self, tokens: array[int], shared: list[float]) -> bool:
        """
        Take in what *tokens* have grown by; whether all of it is taken in.

        Args:
            shared: chances of new requests, which learn, too.
        """
        start, n_tokens = self._n_followed, len(tokens)
        self._n_followed = stop = min(n_tokens, start + MAX_INDEXED)
        # Texts of its namespace were forgotten meanwhile.
        if self.text is not None and self._texts is not None and not self._texts.parts:
            self.source, self.n_matched, self.text = 0, 0, None
        is_own = self.text is None
        text, kinds = self.text or tokens, OWN_KINDS if is_own else OTHERS_KINDS
        # A source says what was expected of each new token.
        for index in range(start, stop):
            if not self.source:
                break
            is_right, kind = text[self.source] == tokens[index], kinds[self.n_matched]
            self.chances[kind] += WEIGHT * (is_right - self.chances[kind])
            shared[kind] += SHARED_WEIGHT * (is_right - shared[kind])
            if is_right:
                self.source += 1
                self.n_matched = min(self.n_matched + 1, MAX_MATCH)
            # Another request's text may end, and nothing is expected any more.
            if not is_right or not (is_own or text[self.source] >= 0):
                self.source = self.n_matched = 0
        self._index.grow(tokens, stop)
        if stop < n_tokens:
            return False
        if not self.source and start < stop:
            self._search(tokens)
        return True

    def draft(
        self, tokens: array[int], n_most: int, least: float
    ) -> tuple[array[int], list[float]]:
        """What is expected, and the chance of each to be reached and accepted, of *least* or more."""
        kinds = OWN_KINDS if self.text is None else OTHERS_KINDS
        chances, chance = list[float](), 1.0
        for n_ahead in range(n_most):
            chance *= self.chances[kinds[min(self.n_matched + n_ahead, MAX_MATCH)]]
            if chance < least:
                break
            chances.append(chance)
        n_drafts = len(chances)
        if self.text is not None:
            draft = self.text[self.source : self.source + n_drafts]
            return draft, chances[: len(draft)]
        draft = tokens[self.source : self.source + n_drafts]
        # Between source and end is what repeats: a text that repeats itself goes on so.
        while len(draft) < n_drafts:
            draft += draft[: n_drafts - len(draft)]
        return draft, chances

    def _search(self, tokens: array[int]) -> None:
        """Find the longest match of the end of *tokens*; of equal ones the latest."""
        self.text, n_tokens, n_longest = None, len(tokens), N_GRAM - 1
        shared_texts = () if self._texts is None else self._texts.parts
        for text, index in ((tokens, self._index), *shared_texts):
            for end in index.places(tokens):
                # Nothing follows the end of a text.
                if end >= len(text) or text[end] < 0:
                    continue
                n_most, n_equal = min(end, n_tokens, MAX_MATCH), 0
                while (
                    n_equal < n_most and text[end - 1 - n_equal] == tokens[-1 - n_equal]
                ):
                    n_equal += 1
                if n_equal > n_longest:
                    self.source, self.n_matched, n_longest = end, n_equal, n_equal
                    self.text = None if text is tokens else text
            # A request goes on as it did before rather than as another one: twice as much has to match.
            if text is tokens:
                n_longest = max(2 * self.n_matched, N_GRAM_OTHERS - 1)


class Drafting:
    """
    What a draft model says of a sequence, and how often it is right.

    `chances` are those of its tokens, by the probability that it gave, `mean` that of all.
    """

    __slots__ = (
        "_at",
        "_end",
        "_kinds",
        "_tokens",
        "chances",
        "is_readable",
        "mean",
        "n_held",
        "n_read",
    )

    def __init__(self) -> None:
        self.chances = list(FIRST_OF_MODEL)
        self.mean = FIRST_MEAN
        self.n_held = self.n_read = 0  # first tokens that it holds, and that were read
        self.is_readable = True  # it knows all that were read
        self._tokens: array[int] = array("i")
        self._kinds: list[int] = []  # of each, by its probability
        self._at = self._end = 0  # index of the next one, and behind the last one

    def copy(self) -> Drafting:
        """One of another sequence, of which nothing else is known."""
        copied = Drafting()
        copied.chances, copied.mean = self.chances.copy(), self.mean
        return copied

    def propose(self, start: int, tokens: Items[int], chances: Items[float]) -> None:
        """Expect *tokens* behind the first *start* ones; *chances* are those of the model."""
        self._tokens, last = array("i", tokens), len(FIRST_OF_MODEL) - 1
        self._kinds = [min(int(c * len(FIRST_OF_MODEL)), last) for c in chances]
        self._at, self._end = start, start + len(self._tokens)

    def follow(self, tokens: array[int], shared: Drafting) -> None:
        """Compare what was expected with *tokens*; *shared* learns, too."""
        while self._at < self._end and self._at < len(tokens):
            place = self._at - self._end
            is_right, kind = tokens[self._at] == self._tokens[place], self._kinds[place]
            for learner, weight in ((self, MODEL_WEIGHT), (shared, SHARED_WEIGHT)):
                learner.mean += weight * (is_right - learner.mean)
                learner.chances[kind] += weight * (is_right - learner.chances[kind])
            self._at += 1
            if not is_right:
                self._end = self._at

    @property
    def n_ahead(self) -> int:
        """Tokens that are expected and have not come."""
        return self._end - self._at

    def draft(self, n_most: int, least: float) -> tuple[array[int], list[float]]:
        """These, and the chance of each to be reached and accepted, of *least* or more."""
        start = len(self._tokens) - self.n_ahead
        chances, chance = list[float](), 1.0
        for kind in self._kinds[start : start + n_most]:
            chance *= self.chances[kind]
            if chance < least:
                break
            chances.append(chance)
        return self._tokens[start : start + len(chances)], chances
