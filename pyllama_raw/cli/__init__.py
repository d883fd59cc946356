"""The command line: `pyllama-raw chat`, `generate`, `info`, `tune` and `bench`."""

from pyllama_raw.cli.command import main

__all__ = ["main"]
