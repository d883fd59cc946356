"""A model that writes calls in a form of its own: a ReplySpec says how, and a stream has the parts."""

import anyio

from pyllama_raw import AsyncEngine, SamplingParams
from pyllama_raw.tools import CallDelta, Content, Reasoning, ReplySpec, schema_of

# As in: <think>Oslo, then.</think>Let me see. [call] temperature {"city": "Oslo"} [/call]
SPEC = ReplySpec.model_validate(
    {
        "reasoning": {"start": ["<think>"], "end": ["</think>"]},
        "calls": {
            "layout": {"kind": "json", "header_end": [" "]},
            "start": ["[call] "],
            "end": [" [/call]", "[/call]"],
        },
    }
)
TEMPLATE = """
{%- for tool in tools or [] %}<|im_start|>system
{{ tool | tojson }} To call it, write: [call] its name and an object [/call]<|im_end|>
{% endfor %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endfor %}<|im_start|>assistant{{ "\\n" }}"""


def temperature(city: str) -> str:
    """Tell how warm it is in a city."""
    return "4 °C" if city == "Oslo" else "18 °C"


async def show_reply(engine: AsyncEngine) -> None:
    async with engine.generate(
        [{"role": "user", "content": "Is it warm in Oslo?"}],
        SamplingParams(max_tokens=64, temperature=0),
        tools=[schema_of(temperature)],
        chat_template=TEMPLATE,
        reply=SPEC,
    ) as generation:
        async for delta in generation:
            for part in delta.parts:
                show(part)
    print(f"\ncalls: {[call.name for call in generation.result.tool_calls]}")


def show(part: Content | Reasoning | CallDelta) -> None:
    """Print what has come: of a call first its name, then its arguments, piece by piece."""
    match part:
        case Reasoning(text):
            print(f"({text})", end="")
        case Content(text):
            print(text, end="")
        case CallDelta(name=name, arguments=arguments):
            print(f"\n{name} " if name else "", arguments, sep="", end="")


async def main() -> None:
    async with AsyncEngine.open() as engine:
        await show_reply(engine)


anyio.run(main)
