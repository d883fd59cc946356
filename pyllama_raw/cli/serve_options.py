"""Flags of `serve`."""

from __future__ import annotations

from argparse import ArgumentParser

from pyllama_raw.cli.engine_options import add_engine
from pyllama_raw.cli.fields import add_fields
from pyllama_raw.cli.flags import add, add_switch, sampling
from pyllama_raw.cli.options import MODEL_HELP
from pyllama_raw.options.config import EngineConfig, MediaConfig
from pyllama_raw.serve.config import FILE_ONLY, ListenConfig, ServeConfig


def add_serve(parser: ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("models", nargs="*", metavar="MODEL", help=MODEL_HELP)
    text = "the name of a MODEL, in their order; repeatable (the name of its file)"
    add(parser, "--alias", str, "NAME", text, action="append")
    text = "models and options as TOML (docs/service.md); flags win"
    add(parser, "--config", str, "FILE", text)
    text = "show each model and the limits that its engine would have, and end"
    add_switch(parser, "--dry-run", text)
    group = parser.add_argument_group("address")
    add_fields(group, ListenConfig, tuple(ListenConfig.model_fields))
    group = parser.add_argument_group("service")
    names = [name for name in ServeConfig.model_fields if name not in FILE_ONLY]
    add_fields(group, ServeConfig, names)
    text = (
        "a default of requests that do not say, such as temperature=0.2 or top_k=40: any field of "
        "SamplingParams, the value as JSON or text; repeatable"
    )
    add(group, "--sampling", sampling, "NAME=VALUE", text, action="append")
    add_fields(group, EngineConfig, ("warm_up",))
    add_fields(parser.add_argument_group("media"), MediaConfig, ("mmproj",))
    add_engine(parser)
