"""What parsers of replies got wrong elsewhere, one class of defects a test."""

import json

import pytest

from pyllama_raw.replies.parser import CallDelta, Content, Part, Reasoning, ReplyParser
from pyllama_raw.replies.schemas import types_of, variants
from pyllama_raw.replies.spec import ReplySpec, bundled
from tests.replies.written import TOOLS, is_special, parsed

HERMES = bundled()["hermes"]
CALL = '<tool_call>\n{"name": "wait", "arguments": {"a": 1}}\n</tool_call>'
WAIT = CallDelta(0, "made 0", "wait", '{"a": 1}')


def again(call: CallDelta, index: int) -> CallDelta:
    return CallDelta(index, f"made {index}", call.name, call.arguments)


def whole(spec: ReplySpec, text: str, **options: object) -> list[Part]:
    """The parts of a reply, which are the same by single letters."""
    parts = parsed(spec, [text], **options)
    assert parsed(spec, list(text), **options) == parts
    return parts


def test_a_delimiter_may_come_in_pieces_and_several_at_once():
    """
    A delimiter over several texts, and several delimiters in one text, are all found.
    """
    text = f"<think>hm</think>{CALL}{CALL}"

    parts = whole(HERMES, text)

    assert parts == [Reasoning("hm"), WAIT, again(WAIT, 1)]


def test_a_call_that_is_cut_keeps_what_it_has():
    """
    Where a reply ends within a call, its name and arguments so far are a call, not content.
    """
    ends = ['"', '"wait', '"wait"', '"wait", "argu', '"wait", "arguments": {"a": [1']

    found = [whole(HERMES, '<tool_call>\n{"name": ' + end) for end in ends]

    assert found == [
        [Content('<tool_call>\n{"name": "')],
        [Content('<tool_call>\n{"name": "wait')],
        [CallDelta(0, "made 0", "wait", "")],
        [CallDelta(0, "made 0", "wait", "")],
        [CallDelta(0, "made 0", "wait", '{"a": [1')],
    ]


def test_a_cut_call_in_tags_is_not_closed():
    """
    Arguments that the end of the reply cuts off do not look complete.
    """
    spec = bundled()["qwen3_coder"]
    text = "<tool_call>\n<function=look_up>\n<parameter=text>\nsome te"

    parts = whole(spec, text)

    assert parts == [CallDelta(0, "made 0", "look_up", '{"text": "some te')]


def test_delimiters_of_the_end_that_are_cut_are_no_content():
    """
    Where a reply ends within what ends a call, no remnant of it is content.
    """
    closing = "\n</tool_call>"
    call = CALL.removesuffix(closing)

    found = [whole(HERMES, call + closing[:n]) for n in range(len(closing))]

    assert found == [[WAIT]] * len(closing)


def test_reasoning_without_an_end_is_reasoning():
    """
    Reasoning that a stop token ends stays reasoning, to its last letter.
    """
    assert whole(HERMES, "<think>\nI was thi") == [Reasoning("I was thi")]


def test_a_special_token_ends_a_name():
    """
    A name of a tool in a header ends where a special token does.
    """
    spec = bundled()["harmony"].bound(is_special)
    text = [
        " to=functions.wait",
        "<|channel|>",
        "commentary",
        "<|message|>",
        '{"a": 1}',
    ]

    assert parsed(spec, text, prefix="<|start|>assistant") == [WAIT]


def test_pieces_of_arguments_are_json_when_put_together():
    """
    Strings of typed arguments come as they are generated, in pieces of JSON.
    """
    parser = ReplyParser(bundled()["qwen3_coder"], tools=TOOLS, new_id=lambda: "id")
    text = '<function=look_up>\n<parameter=text>\nsay "hi"\n\\n\n</parameter>\n'
    text += "<parameter=count>\n 7\n</parameter>\n</function>"

    parts = [part for char in text for part in parser.feed(char)]

    pieces = [part.arguments for part in parts if isinstance(part, CallDelta)]
    assert len(pieces) > 10
    assert json.loads("".join(pieces)) == {"text": 'say "hi"\n\\n', "count": 7}


