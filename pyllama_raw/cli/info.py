"""`info`: the library, its devices, a model and the limits its engine would have."""

from argparse import Namespace


def info(options: Namespace) -> int:
    return 0
