"""Every rule, in one list, and the checks of a plan and of a DeepSpeed JSON by them.

Importing `Draft` and `Case` imports their packages, whose modules register their rules.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainctl.errors import Finding
from trainctl.rules.deepspeed.case import Case, JsonContext
from trainctl.rules.deepspeed_schema import Schema, load
from trainctl.rules.plan.draft import Draft
from trainctl.rules.rule import Rule, registered

JSON_RULES: tuple[Rule[Case], ...] = tuple(each for each in registered() if each.file)
PLAN_RULES: tuple[Rule[Draft], ...] = tuple(each for each in registered() if not each.file)
"""Rules by code. Codes are never reused; a rule that is dropped leaves a gap."""


def check_draft(draft: Draft) -> tuple[Finding, ...]:
    """Return the findings on a plan, in the order of the rules.

    A rule never stops the others, so that all problems of a configuration are reported at once.
    """
    return tuple(finding for rule in PLAN_RULES for finding in rule.findings(draft))


def check_case(case: Case) -> tuple[Finding, ...]:
    """Return the findings on a JSON, errors first, otherwise in the order of the rules."""
    found = [finding for rule in JSON_RULES for finding in rule.findings(case)]
    return tuple(sorted(found, key=lambda finding: not finding.is_error))


def check_json(
    json: Mapping[str, Any], around: JsonContext | None = None, schema: Schema | None = None
) -> tuple[Finding, ...]:
    """Return the findings on a DeepSpeed JSON, which name its dotted keys.

    `around` holds the known facts about its use. `schema` belongs to the version of DeepSpeed that
    will read it; the newest known by default.
    """
    return check_case(Case(json, around or JsonContext(), schema or load()))
