"""The pages of docs/troubleshooting/ and docs/records.md, from what `trainctl explain` knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from rule_examples import DEEPSPEED, PLAN, READING

from trainctl.explanations.causes import FAILURES, INTERVENTIONS, POLICIES, Reason
from trainctl.explanations.exit_codes import EXIT_CODES
from trainctl.explanations.records import COMMON, RECORDS
from trainctl.explanations.shown import ShownRule

DOCS = Path(__file__).parents[1] / "docs"
WRITTEN = "Written by `make docs` from `trainctl/explanations/`; do not edit it by hand.\n"
TITLES = {
    PLAN: ("Rules of the configuration and the plan", "What must hold before anything is started."),
    READING: (
        "Rules of what is read, of this machine and of hosts",
        "What is found while files, directories, devices and hosts are looked at.",
    ),
    DEEPSPEED: (
        "Rules of DeepSpeed's JSON",
        "What must hold in a file given to `trainctl validate --deepspeed`, and in the JSON of "
        "every "
        "plan.",
    ),
}
EXITS = """\
# Exit codes
{written}
The code says what kind of end it was; the last lines on stderr say which. `trainctl explain 75`
prints the same.
"""
FAILED = """\
# Why runs fail, and why steps are not made
{written}
A run that fails writes a `failure` record, a step that is not made an `intervention`
([records](../records.md)). Their words are these; `trainctl explain device_memory` prints the same.
"""
RECORDS_PAGE = """\
# Run records (events.jsonl)
{written}
`events.jsonl` in a run's directory has an object a line: what happened, in the order in which it
was written. Programs may read it while the run goes on; a line that a killed process cut off is to
be skipped. NaN and infinities are the strings `"NaN"`, `"Infinity"` and `"-Infinity"`. Fields that
a kind has only in some runs say when. `trainctl runs logs`, `trainctl runs attach` and
`trainctl explain intervention` are for people.

Every record has

| field | what it says |
|---|---|
{common}
"""


def pages(rules: Mapping[str, ShownRule]) -> dict[Path, str]:
    """Every page, by its path."""
    texts = {page: _rules(page, rules) for page in TITLES}
    texts["troubleshooting/exit-codes"] = EXITS.format(written=WRITTEN)
    for code, reason in EXIT_CODES.items():
        texts["troubleshooting/exit-codes"] += _reason(f"Exit code {int(code)}", reason)
    texts["troubleshooting/failures"] = _failures()
    texts["records"] = _records()
    return {DOCS / f"{page}.md": text for page, text in texts.items()}


def _rules(page: str, rules: Mapping[str, ShownRule]) -> str:
    title, about = TITLES[page]
    parts = [f"# {title}\n{WRITTEN}\n{about}\n"]
    parts += ["\n".join(_rule(name, each)) for name, each in rules.items() if each.page == page]
    return "\n".join(parts)


def _rule(name: str, rule: ShownRule) -> Iterator[str]:
    yield f"## {name}"
    kind = f" ({rule.severity})" if rule.severity else ""
    yield f"**{_text(rule.title)}**{kind}"
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


def _failures() -> str:
    tables = {
        "Causes of failures": FAILURES,
        "Reasons of interventions": INTERVENTIONS,
        "What is done about a step": POLICIES,
    }
    text = FAILED.format(written=WRITTEN)
    for title, table in tables.items():
        text += f"\n## {title}\n"
        text += "".join(_reason(name, reason, depth=3) for name, reason in table.items())
    return text


def _reason(word: str, reason: Reason, *, depth: int = 2) -> str:
    return (
        f"\n{'#' * depth} {word}\n**{_text(reason.meaning)}**\n\n*Cause.* {_text(reason.cause)}\n\n"
        f"```\n{reason.example}\n```\n\n*What to do.* {_text(reason.cure)}\n"
    )


def _records() -> str:
    text = RECORDS_PAGE.format(written=WRITTEN, common="\n".join(_table(COMMON)))
    for name, record in RECORDS.items():
        text += f"\n## {name}\n{_text(record.when)}\n\n| field | what it says |\n|---|---|\n"
        text += "\n".join(_table(record.fields)) + "\n"
        if record.cure:
            text += f"\n*What to do.* {_text(record.cure)}\n"
    return text


def _table(fields: Mapping[str, str]) -> Iterator[str]:
    for name, meaning in fields.items():
        yield f"| `{name}` | {_text(meaning)} |"


def _text(text: str) -> str:
    """As Markdown: stars, pipes and underscores outside of code are themselves."""
    parts = text.split("`")
    for index in range(0, len(parts), 2):
        for mark in "|*_<":
            parts[index] = parts[index].replace(mark, f"\\{mark}")
    return "`".join(parts)
