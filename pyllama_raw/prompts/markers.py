"""
Places of a prompt that may hold control tokens.

The tokenizer finds the spelling of a special token wherever it stands in a text. In a
chat only the template may write one: where a message has a hand in it, the text is cut
there, so that the tokenizer never sees the spelling as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise

from pyllama_raw.errors import InvalidRequest

Span = tuple[int, int]

_MARKER_FORM = re.compile("<[|\uff5c].*[|\uff5c]>", re.DOTALL)
N_FIRST = (
    4  # characters by which spellings are looked for: a file may have 200,000 of them
)
PIECE = 2**14  # characters: libllama takes quadratic time for many markers in a text


class Markers:
    """
    The spellings that only a template may write.

    Control tokens always are. Of the tokens that are "user defined" those are that look
    like markers or that the template itself writes; others are runs of spaces, words,
    and tags of HTML, which people may write.

    Args:
        special: spellings of special tokens, and whether they are control tokens.
        template: the source of the chat template.
    """

    def __init__(self, special: Mapping[str, bool], template: str | None) -> None:
        self._certain = {
            text
            for text, is_control in special.items()
            if is_control or (_is_tag(text) and _is_marker(text, template or ""))
        }
        # Other tags are markers if the template puts them together.
        self._spellings = self._certain.union(filter(_is_tag, special))
        self._lengths = sorted({len(text) for text in self._spellings}, reverse=True)
        firsts = {text[:N_FIRST] for text in self._spellings}
        self._starts = re.compile(f"(?={_any_of(firsts)})")

    def parts(self, text: str, origins: str) -> Iterator[tuple[str, bool]]:
        """
        *text* in pieces, and whether a piece may be searched for special tokens.

        What may be found in a piece is then written by the template. Long texts are
        also cut in front of its markers, where the tokenizer cuts them anyway.

        Args:
            origins: of each character: m a message, t the template, d in doubt.

        Raises:
            InvalidRequest: the writer of a marker is in doubt.
        """
        spans = list(self._occurrences(text))
        # No marker: the tokenizer may search all of it, and finds nothing.
        if not spans:
            yield from [(text, True)] if text else ()
            return
        forged = self._forged(spans, text, origins)
        # A marker that a message has a hand in is cut in two. One of a single character cannot
        # be cut, so it is a piece that is not searched.
        alone = {start for start, stop in forged if stop - start == 1}
        cuts = {*_cuts(forged, origins), *_seams(spans, origins)}
        bounds = [0, *sorted(cuts), len(text)]
        for start, stop in pairwise(bounds):
            if start < stop:
                yield text[start:stop], start not in alone

    def _forged(self, spans: list[Span], text: str, origins: str) -> list[Span]:
        """The ones of *spans* in which a message wrote a part of a marker; by their ends."""
        certain = self._certain.union(
            text[start:stop] for start, stop in spans if _is_own(origins[start:stop])
        )
        forged = []
        for start, stop in spans:
            writers = origins[start:stop]
            # Written by the template, or no marker at all: both are left as they are.
            if _is_own(writers) or text[start:stop] not in certain:
                continue
            # Nobody knows the writer, so it may be a message.
            if "m" not in writers:
                raise InvalidRequest(
                    "messages",
                    text[start:stop],
                    "messages with which the chat template writes control tokens by "
                    "operations whose origin can be followed, or a text prompt",
                )
            forged.append((start, stop))
        return sorted(forged, key=lambda span: span[1])

    def _occurrences(self, text: str) -> Iterator[Span]:
        """All places of all spellings, which may lie in each other."""
        longest = max(self._lengths, default=0)
        # Window by window, because no other thread runs while a pattern is searched.
        for begin in range(0, len(text), PIECE):
            window = text[begin : begin + PIECE + longest]
            for match in self._starts.finditer(window):
                start = begin + match.start()
                if match.start() >= PIECE:  # the next window has it
                    break
                for stop in (start + length for length in self._lengths):
                    if stop <= len(text) and text[start:stop] in self._spellings:
                        yield start, stop


def _any_of(texts: Iterable[str]) -> str:
    """A pattern that matches where one of *texts* begins, letter by letter."""
    following: dict[str, list[str]] = {}
    for text in texts:
        if not text:
            return ""
        following.setdefault(text[0], []).append(text[1:])
    ways = (re.escape(first) + _any_of(endings) for first, endings in following.items())
    return f"(?:{'|'.join(ways)})" if following else "(?!)"


def _cuts(forged: Iterable[Span], origins: str) -> list[int]:
    """
    Places at which all *forged* spans are cut in two, beside a message's character.

    No marker of the template is cut: it has no character of a message. Spans of one
    character are cut out.
    """
    cuts: set[int] = set()
    latest = 0
    for start, stop in forged:
        if stop - start == 1:
            cuts |= {start, stop}
        elif latest <= start:
            at = origins.rindex("m", start, stop)
            latest = at + 1 if at + 1 < stop else at
            cuts.add(latest)
    return sorted(cuts)


def _seams(spans: list[Span], origins: str) -> Iterator[int]:
    """
    Starts of markers that the template wrote, PIECE characters or more apart.

    Not of those that lie in others: which of them the tokenizer takes is its business.
    """
    reached = latest = 0
    for (start, stop), (following, _) in pairwise([*spans, (len(origins), 0)]):
        is_apart = reached <= start and stop <= following
        if is_apart and start - latest >= PIECE and _is_own(origins[start:stop]):
            latest = start
            yield start
        reached = max(reached, stop)


def _is_own(origins: str) -> bool:
    return set(origins) == {"t"}


def _is_tag(text: str) -> bool:
    """Whether *text* has letters or digits and something else, as "[INST]" has."""
    return any(map(str.isalnum, text)) and not text.strip().isalnum()


def _is_marker(text: str, template: str) -> bool:
    return text.strip() in template or _MARKER_FORM.fullmatch(text) is not None
