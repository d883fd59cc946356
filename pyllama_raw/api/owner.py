"""A base of what owns threads or memory of C, which exist once."""

from __future__ import annotations

import warnings
from typing import NoReturn, SupportsIndex

from pyllama_raw.errors import WrongUse


class Owner:
    """Refuses to be copied and pickled: the end of one copy would be the end of all."""

    def __reduce_ex__(self, _: SupportsIndex) -> NoReturn:
        raise WrongUse(
            f"{type(self).__name__} cannot be copied or pickled, because it owns threads or "
            "memory that exist once: pass the object itself, and open another one in "
            "another process"
        )

    def _warn_dropped(self, consequence: str) -> None:
        """Warn that nobody has it any more, and *consequence* what that means."""
        warnings.warn(
            f"{self!r} was dropped {consequence}", ResourceWarning, 2, source=self
        )
