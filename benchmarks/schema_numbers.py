"""
Random numbers of drawn schemas: every finished output is valid, or its schema is refused.

500 schemas with bounds, multiples, const and enum, in every place where a schema may stand;
tokens are drawn at random from those that are allowed, without a model. Exact numbers decide.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path

from load.measure import Report, arguments, parse, say

from pyllama_raw.engine.guidance import Guidance
from pyllama_raw.native.model import Model

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.number_schemas import invalid
from tests.tiny import tiny_model


def measure(options: Namespace, report: Report) -> None:
    """All schemas, one after the other."""
    with Model.load(tiny_model("llama-bytes"), vocab_only=True) as model:
        n_finished, n_refused, wrong = invalid(
            Guidance(model.vocab),
            model.vocab,
            options.schemas,
            options.each,
            options.seed,
        )
    for schema, text in wrong[:20]:
        say(f"invalid: {text} for {schema}")
    report.add(schemas=options.schemas, refused=n_refused, finished=n_finished)
    report.claim("finished", n_finished, ">=", 0.8 * options.schemas * options.each)
    report.claim("invalid", len(wrong), "<=", 0)


def main() -> int:
    """Run the script."""
    parser = arguments(__doc__)
    parser.add_argument("--schemas", type=int, default=500)
    parser.add_argument("--each", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parse(parser)
    report = Report("schema_numbers", options)
    measure(options, report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
