"""`trace`: logs of an engine as a trace that Perfetto opens."""

from __future__ import annotations

from argparse import Namespace

from pyllama_raw.cli.running import output
from pyllama_raw.engine.logs import RequestRecord, read_records
from pyllama_raw.engine.watcher import StepRecord
from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.chrome_trace import write_trace


def trace(options: Namespace) -> int:
    """Run the command; return its exit status."""
    try:
        steps, requests = read_records(options.steps, StepRecord), []
        if options.requests is not None:
            requests = read_records(options.requests, RequestRecord)
    except ValueError as error:
        raise ConfigError(f"no log: {error}") from error
    with output(options.out) as file:
        assert file is not None
        write_trace(file, steps, requests)
    return 0
