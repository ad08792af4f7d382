"""Explanations of rules, records, causes of failures and exit codes, read from the documentation.

Pages of `docs/` are their only place; the wheel carries them, and `trainctl explain` prints them.
The pages on the rules of a plan and of DeepSpeed's JSON are made of the rules' docstrings by
`make docs`; the others are written by hand.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from trainctl.config.suggest import did_you_mean, nearest_names
from trainctl.errors import TrainctlError

SITE = "TRAINCTL_DOCS_URL"
"""Environment variable with the address of a copy of the documentation's site."""

RULE, RECORD, EXIT_CODE = "rule", "kind of record", "exit code"
FAILURE, INTERVENTION, POLICY = "cause of a failure", "reason of an intervention", "policy"

PLAN_PAGE, READING_PAGE, JSON_PAGE, FAILURES, EXIT_CODES = (
    f"troubleshooting/{name}"
    for name in (
        "rules-of-the-plan",
        "rules-of-reading",
        "deepspeed-json",
        "failures",
        "exit-codes",
    )
)
PAGES = (PLAN_PAGE, READING_PAGE, JSON_PAGE, "records", FAILURES, EXIT_CODES)
"""Pages with explanations, without file extension, in the order of their lists."""

_KINDS = {
    "records": RECORD,
    EXIT_CODES: EXIT_CODE,
    "Causes of failures": FAILURE,
    "Reasons of interventions": INTERVENTION,
    "What is done about a step": POLICY,
}
"""Kind of the words of a page, or of a part of one; the others are of rules."""

