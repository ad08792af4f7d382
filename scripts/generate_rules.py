"""Write docs/rules.md and the pages of rules in docs/troubleshooting/; `--check` only compares.

With `--all` every rule's example is run again, not only the changed ones; that takes half a minute.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from explanation_pages import pages
from rule_examples import meanings

from trainctl.rules.deepspeed_schema import load
from trainctl.rules.handbook import JSON_PAGE, PLAN_PAGE, READING_PAGE, Meaning
from trainctl.rules.resolve import JSON_RULES, PLAN_RULES

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "docs" / "rules.md"
MATRIX = ROOT / "tests" / "rules" / "deepspeed" / "confusion_matrix.json"
INTRODUCTION = """\
# Configuration checks
Written by `make docs` from the rules themselves; do not edit it by hand.

Every finding names its rule, and each rule has a place with its cause, an example and the cure,
which `trainctl explain TC024` prints too. `TC0xx` and `TC3xx` look at trainctl's configuration, its
data and the plan made of it, `TC1xx` at how it is written and at this machine, `TC2xx` and TC431 to
TC434 at DeepSpeed's own JSON: a file given to `trainctl validate --deepspeed`, and the JSON of
every plan, with what `deepspeed.*` passes through.
"""

COLUMNS = {
    "runs, passed": ("runs it", "passes it"),
    "trap, refused": ("runs it, not as one expects", "refuses it"),
    "refused, refused": ("refuses it", "refuses it"),
    "refused, passed": ("refuses it", "passes it"),
    "runs, refused": ("runs it", "refuses it"),
}


def page(rules: Mapping[str, Meaning]) -> str:
    """Return the page of tables as Markdown."""
    parts = [
        INTRODUCTION,
        "## The configuration and the plan\n| rule | what must hold | keys |\n|---|---|---|",
        "\n".join(_plan_rows()),
        "\n## While reading, and on this machine\n| rule | what is found |\n|---|---|",
        "\n".join(_rows(rules, READING_PAGE)),
        "",
        "\n".join(_deepspeed()),
        "",
        "\n".join(_comparison()),
    ]
    return "\n".join(parts) + "\n"


def _deepspeed() -> Iterator[str]:
    yield f"## DeepSpeed's JSON, version {load().deepspeed}"
    yield "*DeepSpeed* says what DeepSpeed itself does with a JSON that breaks the rule, once the"
    yield "processes run: it refuses it, says nothing and does something else, or fails later."
    yield "The file is DeepSpeed's."
    yield ""
    yield "| rule | severity | what must hold | DeepSpeed | file | what to do |"
    yield "|---|---|---|---|---|---|"
    for rule in JSON_RULES:
        cells = (
            rule.code,
            rule.severity,
            f"[{rule.title}]({JSON_PAGE}.md#{rule.code.lower()})",
            rule.meets,
            f"`{rule.file}`",
            rule.fix,
        )
        yield "| " + " | ".join(_cell(str(cell)) for cell in cells) + " |"


def _comparison() -> Iterator[str]:
    recorded = json.loads(MATRIX.read_text(encoding="utf-8"))
    yield "## How it compares with the real DeepSpeed"
    yield f"{recorded['cases']} JSONs drawn from the schema by a seed, about half of them legal,"
    yield "each checked, then given to `deepspeed.initialize` and one step on two CPU processes:"
    yield ""
    yield "| DeepSpeed | trainctl | JSONs |"
    yield "|---|---|---|"
    for kind, (theirs, ours) in COLUMNS.items():
        yield f"| {theirs} | {ours} | {recorded.get(kind, 0)} |"
    yield ""
    yield "The tests hold the last two rows at 0, on this seed and others. What DeepSpeed accepts"
    yield "and trainctl refuses breaks a rule of the table above where DeepSpeed says nothing or"
    yield "fails later; and Hjson without quotes or commas is refused (TC200). Not drawn are"
    yield "settings that two CPU processes cannot show: GPU kernels, NVMe, real models, services."


def _plan_rows() -> Iterator[str]:
    for rule in PLAN_RULES:
        keys = ", ".join(f"`{key}`" for key in rule.keys if key != "*") or "any"
        title = f"[{_cell(rule.title)}]({PLAN_PAGE}.md#{rule.code.lower()})"
        yield f"| {rule.code} | {title} | {keys} |"


def _rows(rules: Mapping[str, Meaning], page: str) -> Iterator[str]:
    for name, rule in rules.items():
        if rule.page == page:
            yield f"| {name} | [{_cell(rule.meaning)}]({page}.md#{name.lower()}) |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def main(arguments: list[str]) -> int:
    """Write the pages, or with `--check` report whether they are up to date."""
    explanations = meanings(all_again="--all" in arguments)
    written = {TARGET: page(explanations), **pages(explanations)}
    stale = [path for path, text in written.items() if not _is(path, text)]
    if "--check" in arguments:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is out of date: run `make docs`", file=sys.stderr)
        return 1 if stale else 0
    for path in stale:
        path.parent.mkdir(exist_ok=True)
        path.write_text(written[path], encoding="utf-8")
    return 0


def _is(path: Path, text: str) -> bool:
    return path.is_file() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
