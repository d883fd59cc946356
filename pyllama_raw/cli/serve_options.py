"""Flags of `serve`."""

from __future__ import annotations

from argparse import ArgumentParser

from pyllama_raw.cli.engine_options import add_engine
from pyllama_raw.cli.fields import add_fields
from pyllama_raw.cli.options import MODEL_HELP
from pyllama_raw.options.config import MediaConfig
from pyllama_raw.serve.config import FILE_ONLY, ListenConfig, ServeConfig


def add_serve(parser: ArgumentParser) -> None:
    """Add the flags."""
    parser.add_argument("models", nargs="*", metavar="MODEL", help=MODEL_HELP)
    parser.add_argument(
        "--alias",
        action="append",
        metavar="NAME",
        help="the name of a MODEL, in their order; repeatable (the name of its file)",
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="models and options as TOML (docs/service.md); flags win",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="show each model and the limits that its engine would have, and end",
    )
    group = parser.add_argument_group("address")
    add_fields(group, ListenConfig, tuple(ListenConfig.model_fields))
    group = parser.add_argument_group("service")
    names = [name for name in ServeConfig.model_fields if name not in FILE_ONLY]
    add_fields(group, ServeConfig, names)
    add_fields(parser.add_argument_group("media"), MediaConfig, ("mmproj",))
    add_engine(parser)
