"""The page of a folder of runs: a table, and each run as a line over what was set."""

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
        seconds: Between two questions for newer data.
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
    """What the page may do, for its `meta` element and the server's header."""
    return policy_of(SCRIPTS, STYLES, has_source=True)
