"""Sizes of a context that libllama makes others of than were asked for."""

from __future__ import annotations

from logging import getLogger

from pyllama_raw.native.context import Context
from pyllama_raw.options.config import ContextConfig

_REASONS = {
    "n_ctx": "libllama rounds cells up to multiples of 256, or of 256 a slot",
    "n_batch": "a step has at most n_ctx tokens",
    "n_ubatch": "a graph has at most the tokens of a step",
    "n_outputs_max": "a step has at least a row for each sequence, at most n_batch",
}

_log = getLogger(__name__)


def tell_changes(asked: ContextConfig, context: Context) -> None:
    """A warning for each size that somebody chose and that is another one."""
    for name, reason in _REASONS.items():
        wanted, found = getattr(asked, name), getattr(context, name)
        if name in asked.model_fields_set and wanted not in (None, found):
            _log.warning("%s=%d is made %d: %s", name, wanted, found, reason)
