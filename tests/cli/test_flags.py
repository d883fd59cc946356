"""What a person is told of a wrong flag, and what help says of every one."""

from argparse import SUPPRESS, ArgumentParser

import pytest

from pyllama_raw import __version__
from pyllama_raw.cli import main
from pyllama_raw.cli.command import Parser, root_parser

GENERATE, RUN = ("generate", "a"), ("bench", "run", "offline")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((*GENERATE, "--slots", "0"), "--slots 0: give at least 1"),
        ((*GENERATE, "--slots", "x"), "--slots x: give a whole number"),
        ((*GENERATE, "--slots"), "--slots expected one argument"),
        ((*GENERATE, "--max-tokens", "0"), "--max-tokens 0: give at least 1"),
        (
            (*GENERATE, "--threads", "9" * 11),
            f"--threads {'9' * 11}: give at most 2147483647",
        ),
        ((*GENERATE, "--top-p", "0"), "--top-p 0: give more than 0"),
        (
            (*GENERATE, "--temperature", "nan"),
            "--temperature nan: give a finite number",
        ),
        ((*GENERATE, "--mirostat", "3"), "--mirostat 3: give one of 0, 1, 2"),
        ((*GENERATE, "--stop", ""), "--stop '': give at least 1 character"),
        ((*GENERATE, "--cache", "x"), "--cache x: give one of off, live, snapshots"),
        (
            (*GENERATE, "--cache-bytes", "1.2.3"),
            "--cache-bytes 1.2.3: give bytes, or a size like 512M or 2G",
        ),
        (
            (*GENERATE, "--deadline-s", "inf"),
            "--deadline-s inf: give a finite number",
        ),
        (
            (*GENERATE, "--grammar-file", "none"),
            "--grammar-file none: cannot be read: No such file or directory",
        ),
        (
            (*GENERATE, "--adapter", "a.gguf"),
            "--adapter a.gguf: give NAME=FILE or NAME=FILE:SCALE",
        ),
        ((*GENERATE, "--adapter", "a=b:101"), "--adapter 101: give at most 100"),
        ((*RUN, "--rounds", "0"), "--rounds 0: give at least 1"),
        ((*RUN, "--clients", "2", "0"), "--clients 0: give at least 1"),
        ((*RUN, "--rate", "-1"), "--rate -1: give more than 0"),
        (
            ("tune", "--output-tokens", "0.5"),
            "--output-tokens 0.5: give a whole number",
        ),
        (
            (*GENERATE, "--thread", "2"),
            "unrecognized arguments: --thread 2; did you mean --threads?",
        ),
        (
            (*RUN, "--round=2"),
            "unrecognized arguments: --round=2; did you mean --rounds?",
        ),
        (("tune", "--prompt=2"), "unrecognized arguments: --prompt=2"),
    ],
)
def test_a_wrong_flag_is_told_with_its_rule(arguments, message, capsys):
    """
    One line names flag, value and what is allowed, one says where to read on; there is
    no usage, and the status is 2.
    """
    with pytest.raises(SystemExit) as ended:
        main(arguments)

    first, second = capsys.readouterr().err.splitlines()
    assert ended.value.code == 2
    assert first.startswith(f"error: {message}")
    assert second.endswith("--help says more")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--speculation", "x"),
            "--speculation 'x': give 'auto', 'off', 'lookup', 'draft' or 'mtp'",
        ),
        (
            ("--speculation", "draft"),
            "--draft None: give the file of one, if --speculation is 'draft'",
        ),
        (
            ("--speculation", "mtp", "--draft", "b.gguf"),
            "--speculation 'mtp': give 'draft', if --draft is given; 'off' leaves it unused",
        ),
        (
            ("--speculation", "mtp", "--deterministic", "--cache", "off"),
            "--speculation 'mtp': give off, if --deterministic is True; fast allows it",
        ),
    ],
)
def test_options_that_do_not_fit_are_told_by_their_flags(arguments, message, capsys):
    """
    The mode of drafts is not that of the cache, and a value in quotes is no flag.
    """
    status = main([*GENERATE, *arguments])

    assert (status, capsys.readouterr().err) == (2, f"error: {message}\n")


def commands(parser: ArgumentParser) -> list[ArgumentParser]:
    """*parser*, and the parsers of all its commands."""
    found = [parser]
    for action in parser._actions:
        if isinstance(action.choices, dict):
            for choice in action.choices.values():
                found += commands(choice.filled())
    return found


COMMANDS = commands(root_parser())


@pytest.mark.parametrize("parser", COMMANDS, ids=lambda parser: parser.prog)
def test_every_flag_has_help_and_every_command_tells_its_status(parser: Parser):
    """
    No flag is only listed; --help of each command that runs explains the exit status.
    """
    actions = [a for a in parser._actions if not isinstance(a.choices, dict)]
    has_commands = len(actions) < len(parser._actions)

    assert [a.dest for a in actions if not a.help or a.help == SUPPRESS] == []
    assert "  130  " in parser.format_help() or has_commands


@pytest.mark.parametrize("parser", COMMANDS, ids=lambda parser: parser.prog)
def test_every_number_is_checked_when_it_is_read(parser: Parser):
    """
    What is no number at all is refused by each flag that takes one, and so is nan.
    """
    flags = [action for action in parser._actions if action.option_strings]
    numbers = [a for a in flags if a.metavar in ("N", "S", "R", "B", "X", "PERCENT")]

    for action in numbers:
        for text in ("x", "nan", "inf", "-inf", ""):
            with pytest.raises(Exception, match=r"^[^:]+: give "):
                action.type(text)


def test_every_number_that_a_field_lists_can_be_given():
    """
    A field that allows only some numbers takes each of them from its flag.
    """
    options = root_parser().parse_args([*GENERATE, "--mirostat", "2"])

    assert options.mirostat == 2


@pytest.mark.parametrize("parser", COMMANDS, ids=lambda parser: parser.prog)
def test_no_flag_can_be_abbreviated(parser: Parser):
    """
    A part of a long flag is none, so that a new flag changes the meaning of no command.
    """
    assert not parser.allow_abbrev


def test_help_of_tune_says_what_its_limit_of_time_does_not_end(capsys):
    """
    The requantised models are measured however short it is.
    """
    with pytest.raises(SystemExit):
        main(["tune", "--help"])

    text = " ".join(capsys.readouterr().out.split())
    assert "each requantised model are measured in any case" in text


def test_the_version_is_told(capsys):
    """
    On stdout, with status 0.
    """
    with pytest.raises(SystemExit) as ended:
        main(["--version"])

    assert (ended.value.code, capsys.readouterr().out) == (
        0,
        f"pyllama_raw {__version__}\n",
    )
