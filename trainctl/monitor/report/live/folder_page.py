"""The page of a folder of runs: a table, and parallel coordinates of the settings and results."""

from __future__ import annotations

import html
import json
import re

from trainctl import __version__
from trainctl.monitor.report.page import asset, policy_of

SCRIPTS = ("folder.js",)
STYLES = ("page.css", "folder.css")


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
    return policy_of(SCRIPTS, STYLES, has_source=True)
