"""Charts as files."""

from __future__ import annotations

from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure

from trainctl.errors import TrainctlError
from trainctl.monitor.report.figure import save_figure


def _figure() -> Figure:
    figure = Figure(figsize=(4, 3))
    figure.subplots().plot([0, 1, 2], [2.0, 1.0, 0.5], label="loss < 3")
    return figure


def test_the_suffix_says_the_form(tmp_path: Path) -> None:
    save_figure(_figure(), tmp_path / "a.png", title="A")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    save_figure(_figure(), tmp_path / "a.svg", title="A")
    assert ElementTree.parse(tmp_path / "a.svg").getroot().tag.endswith("svg")


def test_the_same_chart_is_the_same_file(tmp_path: Path) -> None:
    for name in ("a.svg", "b.svg"):
        save_figure(_figure(), tmp_path / name, title="A")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_page_needs_nothing_else_and_its_title_is_text(tmp_path: Path) -> None:
    save_figure(_figure(), tmp_path / "a.html", title="<b>A</b>")
    page = (tmp_path / "a.html").read_text()
    assert "<title>&lt;b&gt;A&lt;/b&gt;</title>" in page
    assert "<svg" in page and "<script" not in page and "src=" not in page


@pytest.mark.parametrize("name", ["a.jpg", "a", "nowhere/a.png"])
def test_what_cannot_be_written_is_a_users_error_and_leaves_nothing(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(TrainctlError):
        save_figure(_figure(), tmp_path / name, title="A")
    assert list(tmp_path.iterdir()) == []
