"""One HTML page with everything in it: conditions, table, plots. It loads nothing."""

from __future__ import annotations

import io
from collections.abc import Sequence
from html import escape
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure

from pyllama_raw.lab.bench.headline import CAPTION, headline
from pyllama_raw.lab.bench.result import Result
from pyllama_raw.lab.bench.table import (
    Row,
    cell,
    columns_of,
    failures,
    most_busy,
    rows,
    shown_rows,
)
from pyllama_raw.lab.plot.style import STYLE
from pyllama_raw.options.replacing import replacing

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; margin: 2em auto; max-width: 75em;
  padding: 0 1em; }}
div {{ overflow-x: auto; }}
table {{ border-collapse: collapse; font-size: 13px; white-space: nowrap; }}
td, th {{ border-bottom: 1px solid #ccc; padding: .3em .6em; text-align: right; }}
td:first-child, th:first-child {{ text-align: left; }}
details table {{ font-size: 12px; }}
code {{ overflow-wrap: anywhere; }}
svg {{ max-width: 100%; height: auto; }}
.failed {{ color: #a00; margin: 0; }}
.warning {{ color: #a00; font-weight: bold; }}
</style>
<h1>{title}</h1>
<p>{conditions}</p>
{warning}
<div>{table}</div>
<p>{caption}. A ratio is taken within each round: its median, smallest and largest.</p>
{failures}
<details><summary>All figures</summary><div>{wide}</div></details>
{plots}
<p>In plots, lines join medians and bars reach from the smallest to the largest round; a
cross is a round in which others used the CPUs. Timeline and distribution are of the last
point.</p>
<details><summary>Options</summary><p>{options}</p></details>
</html>
"""


def write_page(results: Sequence[Result], drawn: dict[str, Figure], path: Path) -> None:
    """Write the page of *results* with the plots *drawn*."""
    first = results[0]
    title = f"{first.get('workload', 'benchmark')}: {first.get('model_id', '')}"
    page = PAGE.format(
        title=escape(title),
        conditions="<br>\n".join(
            f"<code>{escape(s)}</code>" for s in headline(results)
        ),
        warning=_warning(results),
        table=_table(shown_rows(results)),
        caption=escape(CAPTION.capitalize()),
        failures="\n".join(
            f'<p class="failed">{escape(s)}</p>' for s in failures(results)
        ),
        wide=_table(rows(results, wide=True)),
        plots="\n".join(_plot(*item) for item in drawn.items()),
        options="<br>\n".join(
            dict.fromkeys(escape(_pairs(r.get("options", {}))) for r in results)
        ),
    )
    with replacing(path) as file:
        file.write(page)


def _pairs(values: dict[str, object]) -> str:
    return ", ".join(f"{k} {v}" for k, v in values.items() if v not in (None, [], ""))


def _warning(results: Sequence[Result]) -> str:
    busiest = most_busy(results)
    if busiest is None:
        return ""
    return f'<p class="warning">NO PROOF: others used up to {busiest:.2f} CPUs.</p>'


def _table(lines: Sequence[Row]) -> str:
    columns = columns_of(lines)
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "\n".join(
        "<tr>"
        + "".join(f"<td>{escape(cell(line.get(c, '')))}</td>" for c in columns)
        + "</tr>"
        for line in lines
    )
    return f"<table>\n<tr>{head}</tr>\n{body}\n</table>"


def _plot(name: str, figure: Figure) -> str:
    return f"<h2>{escape(name.replace('-', ' '))}</h2>\n{_svg(figure)}"


def _svg(figure: Figure) -> str:
    """The plot as an element of the page."""
    text = io.StringIO()
    with rc_context(STYLE):
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    return svg[svg.index("<svg") :]
