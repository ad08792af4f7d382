"""Charts as files, drawn with matplotlib: PNG, SVG, or one self-contained HTML page."""

from __future__ import annotations

import html
import io
from collections.abc import Callable
from pathlib import Path

from cycler import cycler
from matplotlib import rc_context
from matplotlib.figure import Figure

from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.files import write_bytes

SUFFIXES = (".png", ".svg", ".html")

DOTS_PER_INCH = 144

INK, QUIET, GRID = "#15181c", "#545b65", "#e3e6ea"
COLOURS = (
    "#0b57d0", "#c2410c", "#0f766e", "#8b3fbf", "#b0215f", "#5f6b00", "#0e7490", "#7c4a12",
)  # fmt: skip
"""Colours of lines and points, in this order; all have enough contrast on white."""

_STYLE = {
    "axes.axisbelow": True,
    "axes.edgecolor": QUIET,
    "axes.grid": True,
    "axes.labelcolor": QUIET,
    "axes.prop_cycle": cycler(color=COLOURS),
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": "medium",
    "axes.titleweight": "bold",
    "font.size": 9.5,
    "grid.color": GRID,
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    "text.color": INK,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
}

PAGE = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{title}</title>
<style>body {{ margin: 2rem auto; max-width: 75rem; font-family: sans-serif; }}
svg {{ width: 100%; height: auto; }}</style>
{svg}
</html>
"""


def check_target(path: Path) -> None:
    """Raise if a chart cannot be written to this path, before the work for it is done.

    Raises:
        TrainctlError: The suffix is none of `SUFFIXES`, or there is no such folder.
    """
    if path.suffix.lower() not in SUFFIXES:
        raise TrainctlError(
            f"{path}: a chart is written as {', '.join(SUFFIXES)}",
            hint=f"{path.with_suffix('.png')}",
            exit_code=ExitCode.bad_input,
        )
    if not path.absolute().parent.is_dir():
        raise TrainctlError(
            f"{path}: there is no folder {path.parent}",
            hint=f"mkdir -p {path.parent}",
            exit_code=ExitCode.bad_input,
        )


def save_chart(draw: Callable[[], Figure], path: Path, *, title: str) -> None:
    """Draw in the style that all charts share, and write the figure; see `save_figure`."""
    with rc_context(_STYLE):
        save_figure(draw(), path, title=title)


def save_figure(figure: Figure, path: Path, *, title: str) -> None:
    """Write a figure in the format of the suffix of `path`.

    Args:
        figure: Made without pyplot, so that no global state keeps it.
        path: File to write: .png, .svg or .html (the chart as SVG in a page of its own).

    Raises:
        TrainctlError: Like `check_target`, or the file cannot be written.
    """
    check_target(path)
    suffix = path.suffix.lower()
    data = _png(figure) if suffix == ".png" else _svg(figure)
    if suffix == ".html":
        page = PAGE.format(title=html.escape(title), svg=_element(data))
        data = page.encode()
    try:
        write_bytes(path, data)
    except OSError as error:
        raise TrainctlError(
            f"{path} cannot be written: {error.strerror}", exit_code=ExitCode.bad_input
        ) from error


def _png(figure: Figure) -> bytes:
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=DOTS_PER_INCH, bbox_inches="tight")
    return stream.getvalue()


def _svg(figure: Figure) -> bytes:
    stream = io.BytesIO()
    # No date and no random ids: the same chart gives the same file.
    with rc_context({"svg.hashsalt": "trainctl"}):
        figure.savefig(stream, format="svg", bbox_inches="tight", metadata={"Date": None})
    return stream.getvalue()


def _element(svg: bytes) -> str:
    """Return the svg element without the XML declarations of a file."""
    text = svg.decode()
    return text[text.index("<svg") :]
