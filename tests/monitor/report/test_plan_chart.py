"""The chart of a search: all variants, a frontier that is one, numbers for what is listed."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure

from trainctl.cli.main import run
from trainctl.memory.constants import GIB
from trainctl.monitor.report import figure
from trainctl.monitor.report.figure import Variant, frontier

WORDS = ["model=llama-7b", "hardware=8xh100-80g", "training.sequence_length=4096"]
WORDS += ["training.global_batch_tokens=4M", "activation_checkpointing=full", "--top", "3"]


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=20))
def test_the_frontier_is_what_nothing_beats(points: list[tuple[int, int]]) -> None:
    every = [Variant(gibibytes=a, seconds=b, stage=1, fits=True) for a, b in points]
    best = {(each.gibibytes, each.seconds) for each in frontier(every)}
    assert best == {
        (a, b)
        for a, b in points
        if not any((c <= a and d < b) or (c < a and d <= b) for c, d in points)
    }


def test_all_variants_are_drawn_and_the_listed_ones_are_numbered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    drawn: list[Figure] = []
    asked = []

    def keep(result, *rest, **options):  # type: ignore[no-untyped-def]
        asked.append(result)
        drawn.append(chart(result, *rest, **options))
        return drawn[-1]

    chart = figure.plan_figure
    monkeypatch.setattr(figure, "plan_figure", keep)
    monkeypatch.setattr(figure, "HIGHEST", 1e9)
    assert run(["plan", *WORDS, "--plot", str(tmp_path / "plan.svg")]) == 0
    (result,), (axes,) = asked, drawn[0].axes
    clouds = [each for each in axes.collections if isinstance(each, PathCollection)]
    assert sum(len(each.get_offsets()) for each in clouds) == result.timed == len(result.candidates)
    marks = {text.get_text(): text for text in axes.texts}  # type: ignore[attr-defined]
    for number, found in enumerate(result.found, 1):
        x, y = marks[str(number)].xy  # type: ignore[attr-defined]
        assert x == found.budget.device_peak_bytes / GIB
        assert y == pytest.approx(found.time.seconds, rel=0.11), "of as many tokens"
    line = next(each for each in axes.lines if each.get_label() == "frontier")
    assert all(a > b for a, b in pairwise(line.get_ydata()))
    assert (tmp_path / "plan.svg").read_bytes().startswith(b"<?xml")
    assert run(["plan", *WORDS, "--plot", str(tmp_path / "plan.gif")]) == 2
    assert "a chart is written as .png, .svg, .html" in capsys.readouterr().err
