"""What a family writes is what its specification reads."""

import codecs
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pyllama_raw.replies.parser import CallDelta, Content, Reasoning
from pyllama_raw.replies.spec import ReplySpec, bundled
from tests.replies.written import is_special, parsed, split, written

CALLS = [
    ("look_up", {"text": "über λ", "count": -14, "flag": True}),
    ("look_up", {"tags": ["a", "b"], "more": {"deep": 1.5}}),
    ("wait", {}),
]
FAMILIES = sorted(bundled())
each_family = pytest.mark.parametrize("family", FAMILIES)
each_binding = pytest.mark.parametrize("bound", [False, True], ids=["text", "tokens"])


def spec_of(family: str, bound: bool) -> ReplySpec:
    spec = bundled()[family]
    return spec.bound(is_special) if bound else spec


@each_family
@each_binding
def test_a_reply_is_read_as_it_was_written(family: str, bound: bool):
    """
    Reasoning, content and calls come out as they went in, with ids and with typed arguments.
    """
    spec = spec_of(family, bound)
    thinks = spec.reasoning or family in ("harmony", "llm_jp", "muse")
    text = written(spec, reasoning="I think θ", content="Hello δ", calls=CALLS)
    if spec.calls and spec.calls.bare and not spec.messages:
        text = written(spec, calls=CALLS)

    parts = parsed(spec, split(spec, text, []))

    calls = [part for part in parts if isinstance(part, CallDelta)]
    made = CALLS if spec.calls else []
    said = "" if text == written(spec, calls=CALLS) else "Hello δ"
    assert [(call.name, json.loads(call.arguments)) for call in calls] == made
    assert [part for part in parts if isinstance(part, Reasoning)] == (
        [Reasoning("I think θ")] if thinks and said else []
    )
    content = "".join(part.text for part in parts if isinstance(part, Content))
    assert content.strip() == said


@each_family
@each_binding
@settings(max_examples=5)
@given(data=st.data())
def test_any_pieces_give_the_same_parts(family: str, bound: bool, data: st.DataObject):
    """
    However a reply is cut into texts, its parts say the same when they are put together.
    """
    spec = spec_of(family, bound)
    text = written(spec, reasoning="I think\n", content="\nHello 🦙\n", calls=CALLS)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=200))

    assert parsed(spec, split(spec, text, cuts)) == parsed(spec, split(spec, text, []))


@each_family
def test_single_bytes_give_the_same_parts(family: str):
    """
    Text that comes by bytes, some of them inside a character, is read as the whole is.
    """
    spec = bundled()[family]
    text = written(spec, reasoning="I think 🦙", content="Grüße", calls=CALLS)
    decoder = codecs.getincrementaldecoder("utf-8")()
    pieces = [decoder.decode(bytes([byte])) for byte in text.encode()]

    assert parsed(spec, pieces) == parsed(spec, [text])
