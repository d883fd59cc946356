"""The command line: `python -m pyllama_raw generate`, `info`, `tune` and `bench`."""

from pyllama_raw.cli.command import main

__all__ = ["main"]
