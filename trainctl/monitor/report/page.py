"""HTML pages of a report: of runs, and of a folder of runs.

A page is one file that contains style, scripts and data, or asks a server for data. Its content
security policy allows only the scripts and styles in it, by their hashes: a page that contains its
data sends no request.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from trainctl import __version__
from trainctl.errors import ExitCode, TrainctlError
from trainctl.runs.files import write_bytes

SCRIPTS = ("uplot/uPlot.iife.min.js", "page.js")
STYLES = ("uplot/uPlot.min.css", "page.css")


@dataclass(frozen=True, slots=True)
class PageSource:
    """Server that a page gets its data from."""

    url: str
    """Address on the same origin; it answers a document, or 204 if `after` is its version."""
    seconds: float = 2.0
    """Pause between two requests."""


def report_page(
    document: Mapping[str, Any] | None = None, *, title: str, source: PageSource | None = None
) -> str:
    """Return the HTML of a page.

    Args:
        document: Packed document of `trainctl.monitor.report.document`; None if the source has it.
        title: Title until the page has its data.
        source: Server for newer documents while the page is open.
    """
    (uplot, script), (uplot_css, css) = map(_assets, (SCRIPTS, STYLES))
    filled = {
        "title": html.escape(title),
        "version": html.escape(__version__),
        "policy": content_security_policy(has_source=source is not None),
        "uplot_css": uplot_css,
        "css": css,
        "uplot": uplot,
        "script": script,
        "data": "" if document is None else _inline(document),
        "source": "" if source is None else _inline(asdict(source)),
    }
    # In one pass, so that no inserted text is taken for a placeholder.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: filled[found[1]], asset("page.html"))


def content_security_policy(*, has_source: bool) -> str:
    """Return the content security policy, for the page's `meta` element or a server's header."""
    return policy_of(SCRIPTS, STYLES, has_source=has_source)


def policy_of(scripts: tuple[str, ...], styles: tuple[str, ...], *, has_source: bool) -> str:
    """Return the policy of a page with these assets; `has_source` permits asking its server."""
    allowed_scripts, allowed_styles = (
        " ".join(f"'sha256-{_digest(text)}'" for text in _assets(names))
        for names in (scripts, styles)
    )
    connect = "connect-src 'self'; " if has_source else ""
    return (
        f"default-src 'none'; script-src {allowed_scripts}; style-src {allowed_styles}; "
        f"img-src data:; {connect}base-uri 'none'; form-action 'none'"
    )


@cache
def asset(name: str) -> str:
    """Return the text of a file of `trainctl/monitor/report/assets`."""
    return files("trainctl.monitor.report").joinpath("assets", *name.split("/")).read_text("utf-8")


def _assets(names: tuple[str, ...]) -> list[str]:
    return [asset(name) for name in names]


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _inline(value: Any) -> str:
    """Return JSON that cannot end the HTML element that contains it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


FOLDER_SCRIPTS = ("folder.js",)
FOLDER_STYLES = ("page.css", "folder.css")


def folder_page(name: str, seconds: float) -> str:
    """Return the HTML of the page.

    Args:
        seconds: Pause between two requests for newer data.
    """
    filled = {
        "title": html.escape(name),
        "version": html.escape(__version__),
        "policy": folder_policy(),
        "page_css": asset("page.css"),
        "css": asset("folder.css"),
        "script": asset("folder.js"),
        "source": json.dumps({"url": "runs.json", "seconds": seconds}),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: filled[found[1]], asset("folder.html"))


def folder_policy() -> str:
    """Return the content security policy, for the page's `meta` element and the server's header."""
    return policy_of(FOLDER_SCRIPTS, FOLDER_STYLES, has_source=True)


def write_report(path: Path, text: str) -> None:
    """Write a report in any of its forms.

    Raises:
        TrainctlError: The file cannot be written (exit code 4).
    """
    try:
        # Bytes of a path that are not UTF-8 become escapes, which JSON decodes to the same.
        write_bytes(path.absolute(), text.encode(errors="backslashreplace"))
    except OSError as error:
        raise TrainctlError(
            f"{path} cannot be written: {error.strerror}", exit_code=ExitCode.environment
        ) from None
