"""Whether another replica may begin an answer again."""

import pytest

from pyllama_raw.replicas.relay import Progress

START = {"type": "http.response.start", "status": 200}
PING, TOKEN = b": ping\n\n", b'data: {"choices": []}\n\n'


def part(body: bytes) -> dict:
    return {"type": "http.response.body", "body": body}


@pytest.mark.parametrize(
    ("body", "has_token"),
    [(b"", False), (PING, False), (TOKEN, True), (PING + TOKEN, True), (b"{}", True)],
)
def test_comments_are_no_tokens(body, has_token):
    """
    Also where a token comes behind them, in one part.
    """
    progress = Progress()

    sent = [progress.goes_on_with(START), progress.goes_on_with(part(body))]

    assert sent == [True, True]
    assert progress.has_token == has_token


def test_an_answer_starts_once():
    """
    The start of a second replica is not sent.
    """
    progress = Progress()

    assert [progress.goes_on_with(START), progress.goes_on_with(START)] == [True, False]
