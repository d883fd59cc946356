"""What `generate` shows of many requests, and how it sums them up."""

import io
import json
import math
from dataclasses import asdict, replace

import pytest

from pyllama_raw import SamplingParams
from pyllama_raw.api.results import Usage
from pyllama_raw.cli.generate import JsonLines, LiveText, record, summarize
from pyllama_raw.cli.inputs import Input, InputRequest, Outcome
from pyllama_raw.cli.running import Terminal
from pyllama_raw.core.request import (
    FinishDetail,
    FinishReason,
    LengthLimit,
    StopString,
    StopToken,
    TokenLogprobs,
)
from pyllama_raw.errors import InvalidRequest, PyllamaError
from pyllama_raw.replies.parser import ToolCall
from pyllama_raw.testing import fake_engine
from tests.cli.support import make_result

ERROR = InvalidRequest("top_p", 2, "at most 1")


@pytest.fixture
def out() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def err() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def terminal(out: io.StringIO, err: io.StringIO) -> Terminal:
    return Terminal(out, err)


def requests(*prompts: object) -> list[Input]:
    sampling = SamplingParams()
    return [InputRequest(i, p, sampling) for i, p in enumerate(prompts)]  # type: ignore[arg-type]


def test_one_prompt_is_only_its_text(terminal: Terminal, out: io.StringIO):
    """
    The output of a single prompt has no title and ends with one line break.
    """
    view = LiveText(terminal, requests("a"))

    view.text(0, "one ")
    view.text(0, "two")
    view.finished(Outcome(0, make_result("one two")))

    assert out.getvalue() == "one two\n"


def test_first_unfinished_request_streams(terminal: Terminal, out: io.StringIO):
    """
    The first request that has not ended is shown live; the others in their turn.
    """
    view = LiveText(terminal, requests("a", "b", "c"))
    seen = []

    for step in (
        lambda: view.text(0, "A"),
        lambda: view.text(2, "C1"),
        lambda: view.finished(Outcome(1, make_result("B"))),
        lambda: view.text(0, "a\n"),
        lambda: view.finished(Outcome(0, make_result("Aa\n"))),
        lambda: view.text(2, "C2"),
        lambda: view.finished(Outcome(2, make_result("C1C2"))),
    ):
        step()
        seen.append(out.getvalue())
        out.seek(0)
        out.truncate()

    assert seen == [
        "[0] a\nA",
        "",
        "",
        "a\n",
        "\n[1] b\n\n[2] c\nC1",
        "C2",
        "\n",
    ]


def test_titles_show_what_was_asked(terminal: Terminal, out: io.StringIO):
    """
    A title is the prompt in one short line, the last message, or the ids.
    """
    inputs = requests(
        "a  b\nc" + "x" * 100, [{"role": "user", "content": "hello"}], [1, 2]
    )
    view = LiveText(terminal, [*inputs, Outcome(3, error=ERROR)])

    for index in range(4):
        view.finished(Outcome(index, error=ERROR))

    titles = [line for line in out.getvalue().splitlines() if line]
    assert titles == [
        "[0] a b c" + "x" * 52 + "...",
        "[1] hello",
        "[2] [1, 2]",
        "[3] (no request)",
    ]


def test_failures_are_told_on_stderr(
    terminal: Terminal, out: io.StringIO, err: io.StringIO
):
    """
    Errors and early ends go to stderr with the index of the request.
    """
    view = LiveText(terminal, requests("a", "b"))

    view.finished(Outcome(0, error=ERROR))
    view.text(1, "B")
    view.finished(Outcome(1, make_result("B", reason=FinishReason.DEADLINE)))

    assert out.getvalue() == "[0] a\n\n[1] b\nB\n"
    assert err.getvalue().splitlines() == [f"[0] error: {ERROR}", "[1] ended: deadline"]


def test_ids_are_shown_where_there_is_no_text(terminal: Terminal, out: io.StringIO):
    """
    A model without a vocabulary still has an output to see.
    """
    view = LiveText(terminal, requests([1]))

    view.finished(Outcome(0, make_result("", token_ids=(5, 6))))

    assert out.getvalue() == "5 6\n"


def test_json_lines_are_whole_objects(terminal: Terminal, out: io.StringIO):
    """
    Each end is one line with the promised keys, in the order of the ends.
    """
    view = JsonLines(terminal)

    view.finished(Outcome(1, make_result("é\n")))
    view.text(0, "not yet")
    view.finished(Outcome(0, error=ERROR))

    assert [json.loads(line) for line in out.getvalue().splitlines()] == [
        {
            "index": 1,
            "text": "é\n",
            "token_ids": [1, 2],
            "finish_reason": "length",
            "finish_detail": None,
            "usage": {
                "prompt_tokens": 3,
                "completion_tokens": 2,
                "cached_tokens": 0,
                "cache_tier": None,
                "media_tokens": 0,
                "reasoning_tokens": 0,
                "drafted_tokens": 0,
                "accepted_tokens": 0,
            },
            "timings": {
                "queue_s": 0.0,
                "ttft_s": 0.5,
                "itl_p50_s": None,
                "itl_p99_s": None,
                "tpot_s": None,
                "e2e_s": 1.0,
                "prefill_s": None,
                "decode_s": None,
                "encode_s": None,
            },
            "sampler": {"placement": "host", "why": "of a test"},
        },
        {"index": 0, "error": {"type": "InvalidRequest", "message": str(ERROR)}},
    ]


