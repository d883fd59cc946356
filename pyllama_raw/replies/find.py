"""The specification of a model, by its chat template."""

from __future__ import annotations

from pyllama_raw.replies.derive import RenderedReplies
from pyllama_raw.replies.samples import Render
from pyllama_raw.replies.spec import ReplySpec, bundled

MAX_KNOWN = 64  # templates
_known: dict[str, ReplySpec | None] = {}


def spec_for(template: str, render: Render) -> ReplySpec | None:
    """
    Specification for replies of the model of *template*; any thread may call.

    It is a bundled one that reads what the template prints. If there is none, it is derived,
    and if that fails, a bundled one by its markers alone. A template is asked once.

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
    rendered = RenderedReplies(render)
    fitting = by_markers(template)
    if fitting and rendered.are_read_by(fitting):
        return fitting
    return rendered.derived() or fitting
