"""The command line: `python -m pyllama_raw generate`, `info` and `bench`."""

from pyllama_raw.cli.command import main

__all__ = ["main"]
