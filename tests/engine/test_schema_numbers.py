"""Numbers that random tokens write are those of their schemas; docs name what is refused."""

import json
import re
from pathlib import Path
from random import Random

import pytest

from pyllama_raw.engine.guidance import BYTES, Guidance, MaskTokenizer, _compile
from pyllama_raw.errors import BadSchema
from pyllama_raw.native.model import Model
from pyllama_raw.options.constraints import FORMATS, for_llguidance
from tests.support.number_schemas import invalid, is_valid, outputs
from tests.support.tiny import tiny_model

pytestmark = pytest.mark.native

DOCS = Path(__file__).parents[2] / "docs" / "constraints.md"
TWO = {"properties": {"a": {}, "b": {}}}
REFUSED = {
    "not": {"type": "null"},
    "if": {},
    "then": {},
    "else": {},
    "contains": {},
    "minContains": 1,
    "maxContains": 1,
    "uniqueItems": True,
    "unevaluatedItems": False,
    "unevaluatedProperties": False,
    "propertyNames": {"pattern": "a"},
    "dependentRequired": {"a": ["b"]},
    "dependentSchemas": {"a": {}},
    "dependencies": {"a": ["b"]},
    "$dynamicRef": "#a",
    "$ref": "https://example.org/schema",
    "oneOf": [{"type": "integer"}, {"type": "number"}],
    "minProperties": 1,
    "maxProperties": 1,
    "patternProperties": {"^a": {}, "b$": {}},
    "pattern": "(?=a)b",
}


@pytest.fixture(scope="module")
def model():
    with Model.load(tiny_model("llama-bytes"), vocab_only=True) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def guidance(model):
    return Guidance(model.vocab)


def test_every_finished_number_is_valid(model, guidance):
    """
    Of 60 drawn schemas with bounds, multiples, const and enum; or the schema is refused.
    """
    n_finished, n_refused, wrong = invalid(guidance, model.vocab, 60, 10, seed=3)

    assert wrong == []
    assert n_finished > 350
    assert n_refused < 20


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
        {"type": "number", "exclusiveMinimum": 1, "maximum": 1.5},
        {"type": "number", "minimum": -0.5, "exclusiveMaximum": 0},
        {"type": "number", "allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}]},
        {"type": "integer", "minimum": 2**53, "maximum": 2**64 - 1},
        {"type": "number", "exclusiveMinimum": 2.1, "maximum": 2.1029999999999998},
    ],
)
def test_an_excluded_bound_is_not_written(model, guidance, schema):
    """
    Nor what is beyond a bound.
    """
    texts = list(outputs(guidance, model.vocab, schema, 60, Random(0)))  # noqa: S311 - no secret

    assert [text for text in texts if not is_valid(text, schema)] == []
    assert texts


@pytest.mark.parametrize("multiple", [2, 7, 100, 2.5])
@pytest.mark.parametrize("bounds", [{}, {"minimum": 3}, {"exclusiveMinimum": 0.5}])
def test_a_multiple_comes_to_an_end(multiple, bounds):
    """
    Though a model writes the same digit again and again, which makes no multiple.
    """
    schema = for_llguidance({"type": "number", "multipleOf": multiple, **bounds})
    matcher = _compile(
        MaskTokenizer(BYTES, [256], None), "json_schema", json.dumps(schema)
    )
    text = ""
    while len(text) < 60:
        matcher.compute_mask()
        bits = int.from_bytes(matcher.mask.tobytes(), "little")
        tokens = [token for token in range(257) if bits >> token & 1]
        token = next(t for t in (ord("1"), 256, *tokens) if t in tokens)
        if token == 256:
            break
        matcher.accept(token)
        text += chr(token)

    assert len(text) <= 18
    assert float(text) % multiple == 0


def test_docs_name_what_is_refused(guidance):
    """
    The table has all keywords that are refused here, and no other.
    """
    rows = DOCS.read_text().split("| refused |")[1].split("\n\n")[0].splitlines()[2:]
    named = {word for row in rows for word in re.findall("`(.*?)`", row.split("|")[1])}

    assert named == set(REFUSED)


@pytest.mark.parametrize("name", REFUSED)
def test_what_docs_call_refused_is_refused(guidance, name):
    """
    By the real engine.
    """
    beside = TWO if name.endswith("Properties") and name.startswith("m") else {}
    if name.startswith("unevaluated"):  # alone it is what is additional
        beside = {"anyOf": [{"properties": {"a": {}}}, {"prefixItems": [{}]}]}
    with pytest.raises(BadSchema):
        guidance.make("json_schema", {name: REFUSED[name], **beside})


def test_docs_name_the_formats(guidance):
    """
    Of the table: each one limits how a text begins.
    """

    def first(**more: str) -> object:
        state = guidance.make("json_schema", {"type": "string", **more})()
        state.accept(ord('"'))
        state.prepare()
        return state.mask

    (row,) = (line for line in DOCS.read_text().splitlines() if "`format`" in line)
    named = set(re.findall("`(.*?)`", row.split("|")[2]))

    assert named == FORMATS - {"unknown"}
    assert [name for name in named if first(format=name) == first()] == []
