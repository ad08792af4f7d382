"""Tests of what goes to stdout and stderr, and when it is coloured."""

from __future__ import annotations

import errno
import io
import json
import os
import sys

import pytest

from trainctl.cli.console import print_data, print_json, print_message
from trainctl.config.quantities import count_text


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_data_and_talk_have_their_own_streams(capsys: pytest.CaptureFixture[str]) -> None:
    print_data("data [/not] :markup:", style="good")
    print_message("talk", style="error")
    assert capsys.readouterr() == ("data [/not] :markup:\n", "talk\n")


def test_colour_is_for_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys, "stderr", Terminal())
    print_message("bad", style="error")
    print_message("plain")
    assert sys.stderr.getvalue() == "\x1b[31mbad\x1b[0m\nplain\n"


def test_no_color_is_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys, "stdout", Terminal())
    print_data("good", style="good")
    assert sys.stdout.getvalue() == "good\n"


def test_json_keeps_every_digit(capsys: pytest.CaptureFixture[str]) -> None:
    print_json({"third": 1 / 3, "text": "é"})
    assert json.loads(capsys.readouterr().out) == {"third": 1 / 3, "text": "é"}


@pytest.mark.parametrize(
    ("number", "text"), [(12, "12"), (8190, "8.19 k"), (6.74e9, "6.74 B"), (1.5e13, "15 T")]
)
def test_short_count(number: float, text: str) -> None:
    assert count_text(number) == text


class Closed(io.StringIO):
    """A terminal that was closed: EIO."""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_talk_that_nobody_hears_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Closed())
    print_message("bad", style="error")


def test_a_dumb_terminal_gets_no_escape_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "dumb")
    monkeypatch.setattr(sys, "stdout", Terminal())
    print_data("good", style="good")
    assert sys.stdout.getvalue() == "good\n"
