"""Entry of `python -m pyllama_raw`."""

import sys

from pyllama_raw.cli import main

if __name__ == "__main__":
    sys.exit(main())
