"""Tools: the model calls functions of ours until it has an answer."""

from typing import Annotated, Any

import anyio
from pydantic import Field

from pyllama_raw import AsyncEngine, Message, Result, SamplingParams
from pyllama_raw.tools import ToolCall, arguments_of, schema_of

QUESTION = "Is it warmer in Oslo or in Rome?"
MAX_ROUNDS = 3
PARAMS = SamplingParams(max_tokens=256, temperature=0)

# Most models that call tools have a template that prints them. The default model has none.
TEMPLATE = """
{%- if tools %}<|im_start|>system
Functions: {% for tool in tools %}{{ tool | tojson }}
{% endfor %}To call one, write <tool_call>
{"name": its name, "arguments": an object}
</tool_call><|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>
{{ call.function | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}<|im_start|>assistant{{ "\\n" }}"""


def temperature(city: Annotated[str, Field(description="In English.")]) -> str:
    """Tell how warm it is in a city."""
    degrees = {"Oslo": 4, "Rome": 18}
    return f"{degrees[city]} °C"


FUNCTIONS = {"temperature": temperature}
TOOLS = [schema_of(function) for function in FUNCTIONS.values()]


def said(result: Result) -> dict[str, Any]:
    """The reply as a message of the history."""
    calls = [
        {
            "id": call.id,
            "type": "function",
            "function": {"name": call.name, "arguments": call.arguments},
        }
        for call in result.tool_calls
    ]
    return {"role": "assistant", "content": result.text, "tool_calls": calls}


def done(call: ToolCall) -> dict[str, Any]:
    """What a function returns, or a mistake that the model may put right."""
    try:
        content = FUNCTIONS[call.name](**arguments_of(call))
    except (KeyError, TypeError, ValueError) as error:
        content = f"{type(error).__name__}: {error}"
    print(f"{call.name}({call.arguments}) -> {content}")
    return {"role": "tool", "tool_call_id": call.id, "content": content}


async def answer(engine: AsyncEngine, messages: list[Message]) -> str:
    """What the model says when it calls no more functions, or has called enough."""
    for _ in range(MAX_ROUNDS):
        result = await engine.complete(
            messages, PARAMS, tools=TOOLS, chat_template=TEMPLATE
        )
        messages.append(said(result))
        messages += map(done, result.tool_calls)
        if not result.tool_calls:
            return result.text
    return "(It calls on and on.)"


async def main() -> None:
    async with AsyncEngine.open() as engine:
        text = await answer(engine, [{"role": "user", "content": QUESTION}])
    print(f"> {QUESTION}\n{text}")


anyio.run(main)
