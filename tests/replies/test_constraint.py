"""Replies that a constraint allows: the calls in them are those that were asked for."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from pyllama_raw.engine.guidance import checked_schema
from pyllama_raw.errors import BadSchema, Unsupported
from pyllama_raw.replies.constraint import AnswerForm
from pyllama_raw.replies.spec import ReplySpec, bundled
from tests.replies.masked import Drawn, Masked
from tests.replies.written import is_special, written
from tests.support.products import in_turn

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")
pytestmark = pytest.mark.chance

FAMILIES = [name for name, spec in bundled().items() if spec.calls]
SEEDS = range(int(os.environ.get("PYLLAMA_RAW_TEST_CASES", "1")))


def tool(name: str, *required: str, **properties: Any) -> dict[str, Any]:
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }
    return {"name": name, "parameters": parameters}


def strict(tool: dict[str, Any]) -> dict[str, Any]:
    return {**tool, "strict": True}


TOOLS = [
    tool(
        "get_weather",
        *("city", "days"),
        city={"type": "string", "maxLength": 6},
        unit={"enum": ["c", "f"]},
        days={"type": "integer", "minimum": 1, "maximum": 9},
        note={"anyOf": [{"type": "string"}, {"type": "null"}]},
    ),
    tool(
        "get",
        "flag",
        flag={"type": "boolean"},
        tags={
            "type": "array",
            "items": {"type": "string", "maxLength": 3},
            "maxItems": 2,
        },
        more={
            "type": "object",
            "properties": {"x": {"type": "number"}, "s": {"const": "k"}},
            "required": ["s"],
            "additionalProperties": False,
        },
    ),
]


def check(drawn: Drawn, tools: list[dict[str, Any]] = TOOLS) -> None:
    """All calls of a reply that ended are of a tool and fit its schema."""
    schemas = {tool["name"]: tool["parameters"] for tool in tools}
    for name, arguments in drawn.calls if drawn.has_ended else ():
        jsonschema.validate(json.loads(arguments), schemas[name])


@pytest.mark.parametrize("family", FAMILIES)
def test_a_reply_has_the_calls_it_must_have(family):
    """
    Calls of the tools with arguments by their schemas, and nothing else.
    """
    masked = Masked(bundled()[family], TOOLS, must=True, parallel=True)

    for drawn in map(masked.draw, SEEDS):
        assert drawn.calls or not drawn.has_ended
        assert not drawn.content.strip() or not drawn.has_ended
        check(drawn)


@pytest.mark.parametrize("family", FAMILIES)
def test_not_parallel_means_one_call(family):
    """
    Exactly one if there has to be one, and at most one in free text.
    """
    spec = bundled()[family]
    must = Masked(spec, TOOLS, must=True, parallel=False)
    free = Masked(spec, TOOLS, must=False, parallel=False)

    for seed in SEEDS:
        drawn = must.draw(seed)
        assert len(drawn.calls) == 1 or not drawn.has_ended
        drawn = free.draw(seed)
        assert len(drawn.calls) <= 1
        check(drawn)


@pytest.mark.parametrize("family", FAMILIES)
def test_what_begins_a_call_in_free_text_is_one(family):
    """
    However it is spelled, and with text before it where the family reads that.
    """
    spec = bundled()[family]
    masked = Masked(spec, TOOLS, must=False, parallel=True)
    assert spec.calls

    for opening in [] if spec.messages else [*spec.calls.open, *spec.calls.start]:
        before = "" if spec.calls.bare else "Well, "
        drawn = masked.draw(1, before + opening)
        assert drawn.calls or not drawn.has_ended, drawn
        check(drawn)


@pytest.mark.parametrize("family", FAMILIES)
def test_text_without_calls_is_free(family):
    """
    Text of all kinds may stand in a reply that need not call.
    """
    spec = bundled()[family]
    masked = Masked(spec, TOOLS, must=False, parallel=True)
    text = 'A <b> and a [list], {"name": 1},\n\n```json\n{}\n``` ünd \\ "more" 😀.'
    header = "" if spec.messages is None else _header(spec)

    drawn = masked.draw(3, header + text)

    assert text in drawn.text


def _header(spec: ReplySpec) -> str:
    assert spec.messages
    written = [rule.written for rule in spec.messages.rules if rule.kind == "content"]
    return written[0] + spec.messages.middle[0]


TEXTS = {
    "date": {"format": "date"},
    "date-time": {"format": "date-time"},
    "uuid": {"format": "uuid"},
    "email": {"format": "email"},
    "ipv4": {"format": "ipv4"},
    "uri": {"format": "uri", "default": "https://a.b/c"},
    "pattern": {"pattern": "^[a-c/]{2,3}x$"},
    "short": {"minLength": 2, "maxLength": 3},
    "enum": {"enum": ["one", "</b", '"']},
}


@pytest.mark.parametrize(
    "family", ["qwen3_coder", "gemma4", "kimi_k3", "deepseek_v3_2"]
)
def test_texts_that_are_no_json_are_as_their_schemas_say(family):
    """
    Formats, patterns and lengths hold between tags and between quotes of a model, too.
    """
    texts = {key: {"type": "string", **schema} for key, schema in TEXTS.items()}
    tools = [tool("f", *texts, **texts)]
    masked = Masked(bundled()[family], tools, must=True, parallel=False)
    formats = jsonschema.FormatChecker(["date", "email", "ipv4", "uuid"])

    drawn = masked.draw(2, limit=2000)

    assert drawn.has_ended
    [(_, arguments)] = drawn.calls
    jsonschema.validate(
        json.loads(arguments), tools[0]["parameters"], format_checker=formats
    )


THINKING = bundled()["hermes"]


@pytest.mark.parametrize(
    ("prefix", "begin"),
    [
        ("<think>\n", "Hm, <tool_call> is one.</think>\n\n<tool_call>\n"),
        ("", "<think>Hm.</think>\n\n<tool_call>\n"),
        ("", "<think></think><tool_call>\n"),
        ("<think>\n\n</think>\n\n", "<tool_call>\n"),
    ],
)
def test_reasoning_comes_before_the_calls(prefix, begin):
    """
    It goes on where the prompt has begun it, and may begin where the prompt says nothing.
    """
    for must in (True, False):
        masked = Masked(THINKING, TOOLS, prefix, must=must, parallel=False)

        drawn = masked.draw(5, begin)

        assert len(drawn.calls) == 1
        assert drawn.content.strip() == "" or not must
        check(drawn)


HOSTILE = [
    '"}',
    "</tool_call>\n",
    "<tool_call>",
    'a"\nstart: "x"',
    "\\",
    "%json {}",
    "ü😀",
    "/x/",
]


@pytest.mark.parametrize("text", HOSTILE)
@pytest.mark.parametrize(
    "family", ["hermes", "gemma4", "qwen3_coder", "lfm2", "harmony"]
)
def test_no_name_and_no_schema_breaks_out(family, text):
    """
    A call is what was asked for, or the request is refused and names the tool.
    """
    hostile = strict(tool(f"f{text}", text, **{text: {"enum": [text, "b"]}}))
    try:
        masked = Masked(bundled()[family], [hostile], must=True, parallel=False)
    except BadSchema:
        assert family != "hermes"  # JSON has a place for any text
        return

    drawn = masked.draw(1, limit=1000)

    assert drawn.has_ended
    assert [name for name, _ in drawn.calls] == [hostile["name"]]
    check(drawn, [hostile])


def test_what_cannot_be_kept_is_refused():
    """
    A keyword that no constraint knows, or that the syntax of the model has no place for.
    """
    items = {"type": "array", "uniqueItems": True, "contains": {"const": 1}}
    unknown = strict(tool("f", x=items))
    between_tags = strict(tool("f", x={"type": "string", "format": "duration"}))

    for family, given in (("hermes", unknown), ("qwen3_coder", between_tags)):
        with pytest.raises(BadSchema, match="'f'"):
            Masked(bundled()[family], [given], must=True, parallel=True)
    with pytest.raises(Unsupported, match="ReplySpec"):
        Masked(ReplySpec(), TOOLS, must=True, parallel=True)


SCHEMA = tool("", "a", "b", a={"type": "boolean"}, b={"type": "string", "maxLength": 5})
SCHEMA = SCHEMA["parameters"]
JSON = AnswerForm(f"%json {checked_schema(SCHEMA)}", is_json=True)


def opened(spec: ReplySpec) -> str:
    """The end of a prompt that begins to think."""
    return "" if spec.reasoning is None else spec.reasoning.start[0]


@pytest.mark.parametrize(("family", "tools"), in_turn(tuple(bundled()), ([], TOOLS)))
def test_a_reply_is_a_form_of_the_answer_or_has_calls(family, tools):
    """
    In every family, where the prompt begins to think and where it does not.
    """
    spec = bundled()[family]
    tools = tools if spec.calls else []
    for prefix in {"", opened(spec)}:
        masked = Masked(spec, tools, prefix, JSON, must=False, parallel=True)

        for drawn in map(masked.draw, SEEDS):
            if drawn.has_ended and drawn.calls:
                assert tools
                assert not drawn.content.strip()
                check(drawn)
            elif drawn.has_ended:
                jsonschema.validate(json.loads(drawn.content), SCHEMA)
            else:
                assert drawn.reasoning or drawn.content or drawn.calls


@pytest.mark.parametrize("family", bundled())
def test_the_answer_comes_after_thoughts(family):
    """
    What looks like it in the thoughts is thought; what looks like delimiters in it is content.
    """
    spec = bundled()[family].bound(is_special)
    said = '{"a": true, "b": "<a>"}'
    schema = {**SCHEMA, "properties": {**SCHEMA["properties"], "b": {"const": "<a>"}}}
    answer = AnswerForm(f"%json {checked_schema(schema)}", is_json=True)
    masked = Masked(spec, [], opened(spec), answer, must=False, parallel=True)
    thought = "Is it {}? " if spec.reasoning else ""
    whole = written(spec, reasoning=thought.strip(), content=said)
    if spec.messages:
        whole = whole[len(spec.messages.start[0]) :].removesuffix(
            "".join(spec.messages.end[:1])
        )
    elif spec.reasoning:
        whole = whole.removeprefix(spec.reasoning.start[0])

    drawn = masked.draw(1, whole)

    assert (drawn.content, drawn.has_ended) == (said, True)
    assert drawn.reasoning == thought.strip()


SPELLED = (
    "x<seed:think>y</seed:think><seed:tool_call><function=get><parameter=flag>true"
    "</parameter></function></seed:tool_call>"
)


@pytest.mark.parametrize(
    ("rule", "said", "keeps_space"),
    [
        (f'"{SPELLED}"', SPELLED, False),
        (f'%json {{"const": "{SPELLED}"}}', f'"{SPELLED}"', False),
        (r"/\s+(yes|no)\n/", "\n\n yes\n", True),
        (r"/yes|no/", "no", False),
    ],
)
@pytest.mark.parametrize(
    "prefix", ["<seed:think>", "<seed:think></seed:think>\n\n", ""]
)
@pytest.mark.parametrize("tools", [[], TOOLS], ids=["no tools", "tools"])
def test_an_answer_is_told_as_it_is(rule, said, keeps_space, prefix, tools):
    """
    Whatever it spells, with its white space: in thoughts, after them, and without any.
    """
    spec = bundled()["seed_oss"]
    answer = AnswerForm(rule, keeps_space=keeps_space)
    masked = Masked(spec, tools, prefix, answer, must=False, parallel=True)
    begun = "Hm.</seed:think>" if prefix == "<seed:think>" else ""

    drawn = masked.draw(1, begun + said)

    assert (drawn.content, drawn.has_ended) == (said, True)
    assert drawn.reasoning == ("Hm." if begun else "")


@pytest.mark.parametrize("space", ["", "\n", "\n\n"])
@pytest.mark.parametrize("prefix", ["<seed:think>", ""])
def test_a_call_comes_behind_lines_that_an_answer_may_begin_with(space, prefix):
    """
    White space alone does not decide between an answer that keeps its own and a call.
    """
    answer = AnswerForm(r"/\s*(yes|no)\n/", keeps_space=True)
    call = (
        "<seed:tool_call>\n<function=get>\n<parameter=flag>true</parameter>"
        "</function>\n</seed:tool_call>"
    )
    spec = bundled()["seed_oss"]
    masked = Masked(spec, TOOLS, prefix, answer, must=False, parallel=False)
    thought = "Hm.</seed:think>" if prefix else "<seed:think>Hm.</seed:think>"

    drawn = masked.draw(1, thought + space + call)

    assert drawn.calls == [("get", '{"flag": true}')]
    assert (drawn.content, drawn.reasoning) == ("", "Hm.")


def test_a_model_that_must_not_think_does_not():
    """
    Its answer is all, where the prompt has not begun to think by itself.
    """
    spec = bundled()["think"]
    masked = Masked(spec, [], "", JSON, must=False, parallel=True, may_think=False)

    for drawn in map(masked.draw, range(6)):
        assert drawn.text.startswith("{")
        assert not drawn.reasoning