_HEADING = re.compile(r"^(##+) (?:Exit code )?(.+)$", re.MULTILINE)
_BLOCK = re.compile(r"^```\w*\n(.*?)^```$|^(\S.*?)(?=\n\n|\n```|\n?\Z)", re.DOTALL | re.MULTILINE)
_TITLE = re.compile(r"\*\*(.+?)\*\*(?: \((.+)\))?")
_ITEM = re.compile(r"- (`\w+`(?:, `\w+`)*)(?:: (.*))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """Explanation of one word, with its place in the documentation."""

    word: str
    """The word: ``TC024``, ``intervention``, ``device_memory``, ``6``."""
    kind: str
    """Kind of word, such as `RULE` or `EXIT_CODE`."""
    page: str
    """Page of the documentation, without file extension."""
    meaning: str
    severity: str = ""
    """``error`` or ``warning`` for a rule whose example has been run; empty otherwise."""
    cause: str = ""
    situation: str = ""
    """Situation in which the lines of `printed` are printed; empty if a command brings it about."""
    files: dict[str, str] = field(default_factory=dict)
    """Files that the example needs: text by path, cut if long."""
    typed: str = ""
    """The example's command; empty without one."""
    printed: tuple[str, ...] = ()
    """Lines that the example prints, or that a log shows."""
    cure: str = ""
    """Remedy; empty where none is needed."""
    fields: dict[str, str] | None = None
    """Meaning of each field of a record; None for other kinds."""
    heading: str = ""
    """Heading above the word on its page, if it is not the word itself."""

    @property
    def anchor(self) -> str:
        """Anchor of the word on its page."""
        if self.heading:
            return re.sub(r"[^\w -]", "", self.heading.lower()).replace(" ", "-")
        if self.kind != EXIT_CODE:
            return self.word.lower()
        return f"exit-code-{self.word}" if self.word in _sections_by_word() else "exit-codes"

    @property
    def example(self) -> tuple[str, ...]:
        """Lines of the example: situation, files, command and output."""
        lines = [f"({self.situation})"] if self.situation else []
        for path, text in self.files.items():
            lines += [f"# {path}", *(f"#   {line}" for line in text.splitlines())]
        lines += [f"$ {self.typed}"] if self.typed else []
        return (*lines, *self.printed)


def known_words() -> list[str]:
    """Return all words that are explained: rules by identifier, then the words of each page."""
    return [section.word for section in _sections_by_word().values()]


_COMMON_WORDS = ("exit", "code", "event", "rule")


def explain(word: str) -> Meaning | None:
    """Return the meaning of a word; None if it is unknown.

    Case does not matter. Exit codes above 128 are explained by their signal.
    """
    known, word = _sections_by_word(), word.strip().lower()
    if word in known:
        return _section_meaning(known[word])
    is_signal = re.fullmatch("[0-9]{3}", word) and int(word) > 128
    return _signal_meaning(int(word)) if is_signal else None


def all_meanings() -> list[Meaning]:
    """Return all meanings, in the order of `known_words`."""
    return [_section_meaning(section) for section in _sections_by_word().values()]


def find_meanings(words: Sequence[str]) -> list[Meaning]:
    """Return the meaning of each word; all meanings if no word is given.

    Raises:
        TrainctlError: A word is unknown; the error names the nearest.
    """
    if not words:
        return all_meanings()
    # Accept the phrase `exit code 75`; `code` alone names a cause of failures.
    has_code = any(word.isdigit() for word in words)
    said = [word for word in words if not (has_code and word.lower() in _COMMON_WORDS)]
    return [_find_meaning(word) for word in said]


def _find_meaning(word: str) -> Meaning:
    found = explain(word)
    if found is None:
        known = known_words()
        number = re.fullmatch(r"(?:TC)?0*(\d{1,3})", word, re.IGNORECASE)
        rule = f"TC{int(number[1]):03}" if number else ""
        hint = did_you_mean([rule] if rule in known else nearest_names(word, known))
        raise TrainctlError(
            f"there is no rule, record, cause, exit code, key or page of {word!r}",
            hint=hint or "`trainctl explain` lists all",
        )
    return found


def page_address(found: Meaning) -> str:
    """Return the address of a meaning: on the site named by `TRAINCTL_DOCS_URL`, or in `docs/`."""
    site = os.environ.get(SITE, "").rstrip("/")
    if site:
        return f"{site}/{found.page}.html#{found.anchor}"
    return f"docs/{found.page}.md#{found.anchor}"


def hint_line(words: list[str]) -> str:
    """Return the last line of a message about rules or an exit code: where to read more."""
    command = f"trainctl explain {' '.join(words)}"
    found = explain(words[0]) if os.environ.get(SITE) else None
    if found is None:
        return command
    where = page_address(found) if len(words) == 1 else page_address(replace(found, page="rules"))
    return f"{command}, {where.partition('#')[0] if len(words) > 1 else where}"


def docs_folder() -> Path:
    """Return the folder of the pages: in the package, else in the repository."""
    package = Path(__file__).parents[1]
    inside = package / "_shipped" / "docs"
    return inside if inside.is_dir() else package.parent / "docs"


@dataclass(frozen=True, slots=True)
class _Section:
    word: str
    kind: str
    page: str
    text: str


@cache
def _sections_by_word() -> dict[str, _Section]:
    found = [section for page in PAGES for section in _page_sections(page)]
    rules = sorted((each for each in found if each.kind == RULE), key=lambda each: each.word)
    others = [each for each in found if each.kind != RULE]
    return {each.word.lower(): each for each in (*rules, *others)}


def _page_sections(page: str) -> Iterator[_Section]:
    text = (docs_folder() / f"{page}.md").read_text(encoding="utf-8")
    headings = list(_HEADING.finditer(text))
    ends = [each.start() for each in headings[1:]] + [len(text)]
    kind = _KINDS.get(page, RULE)
    for heading, end in zip(headings, ends, strict=True):
        if heading[2] in _KINDS:
            kind = _KINDS[heading[2]]
        else:
            yield _Section(heading[2], kind, page, text[heading.end() : end])


def _section_meaning(section: _Section) -> Meaning:
    found = Meaning(word=section.word, kind=section.kind, page=section.page, meaning="")
    path = ""
    for block in _BLOCK.finditer(section.text):
        code, prose = block.groups()
        label, _, rest = (prose or "").partition(".* ")
        if code is not None and path:
            found, path = replace(found, files={**found.files, path: code}), ""
        elif code is not None:
            lines = code.splitlines()
            typed = lines.pop(0).removeprefix("$ ") if lines[0].startswith("$ ") else ""
            found = replace(found, typed=typed, printed=tuple(lines))
        elif title := _TITLE.fullmatch(prose):
            found = replace(found, meaning=plain_text(title[1]), severity=title[2] or "")
        elif name := re.fullmatch("`([^`]+)`:", prose):
            path = name[1]
        elif label in ("*Why", "*Cause"):
            found = replace(found, cause=plain_text(rest))
        elif label == "*Example":
            found = replace(found, situation=rest.removesuffix(":"))
        elif label == "*What to do":
            found = replace(found, cure=plain_text(rest))
        elif prose.startswith("- `"):
            found = replace(found, fields=_listed_fields(prose.splitlines()))
        else:
            found = replace(found, meaning=plain_text(prose))
    return replace(found, kind=f"{RULE}, {found.severity}") if found.kind == RULE else found


def _listed_fields(lines: Iterable[str]) -> dict[str, str]:
    """Return the fields that a list names, several of them in an item, with their meaning."""
    items = filter(None, map(_ITEM.fullmatch, lines))
    return {
        name: plain_text(item[2] or "") for item in items for name in re.findall(r"\w+", item[1])
    }


def plain_text(text: str) -> str:
    """Return Markdown as text in one line: only code keeps its backslashes."""
    parts = " ".join(text.split("\n")).split("`")
    parts[::2] = [re.sub(r"\\([|*_<])", r"\1", part) for part in parts[::2]]
    return "`".join(parts)


def _signal_meaning(code: int) -> Meaning | None:
    """Return the meaning of an exit code above 128; None if there is no such signal."""
    try:
        name = signal.Signals(code - 128).name
    except ValueError:
        return None
    cause = "128 and the number of the signal, as a shell has it."
    if name == "SIGKILL":
        cause = "A process was ended by it, mostly for memory: `trainctl explain host_memory`."
    return replace(
        _section_meaning(_sections_by_word()["130"]),
        word=str(code),
        meaning=f"Ended by signal {code - 128}, {name}.",
        cause=cause,
        printed=(),
    )
