"""Text and status line share a screen."""

import io

import pytest

from pyllama_raw.cli.running import Terminal
from tests.cli.support import FakeTty


@pytest.fixture(autouse=True)
def ten_columns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "10")
    monkeypatch.setenv("TERM", "xterm")


def test_no_status_without_a_terminal():
    """
    In files and pipes there is only text.
    """
    out, err = io.StringIO(), io.StringIO()
    terminal = Terminal(out, err)

    terminal.status("busy")
    terminal.write("\x1btext")
    terminal.close()

    assert (out.getvalue(), err.getvalue()) == ("\x1btext", "")


def test_no_status_on_a_dumb_terminal(monkeypatch: pytest.MonkeyPatch):
    """
    A terminal that cannot move its cursor is left alone.
    """
    monkeypatch.setenv("TERM", "dumb")

    assert not Terminal(FakeTty(), FakeTty()).has_status


def test_status_is_one_row_of_stderr():
    """
    With stdout in a file, the status is rewritten in its row and cut to its width.
    """
    err = FakeTty()
    terminal = Terminal(io.StringIO(), err)

    terminal.status("0123456789")
    terminal.say("note")
    terminal.close()

    assert err.getvalue() == "\r\x1b[K012345678\r\x1b[Knote\n"


def test_status_ends_where_text_begins():
    """
    On one terminal, the row is emptied before the text, and stays so.
    """
    screen = FakeTty()
    terminal = Terminal(screen, screen)

    terminal.status("busy")
    terminal.write("ab")
    terminal.status("busy")
    terminal.close()

    assert screen.getvalue() == "\r\x1b[Kbusy\r\x1b[Kab"


def test_output_cannot_drive_the_terminal():
    """
    Control characters are replaced on a screen, except line breaks and tabs.
    """
    screen = FakeTty()

    Terminal(screen, io.StringIO()).write("\x1b[31m\tred\x9b\n")

    assert screen.getvalue() == "�[31m\tred�\n"
