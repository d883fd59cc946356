"""The specification of a model, by its chat template."""

from __future__ import annotations

from pyllama_raw.replies.derive import derive
from pyllama_raw.replies.samples import Render
from pyllama_raw.replies.spec import ReplySpec, bundled

MAX_KNOWN = 64  # templates
_known: dict[str, ReplySpec | None] = {}


def spec_for(template: str, render: Render) -> ReplySpec | None:
    """
    How the replies of the model of *template* are taken apart; any thread may call.

    It is bundled, or derived by rendering, which is done once for a template. A bundled one
    that knows no calls is for templates of which no other is derived.

    Args:
        render: see `pyllama_raw.replies.derive.derive`.

    Returns:
        None if a reply is only content.
    """
    if template not in _known:
        if len(_known) >= MAX_KNOWN:
            _known.clear()
        _known[template] = _found(template, render)
    return _known[template]


def by_markers(template: str) -> ReplySpec | None:
    """
    The bundled specification whose markers *template* has.

    Of several the one with the longest markers, because these say most.
    """
    fitting = [
        spec
        for spec in bundled().values()
        if spec.markers and all(marker in template for marker in spec.markers)
    ]
    return max(fitting, key=lambda spec: sum(map(len, spec.markers)), default=None)


def _found(template: str, render: Render) -> ReplySpec | None:
    bundled_one = by_markers(template)
    if bundled_one and (bundled_one.calls or bundled_one.messages):
        return bundled_one
    return derive(render) or bundled_one
