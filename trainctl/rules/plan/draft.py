"""Input and output of the plan rules: the draft plan, and helpers to make findings."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from trainctl.config.derived import Derived
from trainctl.config.registry import function_of
from trainctl.config.schema import RunConfig
from trainctl.errors import Finding, Severity
from trainctl.hardware import Hardware
from trainctl.options.engine import engine_of
from trainctl.plan.batches import Batch, Batches
from trainctl.plan.nearest import choices as choices
from trainctl.plan.nearest import nearest_divisors as nearest_divisors
from trainctl.plan.nearest import nearest_multiples as nearest_multiples
from trainctl.plan.types import Mesh
from trainctl.rules import deepspeed as deepspeed_rules
from trainctl.rules.deepspeed_overrides import plan_json_case


@dataclass(frozen=True, kw_only=True)
class Draft:
    """Incomplete plan; ``None`` for values that could not be derived."""

    config: RunConfig
    hardware: Hardware
    mesh: Mesh | None
    batch: Batch | None
    batches: Batches | None
    total_steps: int | None

    @cached_property
    def settings(self) -> tuple[Derived, ...]:
        """Known settings that trainctl writes for the engine, such as DeepSpeed's JSON."""
        if not engine_of(self.config).settings:
            return ()
        derive = function_of("engine", self.config.engine.kind, "settings")
        made: tuple[Derived, ...] = derive(self.config, self.hardware, self.mesh, self.batch)
        return made

    @cached_property
    def case(self) -> deepspeed_rules.Case:
        """Case of the DeepSpeed JSON, without the keys that the user passes through."""
        return plan_json_case(self.config, self.hardware, self.mesh, self.settings)


Rule = Callable[[Draft], Iterator[Finding]]


def on_json(rule: deepspeed_rules.Rule) -> Rule:
    """Convert a rule over DeepSpeed's JSON to a plan rule that reports the user's config keys."""

    def told(draft: Draft) -> Iterator[Finding]:
        if not engine_of(draft.config).takes_json:
            return
        names = draft.case.names
        found = (replace(each, key=names.key(each.key)) for each in rule.findings(draft.case))
        yield from dict.fromkeys(found)  # several JSON keys may map to one config key

    told.__doc__ = rule.check.__doc__
    return told


def error(key: str, message: str, hint: str = "") -> Finding:
    """Return a finding that stops a launch; `check` fills in the rule's identifier."""
    return Finding(rule="", key=key, message=message, hint=hint)


def warning(key: str, message: str, hint: str = "") -> Finding:
    """Return a finding that is printed and recorded; `check` fills in the rule's identifier."""
    return Finding(rule="", key=key, message=message, hint=hint, severity=Severity.warning)
