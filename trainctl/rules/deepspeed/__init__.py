"""Rules over any DeepSpeed JSON: a small function each, with a stable identifier.

They check the JSON and the known facts about its use, and mirror DeepSpeed's behaviour: what it
refuses only after the processes have started, and what it accepts but treats unexpectedly.
`trainctl validate --deepspeed` checks a file by them; a plan's own JSON is checked by them too.
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
from trainctl.rules.deepspeed.case import Case, JsonContext
from trainctl.rules.deepspeed.rule import Enforcement, Problem, Rule
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
    json: Mapping[str, Any], around: JsonContext | None = None, schema: Schema | None = None
) -> tuple[Finding, ...]:
    """Return the findings on a JSON, errors first, otherwise in the order of the rules.

    The keys of findings are dotted keys of `json`. `around` holds the known facts about its use.
    `schema` belongs to the version of DeepSpeed that will read it; the newest known by default.
    """
    return findings(Case(json, around or JsonContext(), schema or load()))


def findings(case: Case) -> tuple[Finding, ...]:
    """Return the findings on a case, errors first, otherwise in the order of the rules."""
    found = [finding for rule in RULES for finding in rule.findings(case)]
    return tuple(sorted(found, key=lambda finding: not finding.is_error))


__all__ = ["RULES", "Case", "Enforcement", "JsonContext", "Problem", "Rule", "check", "findings"]
