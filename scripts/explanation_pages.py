"""Pages of docs/troubleshooting/ about rules, with the texts that `trainctl explain` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from trainctl.rules.handbook import JSON_PAGE, PLAN_PAGE, READING_PAGE, Meaning

DOCS = Path(__file__).parents[1] / "docs"
TITLES = {
    PLAN_PAGE: (
        "Rules of the configuration and the plan",
        "What must hold before anything is started.",
    ),
    JSON_PAGE: (
        "Rules of DeepSpeed's JSON",
        "What must hold in a file given to `trainctl validate --deepspeed`, and in the JSON of "
        "every plan.",
    ),
}
"""Title and first line of the pages that are generated from docstrings."""
WRITTEN = "Written by `make docs` from the rules in `trainctl/rules/`; do not edit it by hand."


def pages(rules: Mapping[str, Meaning]) -> dict[Path, str]:
    """Return every page of rules, by its path."""
    texts = {page: f"# {title}\n{WRITTEN}\n\n{about}\n" for page, (title, about) in TITLES.items()}
    by_hand = (DOCS / f"{READING_PAGE}.md").read_text(encoding="utf-8")
    texts[READING_PAGE] = by_hand.partition("\n## ")[0]
    for rule in rules.values():
        texts[rule.page] += "\n" + "\n".join(_section(rule))
    return {DOCS / f"{page}.md": text for page, text in texts.items()}


def _section(rule: Meaning) -> Iterator[str]:
    yield f"## {rule.word}"
    yield f"**{_text(rule.meaning)}**" + (f" ({rule.severity})" if rule.severity else "")
    yield ""
    yield f"*Why.* {_text(rule.cause)}"
    yield ""
    if rule.situation:
        yield f"*Example.* {rule.situation}:"
        yield ""
    for path, text in rule.files.items():
        yield f"`{path}`:"
        yield "```"
        yield text.rstrip("\n")
        yield "```"
        yield ""
    yield "```console" if rule.typed else "```"
    yield from [f"$ {rule.typed}"] if rule.typed else []
    yield from rule.printed
    yield "```"
    yield ""
    yield f"*What to do.* {_text(rule.cure)}"
    yield ""


def _text(text: str) -> str:
    """Convert to Markdown: escape stars, pipes and underscores outside of code."""
    parts = text.split("`")
    for index in range(0, len(parts), 2):
        for mark in "|*_<":
            parts[index] = parts[index].replace(mark, f"\\{mark}")
    return "`".join(parts)
