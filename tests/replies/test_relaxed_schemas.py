"""Schemas of tools that are not strict, of which a part takes too long to compile."""

import json

from pyllama_raw.errors import BadSchema
from pyllama_raw.replies.schemas import MAX_COSTLY, relaxed, tools_of


class Compiler:
    """Whatever has a keyword `multipleOf` reaches the limit of time."""

    def __init__(self) -> None:
        self.n_costly = 0

    def to_json(self, schema):
        text = json.dumps(schema)
        if "multipleOf" in text:
            self.n_costly += 1
            raise BadSchema("json_schema", "it takes too long", is_costly=True)
        return text


def slow(n_slow):
    names = [f"p{i}" for i in range(n_slow)]
    return {"type": "object", "properties": {n: {"multipleOf": 7} for n in names}}


def test_one_costly_keyword_is_left_out_alone():
    """
    What stands beside it is kept.
    """
    schema = slow(1)
    schema["properties"]["name"] = {"type": "string"}

    found = relaxed(schema, Compiler().to_json)

    assert found.dropped == ("properties.p0.multipleOf",)
    assert found.schema["properties"]["name"] == {"type": "string"}


def test_all_tools_of_a_request_together_have_the_time_of_one():
    """
    The others of so many tools have any arguments, and are told as such.
    """
    compiler = Compiler()
    tools = [
        {"function": {"name": f"f{i}", "parameters": slow(i + 20)}} for i in range(30)
    ]

    found = tools_of(tools, compiler.to_json)

    assert compiler.n_costly == MAX_COSTLY
    assert [tool.schema for tool in found] == [{"type": "object"}] * 30
    assert all("all" in tool.dropped for tool in found)
