"""
Records of what the executor keeps of requests, from open() to close().

Few requests need more of a step than their token. Counts say whether any is open, so that
a step without one looks at nobody.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pyllama_raw.core.step import Work
from pyllama_raw.engine.guidance import MaskState
from pyllama_raw.native.sampler import RowLogprobs, RowSampler
from pyllama_raw.options.sampling import SamplingParams

if TYPE_CHECKING:
    from pyllama_raw.engine.media_desk import MediaRows


@dataclass(frozen=True, slots=True)
class BuiltSampler:
    """A request whose sampler is built."""

    params: SamplingParams
    sampler: RowSampler
    mask: MaskState | None  # of a constraint that Python advances after each token
    logprobs: RowLogprobs | None  # of its last token; None: not asked for, or certain
    needs_all: str  # why no lane can serve it; empty: one can
    spans: tuple[MediaRows, ...] = ()


class BuiltSamplers:
    """All that are open, by request_id."""

    def __init__(self) -> None:
        self._all: dict[int, BuiltSampler] = {}
        self.n_masked = self.n_scored = self.n_needing_all = 0

    def __getitem__(self, request_id: int) -> BuiltSampler:
        return self._all[request_id]

    @property
    def request_ids(self) -> list[int]:
        return list(self._all)

    def add(self, request_id: int, opened: BuiltSampler) -> None:
        self._all[request_id] = opened
        self._count(opened, 1)

    def pop(self, request_id: int) -> BuiltSampler | None:
        """Take one out; None: it is not open."""
        opened = self._all.pop(request_id, None)
        if opened is not None:
            self._count(opened, -1)
        return opened

    def need_all(self, works: Iterable[Work]) -> bool:
        """Whether a request of *works* needs whole rows."""
        return self.n_needing_all > 0 and any(
            self._all[work.request_id].needs_all for work in works
        )

    def _count(self, opened: BuiltSampler, change: int) -> None:
        params = opened.params
        is_scored = params.logprobs is not None or params.prompt_logprobs is not None
        self.n_masked += change * (opened.mask is not None)
        self.n_scored += change * is_scored
        self.n_needing_all += change * bool(opened.needs_all)
