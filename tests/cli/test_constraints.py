"""Grammars and schemas from files and lines become sampling parameters."""

from argparse import ArgumentParser
from pathlib import Path

import pytest

from pyllama_raw import SamplingParams
from pyllama_raw.cli.inputs import InputRequest, parse_line
from pyllama_raw.cli.options import SAMPLING, add_generate, given


def parse(*arguments: str) -> dict[str, object]:
    parser = ArgumentParser()
    add_generate(parser)
    return given(parser.parse_args(arguments), SAMPLING)


def test_files_are_read(tmp_path: Path):
    """
    The text of a grammar, and the value of a schema.
    """
    grammar, schema = tmp_path / "a.gbnf", tmp_path / "a.json"
    grammar.write_text('root ::= "é"', "utf-8")
    schema.write_text('{"type": "null"}')

    found = parse("--grammar-file", str(grammar), "--json-schema-file", str(schema))

    assert found == {"grammar": 'root ::= "é"', "json_schema": {"type": "null"}}


@pytest.mark.parametrize("flag", ["--grammar-file", "--json-schema-file"])
@pytest.mark.parametrize("content", [None, b"\xff", b"{"])
def test_files_that_cannot_be_used_are_named(flag, content, tmp_path: Path, capsys):
    """
    Status 2 and the name of the file, as for every wrong argument.
    """
    file = tmp_path / "damaged"
    if content is not None:
        file.write_bytes(content)
    if (flag, content) == ("--grammar-file", b"{"):
        return  # text, if no grammar: the engine says so

    with pytest.raises(SystemExit, match="2"):
        parse(flag, str(file))

    assert "damaged" in capsys.readouterr().err


def test_a_line_can_say_all_of_it():
    """
    Tokens are keys of an object, which JSON writes as strings.
    """
    line = b"""{"prompt": "a", "logit_bias": {"5": -1}, "stages": ["top_k"],
        "penalty_last_n": null, "json_schema": {"type": "object"}}"""

    request = parse_line(0, line, defaults={})

    assert isinstance(request, InputRequest)
    assert request.sampling == SamplingParams(
        logit_bias={5: -1.0},
        stages=("top_k",),
        penalty_last_n=None,
        json_schema={"type": "object"},
    )