def test_control_characters_in_strings_of_json_are_escaped():
    """
    A line break that a model writes into a string of JSON does not make the arguments invalid.
    """
    text = '<tool_call>{"name": "wait", "arguments": {"a": "x\ny\tz"}}</tool_call>'

    [call] = whole(HERMES, text)

    assert isinstance(call, CallDelta)
    assert json.loads(call.arguments) == {"a": "x\ny\tz"}


@pytest.mark.parametrize("arguments", ["null", '""', '" "', '"null"', "{}", '"{}"'])
def test_no_arguments_are_an_object_without_entries(arguments: str):
    """
    Clients read the arguments of a call as an object, whatever a model writes for none.
    """
    text = f'<tool_call>{{"name": "wait", "arguments": {arguments}}}</tool_call>'
    before = f'<tool_call>{{"arguments": {arguments}, "name": "wait"}}</tool_call>'

    parts = [whole(HERMES, text), whole(HERMES, before)]

    assert parts == [[CallDelta(0, "made 0", "wait", "{}")]] * 2


@pytest.mark.parametrize("between", ["", " ", "\n", ",", "; "])
def test_calls_need_no_delimiter_between_them(between: str):
    """
    Calls that follow one another are several calls, whatever separates them.
    """
    one = '{"name": "wait", "arguments": {"a": 1}}'
    tags = f"<tool_call>{one}{between}{one}</tool_call>"
    array = f"<tool_call>[{one}{between}{one}]</tool_call>{CALL}"

    assert whole(HERMES, tags) == [WAIT, again(WAIT, 1)]
    assert whole(HERMES, array) == [WAIT, again(WAIT, 1), again(WAIT, 2)]


def test_what_is_no_call_is_content():
    """
    Text that only seems to be a call is all there, and a call after it is one.
    """
    texts = [
        "<tool_call>none</tool_call>",
        '<tool_call>{"nome": "wait", "arguments": {}}</tool_call>',
        '<tool_call>{"arguments": {}}</tool_call>',
        "the tag <tool_call> begins",
    ]

    found = [whole(HERMES, text + CALL) for text in texts]

    assert found == [[Content(text), WAIT] for text in texts]


def test_an_id_is_never_missing_and_a_name_never_repeated():
    """
    The first piece of a call, and no other, has an id and a name, also where no text has an id.
    """
    parser = ReplyParser(HERMES, tools=TOOLS)

    parts = [part for char in CALL for part in parser.feed(char)]

    named = [
        part for part in parts if isinstance(part, CallDelta) and (part.name or part.id)
    ]
    assert [part.name for part in named] == ["wait"]
    assert named[0] is parts[0]
    assert named[0].id is not None
    assert named[0].id.startswith("call_")


def test_ids_are_as_a_model_takes_them():
    """
    A model that takes only ids of nine letters and digits gets such.
    """
    parser = ReplyParser(bundled()["mistral"])

    call = parser.feed('[TOOL_CALLS]wait[ARGS]{"a": 1}')[0]

    assert isinstance(call, CallDelta)
    assert call.id is not None
    assert len(call.id) == 9
    assert call.id.isalnum()


def test_ids_of_the_text_are_kept():
    """
    An id that the model writes is that of the call, wherever it stands.
    """
    one = '{"name": "wait", "arguments": {"a": 1}, "id": "abcdefghi"}'
    kimi = "<|tool_call_begin|>functions.wait:7<|tool_call_argument_begin|>"

    found = [
        whole(bundled()["mistral_nemo"], f"[TOOL_CALLS][{one}]"),
        whole(bundled()["kimi_k2"], kimi + '{"a": 1}<|tool_call_end|>'),
    ]

    assert found == [
        [CallDelta(0, "abcdefghi", "wait", '{"a": 1}')],
        [CallDelta(0, "functions.wait:7", "wait", '{"a": 1}')],
    ]


