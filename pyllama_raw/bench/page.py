"""One HTML page with everything in it: conditions, table, plots. It loads nothing."""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from pyllama_raw.bench.plots import STYLE
from pyllama_raw.bench.result import Result
from pyllama_raw.bench.table import cell, columns_of, most_busy, rows
from pyllama_raw.replacing import replacing

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em; }}
table {{ border-collapse: collapse; font-size: 13px; }}
td, th {{ border-bottom: 1px solid #ccc; padding: .3em .7em; text-align: right; }}
td:first-child, th:first-child {{ text-align: left; }}
svg {{ max-width: 100%; height: auto; }}
.warning {{ color: #a00; font-weight: bold; }}
</style>
<h1>{title}</h1>
<p>{conditions}</p>
{warning}
{table}
<p>Medians over rounds. A ratio is taken within each round, to the first target: median
[smallest, largest]. In plots, lines join medians and bars reach from the smallest to the
largest round; timeline and distribution are of the last point.</p>
{plots}
<p>Options: {options}</p>
</html>
"""


def write_page(results: Sequence[Result], drawn: dict[str, Figure], path: Path) -> None:
    """Write the page of *results* with the plots *drawn*."""
    first = results[0]
    title = f"{first.get('workload', 'benchmark')}: {first.get('model_id', '')}"
    page = PAGE.format(
        title=escape(title),
        conditions=escape(_conditions(first, len({r["round"] for r in results}))),
        warning=_warning(results),
        table=_table(results),
        plots="\n".join(f"<h2>{escape(n)}</h2>\n{_svg(f)}" for n, f in drawn.items()),
        options=escape(_pairs(first.get("options", {}))),
    )
    with replacing(path) as file:
        file.write(page)


def _conditions(result: Result, n_rounds: int) -> str:
    return f"{n_rounds} rounds; {_pairs(result.get('machine', {}))}"


def _pairs(values: dict[str, object]) -> str:
    return ", ".join(f"{k} {v}" for k, v in values.items() if v not in (None, [], ""))


def _warning(results: Sequence[Result]) -> str:
    busiest = most_busy(results)
    if busiest is None:
        return ""
    return f'<p class="warning">Other processes used up to {busiest:.2f} CPUs.</p>'


def _table(results: Sequence[Result]) -> str:
    lines = rows(results)
    columns = columns_of(lines)
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "\n".join(
        "<tr>"
        + "".join(f"<td>{escape(cell(line.get(c, '')))}</td>" for c in columns)
        + "</tr>"
        for line in lines
    )
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>"


def _svg(figure: Figure) -> str:
    """The plot as an element of the page."""
    text = io.StringIO()
    with rc_context(STYLE):
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
