"""The loop of the example that runs tools, with a model that calls some."""

import runpy
from pathlib import Path

from pyllama_raw import AsyncEngine
from tests.replying import reply_engine

EXAMPLE = Path(__file__).parents[2] / "examples" / "tools.py"


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

    runpy.run_path(str(EXAMPLE), run_name="__main__")

    *calls, _, answer = capsys.readouterr().out.splitlines()
    assert calls[0] == 'temperature({"city": "Oslo"}) -> 4 °C'
    assert calls[1].startswith('temperature({"town": 1}) -> TypeError: ')
    assert calls[2] == "snow({}) -> KeyError: 'snow'"
    assert answer == "Rome."
