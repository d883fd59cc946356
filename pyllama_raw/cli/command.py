"""Parse the arguments, run one command, turn its end into an exit status."""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from functools import partial
from signal import SIG_IGN, SIGINT, signal

from pyllama_raw.cli import bench_options, options
from pyllama_raw.errors import ConfigError, PyllamaError

FAILED, WRONG_USE, INTERRUPTED = 1, 2, 128 + SIGINT


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 0 only if everything that was asked for succeeded."""
    parsed = _parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        # In JSON, the backslash form of a lone surrogate is its escape.
        stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    try:
        status: int = parsed.run(parsed)
        sys.stdout.flush()
    except KeyboardInterrupt:
        signal(SIGINT, SIG_IGN)  # a second Ctrl-C would break into the way out
        return INTERRUPTED
    except BrokenPipeError:
        # Nobody reads: let the flush at exit go nowhere, too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (PyllamaError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return WRONG_USE if isinstance(error, ConfigError) else FAILED
    return status


def _parser() -> ArgumentParser:
    parser = ArgumentParser(prog="pyllama_raw", description="Run GGUF models.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    generate = commands.add_parser("generate", help="complete prompts, many at a time")
    options.add_generate(generate)
    generate.set_defaults(run=_generate)
    info = commands.add_parser("info", help="show library, devices, model and limits")
    options.add_info(info)
    info.set_defaults(run=_info)
    tune = commands.add_parser("tune", help="find the fastest options on this machine")
    options.add_tune(tune)
    tune.set_defaults(run=_tune)
    _add_bench(commands.add_parser("bench", help="measure, compare and report speed"))
    return parser


def _add_bench(bench: ArgumentParser) -> None:
    commands = bench.add_subparsers(required=True, metavar="COMMAND")
    run = commands.add_parser("run", help="put a workload on targets")
    bench_options.add_run(run)
    compare = commands.add_parser("compare", help="tell changes from noise")
    bench_options.add_compare(compare)
    report = commands.add_parser("report", help="show results again")
    bench_options.add_report(report)
    for name, parser in (("run", run), ("compare", compare), ("report", report)):
        parser.set_defaults(run=partial(_bench, name))


def _generate(parsed: Namespace) -> int:
    from pyllama_raw.cli.generate import generate

    return generate(parsed)


def _info(parsed: Namespace) -> int:
    from pyllama_raw.cli.info import info

    return info(parsed)


def _tune(parsed: Namespace) -> int:
    from pyllama_raw.cli.tune import tune

    return tune(parsed)


def _bench(name: str, parsed: Namespace) -> int:
    try:
        from pyllama_raw.cli import bench
    except ImportError as error:
        raise ConfigError(f"{error}: pip install pyllama_raw[bench]") from error
    status: int = getattr(bench, name)(parsed)
    return status
