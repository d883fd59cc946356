r"""
The classes `\d`, `\w` and `\s` of a regular expression, made classes of ASCII characters.

In llguidance they are classes of Unicode, and an output that is sampled has some of its rare
characters: ten thousand kinds of digits fit where a program expects 0 to 9. JSON schemas,
too, mean ASCII.
"""

from __future__ import annotations

import re

_CLASSES = {
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
    r"\s": r"[\t\n\x0b\f\r ]",
    r"\S": r"[^\t\n\x0b\f\r ]",
}
# A bracket that closes is a character where a set begins; so are dashes.
_PART = re.compile(r"\\.|\[\^?\]?-*|\]|-+|.", re.DOTALL)


def with_ascii_classes(pattern: str) -> str:
    r"""
    *pattern* for llguidance; `\p{Nd}` and its like stay classes of Unicode.

    The end of a range, as in `[a-\d]`, stays as it is, because that is a mistake which
    llguidance names.
    """
    found, depth = [], 0
    before, last = "", ""
    for part in _PART.findall(pattern):
        if part[0] == "[":
            depth += 1
        elif part == "]":
            depth = max(depth - 1, 0)
        # Behind another class, a dash is a character.
        ends_range = depth and last == "-" and before not in (*_CLASSES, "]")
        found.append(part if ends_range else _CLASSES.get(part, part))
        before, last = last, part
    return "".join(found)
