"""Who may share cached prefixes: only requests whose namespaces are equal."""

from __future__ import annotations


class Private:
    """The namespace of a single request. No caller can name it, so no caller shares it."""

    __slots__ = ()  # equal to itself only


Namespace = str | Private | None  # a salt; of one request; of all without a salt
