"""The specification of a chat template."""

from __future__ import annotations

from collections.abc import Callable

from pyllama_raw.replies.spec import ReplySpec, bundled


def spec_for(template: str, render: Callable[..., str]) -> ReplySpec | None:  # noqa: ARG001
    """The bundled specification whose markers *template* has."""
    for spec in bundled().values():
        if spec.markers and all(marker in template for marker in spec.markers):
            return spec
    return None
