"""The command line: `python -m pyllama_raw generate` and `info`."""

from pyllama_raw.cli.command import main

__all__ = ["main"]
