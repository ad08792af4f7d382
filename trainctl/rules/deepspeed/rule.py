"""Rules over DeepSpeed's JSON: their type and decorator."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from trainctl.errors import Finding, Severity
from trainctl.rules.deepspeed.case import Case


class Enforcement(StrEnum):
    """DeepSpeed's own reaction to a JSON that breaks a rule."""

    refused = "refuses it"
    silent = "says nothing"
    later = "fails later"


class Problem(NamedTuple):
    """Problem of one key, with a hint at the correct setting."""

    key: str
    message: str
    hint: str = ""


Check = Callable[[Case], Iterator[Problem]]


@dataclass(frozen=True, slots=True)
class Rule:
    """Condition that a JSON must satisfy."""

    identifier: str
    """Stable, such as ``TC221``; never reused."""
    title: str
    """Condition in one line."""
    file: str
    """File of DeepSpeed that enforces the condition, or that behaves unexpectedly."""
    meets: Enforcement
    """DeepSpeed's reaction to a JSON that breaks the rule."""
    fix: str
    """General remedy; the hint of each finding has the concrete values."""
    severity: Severity
    """Whether a finding stops a launch."""
    check: Check
    """Function that yields a problem for each key that breaks the rule."""

    def findings(self, case: Case) -> Iterator[Finding]:
        """Yield the problems of a case as findings of this rule."""
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
    meets: Enforcement = Enforcement.refused,
    warns: bool = False,
) -> Callable[[Check], Rule]:
    """Return a decorator that turns a check into a rule, titled by its docstring's first line."""

    def make(check: Check) -> Rule:
        title = (check.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        severity = Severity.warning if warns else Severity.error
        return Rule(identifier, title, file, meets, fix, severity, check)

    return make
