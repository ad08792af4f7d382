"""The site of the documentation builds without a warning, and its links lead somewhere.

And what the tutorial says to type does what it says.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag

import pytest
from browser import browser
from small_recipe import write_small_tiny

ROOT = Path(__file__).parents[1]
TUTORIAL = ROOT / "docs" / "tutorial.md"
BLOCK = re.compile(r"<!-- tutorial -->\n```console\n(.*?)```", re.DOTALL)

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built site; warnings are errors."""
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    done = subprocess.run([*build, "docs", folder], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


class Page(HTMLParser):
    """HTML page's link targets and links."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.places: set[str] = {""}
        self.links: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        """Called for each tag."""
        found = dict(attributes)
        self.places.add(found.get("id") or "")
        self.links |= {found.get(name) or "" for name in ("href", "src") if name in found}


def test_every_link_leads_somewhere_and_to_no_other_host(site: Path) -> None:
    pages = {path: Page(path.read_text()) for path in site.rglob("*.html")}
    assert len(pages) > 60
    for path, page in pages.items():
        for link in page.links:
            if re.match("(https?|mailto|data):", link):
                continue
            name, place = urldefrag(unquote(link))
            name = name.partition("?")[0]  # which a script's version follows
            target = (path.parent / name).resolve() if name else path
            assert target.exists(), f"{path.name}: {link}"
            if place and target in pages:
                assert place in pages[target].places, f"{path.name}: {link}"


def test_every_page_is_in_the_navigation(site: Path) -> None:
    index = (site / "index.html").read_text()
    for part in ("Tutorial", "How-to", "Explanation", "Reference"):
        assert f'<span class="caption-text">{part}</span>' in index


def test_pages_can_be_read_by_everyone_and_ask_nobody(site: Path) -> None:
    """Opened from disk in a real browser, in light and in dark."""
    with browser() as window:
        for page in ("index", "tutorial", "troubleshooting/failures", "cli"):
            window.open((site / f"{page}.html").as_uri())
            for scheme in ("light", "dark"):
                window.emulate(prefers_color_scheme=scheme)
                assert not window.faults(), (page, scheme)
        assert all(url.startswith(("file:", "data:")) for url in window.requests())
        window.open((site / "search.html").as_uri() + "?q=TC150")
        window.wait("return document.querySelectorAll('#search-results li').length > 0")


@pytest.mark.usefixtures("preloaded")
def test_the_tutorials_commands_run_in_their_order(tmp_path: Path) -> None:
    """With a recipe `tiny` that takes seconds."""
    write_small_tiny(tmp_path)
    commands = [
        line[2:]
        for block in BLOCK.findall(TUTORIAL.read_text())
        for line in block.splitlines()
        if line.startswith("$ ")
    ]
    assert len(commands) > 8
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    for command in commands:
        expected = re.search(r"# exit (\d+)$", command)
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            capture_output=True,
            text=True,
        )
        assert done.returncode == int(expected[1] if expected else 0), (command, done.stderr)
    assert (tmp_path / "first-model" / "config.json").is_file()
