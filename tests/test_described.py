"""What an editor, help(), a JSON schema and `--help` say of the options: one text."""

import inspect
import pydoc
import re
import subprocess
import sys

import pytest
from pydantic import BaseModel

from pyllama_raw import EngineConfig, Profile, SamplingParams, results
from pyllama_raw.options import config
from pyllama_raw.options.frozen import descriptions
from pyllama_raw.options.requests import ChatOptions, RequestOptions, TextOptions

OPTIONS = (
    SamplingParams,
    Profile,
    *(
        kind
        for kind in vars(config).values()
        if inspect.isclass(kind) and kind.__module__ == config.__name__
    ),
)
RESULTS = (
    *(results.Delta, results.Result, results.Usage, results.Timings, results.Score),
    *(results.EngineStats, results.CacheStats, results.Capabilities),
    *(results.ModelInfo, results.Ranked),
)


@pytest.mark.parametrize("kind", [*OPTIONS, *RESULTS], ids=lambda kind: kind.__name__)
def test_every_field_is_described(kind: type):
    """
    No option and no field of a result is without a docstring of its own.
    """
    names = set(getattr(kind, "model_fields", ()) or kind.__annotations__)

    assert names - set(descriptions(kind)) == set()


def test_every_option_of_a_request_is_described():
    """
    The part that declares an option has its docstring.
    """
    parts = (ChatOptions, TextOptions, RequestOptions)
    described = {name for part in parts for name in descriptions(part)}

    assert described == set(RequestOptions.__annotations__)


def test_help_names_the_options_of_a_request():
    """
    generate() says "see RequestOptions"; help() of a TypedDict shows its docstring alone.
    """
    about = pydoc.render_doc(RequestOptions, renderer=pydoc.plaintext)

    words = set(re.findall(r"\w+", about.partition("Method resolution order")[0]))
    assert set(RequestOptions.__annotations__) - words == set()


@pytest.mark.parametrize("kind", OPTIONS, ids=lambda kind: kind.__name__)
def test_help_and_schema_say_the_same(kind: type[BaseModel]):
    """
    help() shows each description, and so does the JSON schema.
    """
    told = pydoc.render_doc(kind, renderer=pydoc.plaintext)
    properties = kind.model_json_schema()["properties"]

    said = descriptions(kind)
    lines = [line for text in said.values() for line in text.splitlines()]
    assert [line for line in lines if line not in told] == []
    assert {name: about["description"] for name, about in properties.items()} == said


def test_no_start_waits_for_descriptions():
    """
    The package and its options are imported without a look at any source.
    """
    script = """
import pyllama_raw.options.config, pyllama_raw.options.profile, pyllama_raw.options.sampling
from pyllama_raw.options.frozen import descriptions

print(descriptions.cache_info().currsize)
"""
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=100, check=True
    )

    assert done.stdout == "0\n"


def test_a_program_without_sources_runs_without_descriptions():
    """
    Options that nobody can read the source of have none; those they extend keep theirs.
    """
    kind = type("Options", (EngineConfig,), {"__module__": "pyllama_raw.frozen_away"})

    assert descriptions(kind) == descriptions(EngineConfig)
    assert inspect.getdoc(kind)
