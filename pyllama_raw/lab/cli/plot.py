"""`plot`: pictures of logs and results."""

from __future__ import annotations

import sys
from argparse import Namespace

from pyllama_raw.lab.plot import pictures


def plot(options: Namespace) -> int:
    """Run the command; return its exit status."""
    figures = pictures(*options.files)
    figures.save(options.out)
    for name in figures:
        sys.stdout.write(f"{options.out / name}.svg, .png\n")
    return 0
