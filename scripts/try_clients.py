"""
Tries clients of other projects at a server: each does a chat, a stream and an embedding.

    pyllama-raw serve MODEL --alias chat &
    python scripts/try_clients.py http://127.0.0.1:8000 chat [--embedder NAME] [--tools]

It needs no package of ours, so an environment of its own may have the clients:

    pip install langchain-openai litellm llama-index-llms-openai-like \
        llama-index-embeddings-openai-like 'pydantic-ai-slim[openai]'
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from importlib.metadata import version
from typing import Any

ASKED = "Name three colours."
WEATHER = "What is the weather in Rome? Ask the tool, then tell me."
N_TOKENS = 24
N_CALL = 400  # tokens of an answer that may have calls
Tried = Iterator[tuple[str, str]]


def langchain(options: Namespace) -> Tried:
    """ChatOpenAI and OpenAIEmbeddings."""
    from langchain_openai import ChatOpenAI, OpenAIEmbeddings

    place = {"base_url": f"{options.url}/v1", "api_key": "none"}
    chat = ChatOpenAI(
        model=options.model, seed=1, temperature=0, max_tokens=N_TOKENS, **place
    )
    answer = chat.invoke(ASKED)
    yield "chat", str(answer.content)
    yield "counts", str(answer.usage_metadata)
    yield "stream", "".join(str(chunk.content) for chunk in chat.stream(ASKED))
    if options.tools:
        yield from _langchain_loop(chat)
    embeddings = OpenAIEmbeddings(
        model=options.embedder, check_embedding_ctx_length=False, **place
    )
    yield "embedding", _size(embeddings.embed_query(ASKED))


def _langchain_loop(chat: Any) -> Tried:
    """bind_tools: the call that is demanded, the same in a stream, and what follows it."""
    from langchain_core.messages import HumanMessage, ToolMessage

    longer = chat.model_copy(update={"max_tokens": N_CALL})
    calling = longer.bind_tools([weather], tool_choice="weather")
    messages: list[Any] = [HumanMessage(WEATHER)]
    first = calling.invoke(messages)
    yield "call", str([(call["name"], call["args"]) for call in first.tool_calls])
    chunks = list(calling.stream(messages))
    joined = sum(chunks[1:], chunks[0])
    yield "call of a stream", str([(c["name"], c["args"]) for c in joined.tool_calls])
    messages.append(first)
    for call in first.tool_calls:
        weather_text = weather(**call["args"])
        messages.append(ToolMessage(weather_text, tool_call_id=call["id"]))
    last = chat.bind_tools([weather]).invoke(messages)
    yield "after the call", str(last.content or last.tool_calls)


def pydantic_ai(flags: Namespace) -> Tried:
    """An agent with a tool, in both ways; it may call it or not."""
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    place = OpenAIProvider(base_url=f"{flags.url}/v1", api_key="none")
    model = OpenAIChatModel(flags.model, provider=place)
    options: Any = {"temperature": 0, "seed": 1, "max_tokens": N_CALL}
    agent = Agent(model, tools=[weather] if flags.tools else [], model_settings=options)
    result = agent.run_sync(WEATHER)
    yield "chat", result.output
    yield "messages", str([_kinds(message) for message in result.all_messages()])
    yield "counts", str(result.usage)
    streamed = agent.run_stream_sync(WEATHER)
    yield "stream", list(streamed.stream_text())[-1]


def weather(city: str) -> str:
    """Tells the weather of a city."""
    return f"It is dry in {city}."


def _kinds(message: Any) -> list[str]:
    return [part.part_kind for part in message.parts]


def llama_index(flags: Namespace) -> Tried:
    """OpenAILike and OpenAILikeEmbedding, chats and completions."""
    from llama_index.core.llms import ChatMessage
    from llama_index.embeddings.openai_like import OpenAILikeEmbedding
    from llama_index.llms.openai_like import OpenAILike

    place = {"api_base": f"{flags.url}/v1", "api_key": "none"}
    options = {"temperature": 0, "max_tokens": N_TOKENS, **place}
    messages = [ChatMessage(role="user", content=ASKED)]
    chat = OpenAILike(model=flags.model, is_chat_model=True, **options)
    yield "chat", str(chat.chat(messages).message.content)
    yield "stream", "".join(part.delta or "" for part in chat.stream_chat(messages))
    text = OpenAILike(model=flags.model, is_chat_model=False, **options)
    yield "completion", text.complete(ASKED).text
    parts = [part.delta or "" for part in text.stream_complete(ASKED)]
    yield "stream of a completion", "".join(parts)
    embeddings = OpenAILikeEmbedding(model_name=flags.embedder, **place)
    yield "embedding", _size(embeddings.get_text_embedding(ASKED))


def litellm(flags: Namespace) -> Tried:
    """Functions of litellm."""
    from litellm import completion, embedding

    place = {"api_base": f"{flags.url}/v1", "api_key": "none"}
    options = {
        "model": f"openai/{flags.model}",
        "messages": [{"role": "user", "content": ASKED}],
        "temperature": 0,
        "max_tokens": N_TOKENS,
        **place,
    }
    answer = completion(**options)
    yield "chat", answer.choices[0].message.content
    yield "counts", str(answer.usage.total_tokens)
    chunks = completion(**options, stream=True)
    yield "stream", "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    embeddings = embedding(model=f"openai/{flags.embedder}", input=[ASKED], **place)
    yield "embedding", _size(embeddings.data[0]["embedding"])


CLIENTS: dict[str, Callable[[Namespace], Tried]] = {
    "langchain-openai": langchain,
    "llama-index-llms-openai-like": llama_index,
    "litellm": litellm,
    "pydantic-ai-slim": pydantic_ai,
}


def main() -> int:
    """Try all; the number of clients for which something failed."""
    parser = ArgumentParser(description="tries clients of other projects at a server")
    parser.add_argument("url")
    parser.add_argument("model")
    parser.add_argument("--embedder", help="default: the same model")
    parser.add_argument(
        "--tools", action="store_true", help="the model's chat template takes tools"
    )
    options = parser.parse_args()
    options.embedder = options.embedder or options.model
    return sum(not _try(name, client, options) for name, client in CLIENTS.items())


def _try(name: str, client: Callable[[Namespace], Tried], options: Namespace) -> bool:
    print(f"{name} {version(name)}")
    texts: dict[str, str] = {}
    try:
        for name_of_case, text in client(options):
            texts[name_of_case] = text
            print(f"  {name_of_case:24}{text!r}")
    except Exception as error:  # noqa: BLE001 - whatever a client raises is what is to be seen
        print(f"  {type(error).__name__}: {error}")
        return False
    is_equal = texts["chat"] == texts["stream"]
    if not is_equal:
        print("  the stream is not the whole answer")
    return is_equal


def _size(vector: list[float]) -> str:
    return f"{len(vector)} numbers"


if __name__ == "__main__":
    sys.exit(main())
