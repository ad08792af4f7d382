"""Tests of progress bars, in a terminal and elsewhere."""

from __future__ import annotations

import io
import sys

import pytest

from trainctl.cli import console
from trainctl.cli.console import Meter


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def test_plain_lines_come_at_intervals_and_only_for_long_work(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with Meter() as show:
        for done in range(13):
            show("exporting", done, 12)
            clock[0] += 1.0
        show("a short thing", 0, 2)
        clock[0] += 1.0
        show("a short thing", 2, 2)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines() == ["exporting: 42 %", "exporting: 83 %"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    with Meter() as show:
        show("exporting [x]", 1, 4)
        show("exporting [x]", 3, 4)
    assert "exporting [x]" in screen.getvalue()
    assert "75%" in screen.getvalue() and "━" in screen.getvalue()