def test_text_that_spells_a_token_makes_no_call():
    """
    A delimiter that is a token of the vocabulary is that token, and not text that spells it.
    """
    spec = HERMES.bound(is_special)

    assert parsed(spec, list(CALL)) == [Content(CALL)]
    tokens = [
        "<tool_call>",
        *CALL.removeprefix("<tool_call>").removesuffix("</tool_call>"),
    ]
    assert parsed(spec, [*tokens, "</tool_call>"]) == [WAIT]


def test_a_bare_object_is_a_call_of_a_known_tool_only():
    """
    Where calls have no delimiter, JSON of any other kind is content.
    """
    spec = bundled()["llama3"]
    call = '{"name": "wait", "parameters": {"a": 1}}'
    other = call.replace("wait", "go")

    assert whole(spec, call) == [WAIT]
    assert whole(spec, f"{call}; {call}") == [WAIT, again(WAIT, 1)]
    assert whole(spec, other) == [Content(other)]
    assert whole(spec, '{"amount": 1}') == [Content('{"amount": 1}')]
    assert whole(spec, f"Hi {call}") == [Content(f"Hi {call}")]


def test_calls_are_content_where_nobody_asked_for_them():
    """
    A parser without calls leaves them in the content, and takes reasoning out.
    """
    text = f"<think>hm</think>{CALL}"

    assert whole(HERMES, text, calls=False) == [Reasoning("hm"), Content(CALL)]


def test_reasoning_is_no_place_for_calls_unless_the_family_makes_them_there():
    """
    A call within reasoning is reasoning; in families that leave out its end, the call ends it.
    """
    inside = "<think>maybe <function=wait>\n</function> no"
    ends = whole(bundled()["qwen3_coder"], inside)
    stays = whole(HERMES, f"<think>maybe {CALL}</think>no")

    assert ends == [
        Reasoning("maybe"),
        CallDelta(0, "made 0", "wait", "{}"),
        Content(" no"),
    ]
    assert stays == [Reasoning(f"maybe {CALL}"), Content("no")]


def test_a_tag_of_reasoning_in_prose_is_prose():
    """
    Reasoning begins where an answer begins: a tag after text is text.
    """
    assert whole(HERMES, "the tag <think> is") == [Content("the tag <think> is")]


def test_a_schema_that_refers_to_itself_in_many_ways_has_an_end():
    """
    Each part of a schema is looked at once, not by each of 40**4 ways to it.
    """
    refers = {"$ref": "#/$defs/n"}
    root = {"$defs": {"n": {"anyOf": [refers] * 40 + [{"type": "integer"}]}}, **refers}

    assert types_of(root, root) == {"integer"}
    assert len(variants(root, root)) == 4


@pytest.mark.parametrize("wrong", [{"type": 5}, {"type": [None, {}]}, {"enum": 5}])
def test_a_schema_that_says_nothing_has_no_types(wrong):
    """
    A tool that is not strict may have any schema; its call is read.
    """
    schema = {"type": "object", "properties": {"a": wrong}}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    text = "<tool_call>\n<function=f>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
    parser = ReplyParser(bundled()["qwen3_coder"], tools=[tool], new_id=lambda: "1")

    parts = [*parser.feed(text), *parser.finish()]

    assert "".join(part.arguments for part in parts) == '{"a": 1}'


@pytest.mark.parametrize(
    ("reference", "types"),
    [
        ("#/$defs/a~1b%5B%5D", {"integer"}),
        ("#/$defs/Map<a>", {"string"}),
        ("#/$defs/Map%3Ca%3E", {"string"}),
        ("#/anyOf/1", {"null"}),
        ("#/anyOf/2", set()),
        ("#/anyOf/x/y", set()),
    ],
)
def test_a_reference_is_read_as_an_address_and_a_pointer(reference: str, types: set):
    """
    Names in it have escapes or not, and a list has places.
    """
    names = {"a/b[]": {"type": "integer"}, "Map<a>": {"type": "string"}}
    root = {"$defs": names, "anyOf": [{}, {"type": "null"}]}

    assert types_of({"$ref": reference}, root) == types
