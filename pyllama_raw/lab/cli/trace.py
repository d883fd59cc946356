"""`trace`: logs of an engine as a trace that Perfetto opens."""

from __future__ import annotations

from argparse import Namespace

from pyllama_raw.cli.outputs import output
from pyllama_raw.engine.request_log import read_requests
from pyllama_raw.engine.step_log import read_steps
from pyllama_raw.errors import ConfigError
from pyllama_raw.lab.chrome_trace import write_trace


def trace(options: Namespace) -> int:
    """Run the command; return its exit status."""
    try:
        steps = read_steps(options.steps)
        requests = [] if options.requests is None else read_requests(options.requests)
    except ValueError as error:
        raise ConfigError(f"no log: {error}") from error
    with output(options.out) as file:
        assert file is not None
        write_trace(file, steps, requests)
    return 0
