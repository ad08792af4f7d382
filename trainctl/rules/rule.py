"""Rules: what must hold of a plan, or of a DeepSpeed JSON.

A rule is one decorated function. The decorator has its code, its keys and an example that breaks
it. The function takes the input, a `Draft` of a plan or a `Case` of a JSON, and yields a `Problem`
for whatever is wrong. The docstring is the text that `trainctl explain` and the site show: what
must hold, why, and after ``Fix:`` what to do.

    @rule("TC006", "parallelism.pipeline", example="recipe=tiny parallelism.pipeline=8")
    def stages_have_layers(draft: Draft) -> Iterator[Problem]:
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Generic, NamedTuple, TypeVar

from trainctl.errors import Finding, Severity

WARNING = Severity.warning
LEFT_OUT = "<left out>"
"""Value of a key of a JSON's example that the JSON does not have."""


class Enforcement(StrEnum):
    """DeepSpeed's own reaction to a JSON that breaks a rule."""

    refused = "refuses it"
    silent = "says nothing"
    later = "fails later"


_REACTIONS = {
    Enforcement.refused: "DeepSpeed refuses it too, once every process has started",
    Enforcement.silent: "DeepSpeed says nothing, and does something else than one expects",
    Enforcement.later: "DeepSpeed takes it, and fails later",
}


class Problem(NamedTuple):
    """Problem of one key, with the nearest legal values."""

    message: str
    hint: str = ""
    key: str = ""
    """Key with the problem; empty for the first key of the rule."""
    severity: Severity | None = None
    """None for the severity of the rule."""


def warning_problem(message: str, hint: str = "", key: str = "") -> Problem:
    """Return a problem that stops nothing, of a rule that also has errors."""
    return Problem(message, hint, key, WARNING)


Input = TypeVar("Input")
Check = Callable[[Input], Iterator[Problem]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleExample:
    """Input that breaks a rule."""

    arguments: str = ""
    """Arguments of `trainctl validate`; empty if no configuration alone breaks the rule."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Files that the arguments need: text by path."""
    json: Mapping[str, Any] = field(default_factory=dict)
    """Values by dotted key of a JSON that is legal otherwise; only of rules over JSONs."""
    around: Any = None
    """`JsonContext` of the JSON, where two CPU processes do not break the rule."""
    situation: str = ""
    """Situation in words, where there are no arguments."""
    message: str = ""
    """Message in that situation, of rules over plans."""


@dataclass(frozen=True, slots=True)
class Rule(Generic[Input]):
    """Condition on a plan or on a DeepSpeed JSON."""

    code: str
    """Stable, such as ``TC221``; never reused."""
    check: Check[Input]
    keys: tuple[str, ...]
    """Keys that the rule reports; ``*`` stands for a part of one."""
    severity: Severity
    """Whether its problems stop a launch, unless one says otherwise."""
    example: RuleExample
    file: str = ""
    """File of DeepSpeed that enforces a rule over JSONs, or that behaves unexpectedly."""
    meets: Enforcement | None = None
    """DeepSpeed's reaction to a JSON that breaks the rule."""

    @property
    def title(self) -> str:
        """Condition of the rule, in one line without a full stop."""
        return self._paragraphs[0].removesuffix(".")

    @property
    def cause(self) -> str:
        """Reason for the rule, and what DeepSpeed does about it."""
        told = [part for part in self._paragraphs[1:] if not part.startswith("Fix: ")]
        if self.meets is not None:
            told.append(f"{_REACTIONS[self.meets]} ({self.file}).")
        return " ".join(told)

    @property
    def fix(self) -> str:
        """General remedy; the hint of each problem has the values."""
        return self._paragraphs[-1].removeprefix("Fix: ")

    @property
    def _paragraphs(self) -> list[str]:
        parts = (self.check.__doc__ or "").strip().split("\n\n")
        return [" ".join(part.split()) for part in parts]

    def problems(self, given: Input) -> Iterator[Problem]:
        """Yield what is wrong, each problem with its key and severity."""
        for each in self.check(given):
            yield each._replace(
                key=each.key or self.keys[0], severity=each.severity or self.severity
            )

    def findings(self, given: Input) -> Iterator[Finding]:
        """Yield what is wrong as findings of this rule."""
        for message, hint, key, severity in self.problems(given):
            assert severity is not None
            yield Finding(rule=self.code, key=key, message=message, hint=hint, severity=severity)


_RULES: dict[str, Rule[Any]] = {}


def register(rule: Rule[Input]) -> Rule[Input]:
    """Add a rule to the registry."""
    assert rule.code not in _RULES, f"{rule.code} twice"
    _RULES[rule.code] = rule
    return rule


def registered() -> list[Rule[Any]]:
    """Return all rules of the modules that have been imported, by their codes."""
    return [_RULES[code] for code in sorted(_RULES)]


def rule(
    code: str,
    *keys: str,
    example: str | Mapping[str, Any] = "",
    severity: Severity = Severity.error,
    refused: str = "",
    silent: str = "",
    later: str = "",
    **more: Any,
) -> Callable[[Check[Input]], Rule[Input]]:
    """Return a decorator that makes a function a rule, and registers it.

    Args:
        keys: Keys that the rule reports; the first is the key of problems that name none.
        example: What breaks the rule: arguments of `trainctl validate`, or values of a JSON.
        refused: For a rule over JSONs, the file of DeepSpeed that refuses one that breaks it.
        silent: The file in its place that does something else than one expects.
        later: The file in its place that fails later.
        more: Other fields of the `RuleExample`.
    """
    given: dict[str, Any] = (
        {"arguments": example} if isinstance(example, str) else {"json": example}
    )
    shown = RuleExample(**given, **more)

    def make(check: Check[Input]) -> Rule[Input]:
        files = zip(Enforcement, (refused, silent, later), strict=True)
        meets, file = next((each for each in files if each[1]), (None, ""))
        return register(Rule(code, check, keys, severity, example=shown, file=file, meets=meets))

    return make