@pytest.mark.parametrize(
    ("detail", "shown"),
    [
        (StopToken(2), {"stop_token_id": 2}),
        (StopString("é\n"), {"stop_string": "é\n"}),
        (LengthLimit.MAX_TOKENS, {"limit": "max_tokens"}),
        (LengthLimit.SLOT, {"limit": "slot"}),
        (None, None),
    ],
)
def test_a_line_tells_which_stop_or_limit(detail: FinishDetail | None, shown: object):
    """
    The kinds of an end differ by their key, so that a reader need not know tokens.
    """
    line = json.dumps(record(Outcome(0, make_result(detail=detail))))

    assert json.loads(line)["finish_detail"] == shown


@pytest.mark.parametrize(
    ("outcome", "succeeded"),
    [
        (Outcome(0, make_result(reason=FinishReason.STOP)), True),
        (Outcome(0, make_result(reason=FinishReason.LENGTH)), True),
        (Outcome(0, make_result(reason=FinishReason.DEADLINE)), False),
        (Outcome(0, make_result(reason=FinishReason.CANCELLED)), False),
        (Outcome(0, error=ERROR), False),
    ],
)
def test_only_an_end_of_its_own_is_success(outcome: Outcome, succeeded: bool):
    """
    A deadline or a cancellation is no error, and no success.
    """
    assert outcome.succeeded is succeeded


def test_log_probabilities_are_written_if_there_are_any():
    """
    The object has them by name; what JSON has no number for is null.
    """
    item = TokenLogprobs(5, -0.5, ((5, -0.5), (6, -math.inf)))
    with_some = record(Outcome(0, make_result(logprobs=(item,))))

    assert with_some["logprobs"] == [
        {"token_id": 5, "logprob": -0.5, "top": [(5, -0.5), (6, None)]}
    ]
    assert "logprobs" not in record(Outcome(0, make_result()))
    assert "prompt_logprobs" not in with_some


def test_reasoning_and_calls_are_written_if_there_are_any():
    """
    Each call has its id, name and arguments, as in `Result.tool_calls`.
    """
    call = ToolCall("a1", "weather", '{"city": "Oslo"}')
    result = replace(make_result(), reasoning="Hm.", tool_calls=(call,))
    shown, plain = record(Outcome(0, result)), record(Outcome(0, make_result()))

    expected = {"id": "a1", "name": "weather", "arguments": '{"city": "Oslo"}'}
    assert (shown["reasoning"], shown["tool_calls"]) == ("Hm.", [expected])
    assert shown.keys() - plain.keys() == {"reasoning", "tool_calls"}


def test_calls_are_shown_to_a_person(terminal: Terminal, out: io.StringIO):
    """
    Each is a line below the text; an output of calls alone is not shown as tokens.
    """
    calls = (ToolCall("a1", "f", "{}"), ToolCall("a2", "g", '{"x": 1}'))
    for text in ("", "Let me see."):
        view = LiveText(terminal, requests("a"))
        view.text(0, text)
        view.finished(Outcome(0, replace(make_result(text), tool_calls=calls)))

    shown = 'f({})\ng({"x": 1})\n'
    assert out.getvalue() == f"{shown}Let me see.\n{shown}"


def test_several_outputs_are_a_list():
    """
    With n above 1 the object has each output in `choices`, by its index.
    """
    outputs = [make_result("a"), make_result("b", index=2)]
    shown = record(Outcome(4, outputs[0], alternatives=(outputs[1],)))

    assert shown.keys() == {"index", "choices"}
    assert [(c["choice"], c["text"]) for c in shown["choices"]] == [(0, "a"), (2, "b")]


def test_all_outputs_have_to_succeed():
    """
    A request with an output that did not come to its own end is no success.
    """
    late = make_result(index=1, reason=FinishReason.DEADLINE)

    assert not Outcome(0, make_result(), alternatives=(late,)).succeeded


NONE = {"p50": None, "p99": None, "max": None}


@pytest.fixture
async def stats():
    async with fake_engine() as engine:
        return replace(engine.stats(), steps=8, decode_s=1.5, sample_s=0.5)


@pytest.mark.anyio
async def test_totals_and_rates(stats):
    """
    Tokens are summed over all results; rates are over the wall time without loading.
    """
    late = FinishReason.DEADLINE
    outcomes = [
        Outcome(0, make_result(usage=Usage(10, 4, 2), ttft_s=1.0, itl_s=(1, 2, 3))),
        Outcome(1, make_result(usage=Usage(20, 6, 0), ttft_s=3.0, itl_s=(4,))),
        Outcome(
            2, make_result(usage=Usage(5, 0, 0), ttft_s=None, itl_s=(), reason=late)
        ),
        Outcome(3, error=PyllamaError()),
    ]

    totals = summarize(outcomes, load_s=9.0, wall_s=5.0, stats=stats)

    assert totals.pop("engine") == asdict(stats)
    assert totals == {
        "requests": 4,
        "succeeded": 2,
        "failed": 2,
        "load_s": 9.0,
        "wall_s": 5.0,
        "prompt_tokens": 35,
        "completion_tokens": 10,
        "cached_tokens": 2,
        "media_tokens": 0,
        "total_tokens_per_s": 9.0,
        "completion_tokens_per_s": 2.0,
        "ttft_s": {"p50": 1.0, "p99": 3.0, "max": 3.0},
        "itl_s": {"p50": 2, "p99": 4, "max": 4},
        "host_s_per_step": 0.375,
    }


@pytest.mark.anyio
async def test_nothing_done_has_no_latencies(stats):
    """
    Without a result there is nothing to take percentiles of.
    """
    totals = summarize([], load_s=1.0, wall_s=1.0, stats=replace(stats, steps=0))

    assert (totals["ttft_s"], totals["itl_s"], totals["requests"]) == (NONE, NONE, 0)
    assert totals["host_s_per_step"] is None
