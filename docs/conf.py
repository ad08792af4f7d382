"""Sphinx's configuration of the site: `make docs-site` builds it without a network.

The pages are plain Markdown that reads well where it lies. What only a site needs is added here:
each section of index.md becomes a part of the navigation, in the order of its links.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from trainctl import __version__

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from generate_coming_from import whole_tables

project = "trainctl"
author = "The trainctl developers"
project_copyright = author
release = version = __version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 4
"""Depth to which headings can be linked to, by the names that GitHub gives them."""
exclude_patterns = ["conf.py"]
suppress_warnings = ["myst.header"]
"""A page may begin a part two levels down."""

html_theme = "furo"
html_title = f"trainctl {release}"
html_copy_source = False
html_show_sphinx = False
html_theme_options = {"top_of_page_buttons": [], "footer_icons": []}
pygments_style = "a11y-high-contrast-light"
pygments_dark_style = "a11y-high-contrast-dark"

LINK = re.compile(r"\]\(([\w/.-]+)\.md\)")
"""A link to a whole page."""
REPLACED = (
    ("<pre>", '<pre tabindex="0">'),
    ('<div class="table-wrapper', '<div tabindex="0" class="table-wrapper'),
    ('role="heading"', 'role="heading" aria-level="2"'),
)
"""Of the HTML, and by what."""


def navigation(index: str) -> str:
    """Of each section of index.md the pages that it names, as a part of the navigation."""
    parts = []
    for section in index.split("\n## ")[1:]:
        title, _, text = section.partition("\n")
        pages = dict.fromkeys(LINK.findall(text))
        lines = [f"```{{toctree}}\n:hidden:\n:caption: {title}\n", *pages, "```"]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _add_navigation(app: Any, page: str, source: list[str]) -> None:
    if page == "index":
        source[0] += f"\n{navigation(source[0])}\n"
    elif page == "imported-keys":
        source[0] += f"\n{whole_tables()}\n"
    elif page == "decisions/index":
        source[0] += "\n```{toctree}\n:glob:\n:maxdepth: 1\n\n0*\n```\n"


def _open_to_everyone(
    app: Any, page: str, template: str, context: dict[str, Any], tree: Any
) -> None:
    """What scrolls is reached by keyboard, and headings of the navigation have a level."""
    for name, ours in REPLACED:
        for part in ("body", "furo_navigation_tree"):
            context[part] = (context.get(part) or "").replace(name, ours)


def setup(app: Any) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _add_navigation)
    app.connect("html-page-context", _open_to_everyone, priority=900)  # after the theme's own
