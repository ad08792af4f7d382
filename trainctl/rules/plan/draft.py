"""Input of the rules of plans: what is known of a plan, and its DeepSpeed JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cached_property
from typing import Any

from trainctl.config.codec import flatten, to_plain, value_at
from trainctl.config.derived import DerivedValue
from trainctl.config.keys import as_written
from trainctl.config.registry import function_of
from trainctl.config.schema import RunConfig
from trainctl.hardware import Hardware
from trainctl.options.engine import engine_of
from trainctl.options.limits import Limit
from trainctl.plans.types import Batch, Batches, Mesh
from trainctl.rules.deepspeed.case import Case
from trainctl.rules.passed_keys import CONFIG_KEYS, plan_json_case
from trainctl.rules.rule import Problem, Rule, RuleExample, register


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
    def settings(self) -> tuple[DerivedValue, ...]:
        """Known settings that trainctl writes for the engine, such as DeepSpeed's JSON."""
        if not engine_of(self.config).settings:
            return ()
        derive = function_of("engine", self.config.engine.kind, "settings")
        made: tuple[DerivedValue, ...] = derive(self.config, self.hardware, self.mesh, self.batch)
        return made

    @cached_property
    def case(self) -> Case:
        """Case of the DeepSpeed JSON, without the keys that the user passes through."""
        return plan_json_case(self.config, self.hardware, self.mesh, self.settings)


def values_outside_limits(
    config: RunConfig, limits: Iterable[Limit]
) -> Iterator[tuple[str, str, Limit]]:
    """Yield key, value as written and limit of each value that is not within its limit.

    Of a mapping, each entry is a key.
    """
    for limit in limits:
        if not limit.holds(config):
            value = to_plain(value_at(config, limit.key))
            inside = flatten(value, f"{limit.key}.") if isinstance(value, dict) else ()
            for key, each in inside or [(limit.key, value)]:
                yield key, as_written(each), limit


def limit_problems(
    config: RunConfig, limits: Iterable[Limit], beside: str, instead: str
) -> Iterator[Problem]:
    """Yield a problem for each value that is not within its limit.

    `beside` is the setting that has the limits, and `instead` the setting without them.
    """
    for key, value, limit in values_outside_limits(config, limits):
        message = f"{key}={value} with {beside}: {limit.why}"
        yield Problem(message, f"{limit.nearest}, or {instead}", key=key)


def json_problems(draft: Draft, rule: Rule[Case]) -> Iterator[Problem]:
    """Yield the problems of a plan's JSON by a rule over JSONs, by keys of the configuration."""
    if not engine_of(draft.config).takes_json:
        return
    key_of = draft.case.names.key
    found = (each._replace(key=key_of(each.key)) for each in rule.problems(draft.case))
    yield from dict.fromkeys(found)  # several JSON keys may map to one config key


def on_json(code: str, rule: Rule[Case], **example: Any) -> Rule[Draft]:
    """Make a rule over JSONs a rule of plans too, with a code and an example of its own."""

    def check(draft: Draft) -> Iterator[Problem]:
        return json_problems(draft, rule)

    check.__doc__ = rule.check.__doc__
    keys = [own for key, own in CONFIG_KEYS.items() if any(fnmatch(key, k) for k in rule.keys)]
    return register(Rule(code, check, tuple(keys), rule.severity, example=RuleExample(**example)))
