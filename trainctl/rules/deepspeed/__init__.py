"""Rules over DeepSpeed's JSON, whoever wrote it: a small function each, with a stable identifier.

They look at the JSON and what is known about where it will be used, and mirror what DeepSpeed does
with it: what it refuses, when a process has long started, and what it accepts and then does
otherwise than one expects. `trainctl validate --deepspeed` checks a file by them; a plan's own JSON
goes through them too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainctl.errors import Finding
from trainctl.rules.deepspeed import (
    batch,
    engine,
    keys,
    offload,
    optimizer,
    precision,
    schedule,
    zero,
)
from trainctl.rules.deepspeed.case import Case, Surroundings
from trainctl.rules.deepspeed.rule import Meets, Problem, Rule
from trainctl.rules.deepspeed_schema import Schema, load

_MODULES = (batch, engine, keys, offload, optimizer, precision, schedule, zero)
RULES: tuple[Rule, ...] = tuple(
    sorted(
        (each for module in _MODULES for each in vars(module).values() if isinstance(each, Rule)),
        key=lambda rule: rule.identifier,
    )
)
"""Every rule, by identifier; identifiers are never reused."""


def check(
    json: Mapping[str, Any], around: Surroundings | None = None, schema: Schema | None = None
) -> tuple[Finding, ...]:
    """What is wrong with a JSON, errors first, else in the order of the rules.

    Args:
        json: As read; the keys of findings are its dotted keys.
        around: What is known about where it will be used.
        schema: Of the version of DeepSpeed that will read it; the newest known by default.
    """
    return findings(Case(json, around or Surroundings(), schema or load()))


def findings(case: Case) -> tuple[Finding, ...]:
    """What is wrong with a case, in the same order."""
    found = [finding for rule in RULES for finding in rule.findings(case)]
    return tuple(sorted(found, key=lambda finding: not finding.is_error))


__all__ = ["RULES", "Case", "Meets", "Problem", "Rule", "Surroundings", "check", "findings"]
