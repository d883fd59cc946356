"""The examples with tools, with a model that calls some."""

import runpy
from pathlib import Path

from pyllama_raw import AsyncEngine
from tests.support.replying import reply_engine

EXAMPLES = Path(__file__).parents[2] / "examples"


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_the_model_gets_what_its_calls_return(monkeypatch, capsys):
    """
    Each call is run, a wrong one is told to the model, and its answer is shown.
    """
    replies = (
        call("temperature", '{"city": "Oslo"}') + call("temperature", '{"town": 1}'),
        call("snow", "{}"),
        "Rome.",
    )
    monkeypatch.setattr(AsyncEngine, "open", lambda: reply_engine(*replies))

    runpy.run_path(str(EXAMPLES / "tools.py"), run_name="__main__")

    *calls, _, answer = capsys.readouterr().out.splitlines()
    assert calls[0] == 'temperature({"city": "Oslo"}) -> 4 °C'
    assert calls[1].startswith('temperature({"town": 1}) -> TypeError: ')
    assert calls[2] == "snow({}) -> KeyError: 'snow'"
    assert answer == "Rome."


def test_a_form_of_ones_own_is_taken_apart(monkeypatch, capsys):
    """
    Reasoning, content and the call come in their order, the name of the call once.
    """
    reply = '<think>Oslo, then.</think>Let me see. [call] temperature {"city": "Oslo"} [/call]'
    monkeypatch.setattr(AsyncEngine, "open", lambda: reply_engine(reply))

    runpy.run_path(str(EXAMPLES / "reply_spec.py"), run_name="__main__")

    *lines, calls = capsys.readouterr().out.splitlines()
    assert lines[0].replace(")(", "") == "(Oslo, then.)Let me see."
    assert lines[1:] == ['temperature {"city": "Oslo"}']
    assert calls == "calls: ['temperature']"
