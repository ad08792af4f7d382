"""What a rule over DeepSpeed's JSON is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from trainctl.errors import Finding, Severity
from trainctl.rules.deepspeed.case import Case


class Meets(StrEnum):
    """What becomes, in DeepSpeed itself, of a JSON that breaks a rule."""

    refused = "refuses it"
    silent = "says nothing"
    later = "fails later"


class Problem(NamedTuple):
    """What is wrong with one key, and what would be right."""

    key: str
    message: str
    hint: str = ""


Check = Callable[[Case], Iterator[Problem]]


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing that a JSON must hold."""

    identifier: str
    """Stable, such as ``TC221``; never reused."""
    title: str
    """What must hold, in a line."""
    file: str
    """The file of DeepSpeed that enforces it, or that does otherwise than one expects."""
    meets: Meets
    """What DeepSpeed does with a JSON that breaks it."""
    fix: str
    """What to do about it in general; each finding says it with the values."""
    severity: Severity
    """Whether a launch stops for it."""
    check: Check
    """Yields a problem for each key that breaks it."""

    def findings(self, case: Case) -> Iterator[Finding]:
        """What is wrong, as findings of this rule."""
        for problem in self.check(case):
            yield Finding(
                rule=self.identifier,
                key=problem.key,
                message=problem.message,
                hint=problem.hint,
                severity=self.severity,
            )


def rule(
    identifier: str,
    *,
    file: str,
    fix: str,
    meets: Meets = Meets.refused,
    warns: bool = False,
) -> Callable[[Check], Rule]:
    """Makes a rule of its check; the first line of the docstring is its title."""

    def make(check: Check) -> Rule:
        title = (check.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        severity = Severity.warning if warns else Severity.error
        return Rule(identifier, title, file, meets, fix, severity, check)

    return make
