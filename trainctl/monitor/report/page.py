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
from trainctl.errors import MachineError
from trainctl.runs.files import write_bytes


@dataclass(frozen=True, slots=True)
class PageSource:
    """Server that a page gets its data from."""

    url: str
    """Address on the same origin; it answers a document, or 204 if `after` is its version."""
    seconds: float = 2.0
    """Pause between two requests."""


@dataclass(frozen=True, slots=True)
class Page:
    """Files of `trainctl/monitor/report/assets` that make up a page, within `shell.html`."""

    body: str
    scripts: tuple[str, ...]
    styles: tuple[str, ...]

    def html(
        self,
        document: Mapping[str, Any] | None = None,
        *,
        title: str,
        source: PageSource | None = None,
    ) -> str:
        """Return the HTML of the page.

        Args:
            document: Data of the page, as its server answers; None if the source has it.
            title: Title until the page has its data.
            source: Server for newer documents while the page is open.
        """
        filled = {
            "title": html.escape(title),
            "version": html.escape(__version__),
            "policy": self.policy(has_source=source is not None),
            "styles": "\n".join(f"<style>{asset(name)}</style>" for name in self.styles),
            "scripts": "\n".join(f"<script>{asset(name)}</script>" for name in self.scripts),
            "data": "" if document is None else _inline(document),
            "source": "" if source is None else _inline(asdict(source)),
        }
        template = asset("shell.html").replace("{{body}}", asset(self.body))
        # In one pass, so that no inserted text is taken for a placeholder.
        return re.sub(r"\{\{(\w+)\}\}", lambda found: filled[found[1]], template)

    def policy(self, *, has_source: bool) -> str:
        """Return the content security policy, for the `meta` element or a server's header.

        Args:
            has_source: Permit requests to the page's server.
        """
        scripts, styles = (
            " ".join(f"'sha256-{_digest(asset(name))}'" for name in names)
            for names in (self.scripts, self.styles)
        )
        connect = "connect-src 'self'; " if has_source else ""
        return (
            f"default-src 'none'; script-src {scripts}; style-src {styles}; "
            f"img-src data:; {connect}base-uri 'none'; form-action 'none'"
        )


RUNS_PAGE = Page(
    "page.html",
    scripts=("uplot/uPlot.iife.min.js", "shared.js", "page.js"),
    styles=("uplot/uPlot.min.css", "page.css"),
)
"""Page of some runs, for packed documents of `trainctl.monitor.report.document`."""

FOLDER_PAGE = Page(
    "folder.html", scripts=("shared.js", "folder.js"), styles=("page.css", "folder.css")
)
"""Page of a folder of runs, for documents of `trainctl.monitor.report.runs_folder`."""


@cache
def asset(name: str) -> str:
    """Return the text of a file of `trainctl/monitor/report/assets`."""
    return files("trainctl.monitor.report").joinpath("assets", *name.split("/")).read_text("utf-8")


def _digest(text: str) -> str:
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _inline(value: Any) -> str:
    """Return JSON that cannot end the HTML element that contains it."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def write_report(path: Path, text: str) -> None:
    """Write a report in any of its forms.

    Raises:
        TrainctlError: The file cannot be written (exit code 4).
    """
    try:
        # Bytes of a path that are not UTF-8 become escapes, which JSON decodes to the same.
        write_bytes(path.absolute(), text.encode(errors="backslashreplace"))
    except OSError as error:
        raise MachineError(f"{path} cannot be written: {error.strerror}") from None
