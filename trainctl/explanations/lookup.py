"""Lookup of a word: a rule, a kind of record, a cause, a policy, an exit code."""

from __future__ import annotations

import os
import re
import signal
from dataclasses import dataclass, replace
from functools import cache

from trainctl.errors import ExitCode
from trainctl.explanations.causes import FAILURES, INTERVENTIONS, POLICIES, Reason
from trainctl.explanations.exit_codes import EXIT_CODES
from trainctl.explanations.records import RECORDS, Record
from trainctl.explanations.shown import ShownRule, rules

SITE = "TRAINCTL_DOCS_URL"
"""Environment variable with the address of a copy of the documentation's site."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Meaning:
    """Explanation of one word, with its place in the documentation."""

    word: str
    """The word: ``TC024``, ``intervention``, ``device_memory``, ``6``."""
    kind: str
    """Kind of word, such as `RULE` or `EXIT_CODE`."""
    meaning: str
    cause: str = ""
    example: tuple[str, ...] = ()
    """Lines of input and output."""
    cure: str = ""
    """Remedy; empty where none is needed."""
    fields: dict[str, str] | None = None
    """Meaning of each field of a record; None for other kinds."""
    page: str
    """Page of the documentation, without file extension."""

    @property
    def anchor(self) -> str:
        """Anchor of the word on its page."""
        if self.kind != EXIT_CODE:
            return self.word.lower()
        return f"exit-code-{self.word}" if self.word in everything() else "exit-codes"


RULE, RECORD, EXIT_CODE = "rule", "kind of record in events.jsonl", "exit code"
FAILURE, INTERVENTION, POLICY = "cause of a failure", "reason of an intervention", "policy"


@cache
def everything() -> dict[str, Meaning]:
    """Return all meanings by lower-case word, in the order of the list."""
    found = [_of_rule(name, shown) for name, shown in rules().items()]
    found += [_of_record(name, record) for name, record in RECORDS.items()]
    for kind, table in ((FAILURE, FAILURES), (INTERVENTION, INTERVENTIONS), (POLICY, POLICIES)):
        page = "troubleshooting/failures"
        found += [_of_reason(name, kind, reason, page) for name, reason in table.items()]
    page = "troubleshooting/exit-codes"
    for code, reason in EXIT_CODES.items():
        found.append(_of_reason(str(int(code)), EXIT_CODE, reason, page))
    return {each.word.lower(): each for each in found}


def explain(word: str) -> Meaning | None:
    """Return the meaning of a word; None if it is unknown.

    Case does not matter. Exit codes above 128 are explained by their signal.
    """
    known, word = everything(), word.strip().lower()
    if word not in known and re.fullmatch("[0-9]{3}", word) and int(word) > 128:
        return _of_signal(int(word))
    return known.get(word)


def address(found: Meaning) -> str:
    """Return the address of a meaning: on the site named by `TRAINCTL_DOCS_URL`, or in `docs/`."""
    site = os.environ.get(SITE, "").rstrip("/")
    if site:
        return f"{site}/{found.page}.html#{found.anchor}"
    return f"docs/{found.page}.md#{found.anchor}"


def hint_line(words: list[str]) -> str:
    """Return the last line of a message about rules or an exit code: where to read more."""
    command = f"trainctl explain {' '.join(words)}"
    found = explain(words[0])
    if found is None or not os.environ.get(SITE):
        return command
    where = address(found) if len(words) == 1 else address(replace(found, page="rules"))
    return f"{command}, {where.partition('#')[0] if len(words) > 1 else where}"


def _of_rule(name: str, shown: ShownRule) -> Meaning:
    example: list[str] = [f"({shown.situation})"] if shown.situation else []
    for path, text in shown.files.items():
        example.append(f"# {path}")
        example += [f"#   {line}" for line in text.splitlines()]
    example += [f"$ {shown.typed}"] if shown.typed else []
    return Meaning(
        word=name,
        kind=f"{RULE}, {shown.severity}",
        meaning=shown.title,
        cause=shown.cause,
        example=(*example, *shown.printed),
        cure=shown.cure,
        page=shown.page,
    )


def _of_record(name: str, record: Record) -> Meaning:
    return Meaning(
        word=name,
        kind=RECORD,
        meaning=record.when,
        cure=record.cure,
        fields=record.fields,
        page="records",
    )


def _of_reason(word: str, kind: str, reason: Reason, page: str) -> Meaning:
    return Meaning(
        word=word,
        kind=kind,
        meaning=reason.meaning,
        cause=reason.cause,
        example=(reason.example,),
        cure=reason.cure,
        page=page,
    )


def _of_signal(code: int) -> Meaning | None:
    """Return the meaning of an exit code above 128; None if there is no such signal."""
    try:
        name = signal.Signals(code - 128).name
    except ValueError:
        return None
    known = everything()[str(int(ExitCode.interrupted))]
    killed = "A process was ended by it, mostly for memory: `trainctl explain host_memory`."
    return replace(
        known,
        word=str(code),
        meaning=f"Ended by signal {code - 128}, {name}.",
        cause=killed
        if name == "SIGKILL"
        else "128 and the number of the signal, as a shell has it.",
        example=(),
    )
