"""
Any workload of `pyllama-raw bench run`, on our engine and on the peers.

Options are those of that command, and --peers. Each peer is started for its turn in a
round and stopped after it. Memory-pressure is for engines that say how many cells they
have: servers get as many.
"""

from __future__ import annotations

import signal
import sys
from argparse import ArgumentParser, Namespace

from peers.openers import PEERS, SERVERS, peer_opener

from pyllama_raw import ConfigError
from pyllama_raw.lab import bench
from pyllama_raw.lab.arguments import add_run
from pyllama_raw.lab.bench import bench_config
from pyllama_raw.lab.targets import Opener, opener
from pyllama_raw.options.models import resolve_model

CELLS_A_SLOT = 2048  # unless --n-ctx says otherwise


def openers(options: Namespace) -> dict[str, Opener]:
    """Our engine first: ratios are to it."""
    options.n_slots = options.n_slots or 8
    config = bench_config(options)
    if options.n_ctx is None:
        options.n_ctx = CELLS_A_SLOT * options.n_slots
        config = bench_config(options)
    threads = config.context.threads
    openers_by_name = {
        spec: opener(spec, options.model, config)
        for spec in options.targets or ["engine"]
    }
    for name in options.peers:
        openers_by_name[name] = peer_opener(
            name,
            options.model,
            n_slots=options.n_slots,
            n_ctx=options.n_ctx,
            threads=threads,
        )
    return openers_by_name


def main() -> int:
    """Run the script."""
    parser = ArgumentParser(description=(__doc__ or "").strip().split("\n")[0])
    add_run(parser)
    parser.add_argument(
        "--peers", nargs="*", choices=list(PEERS), default=SERVERS, metavar="PEER"
    )
    options = parser.parse_args()
    # From here on SIGTERM ends the script as ^C does, so that no server outlives it.
    signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    options.model = resolve_model(options.model)
    try:
        return bench.measure(options, options.model, openers(options))
    except ConfigError as error:
        parser.error(str(error))


if __name__ == "__main__":
    sys.exit(main())
