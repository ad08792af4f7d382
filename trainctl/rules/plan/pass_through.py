"""Rules about the `deepspeed` section: keys of DeepSpeed's own JSON, passed through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainctl.config.derived import Derived
from trainctl.errors import Finding
from trainctl.plan.deepspeed import flatten
from trainctl.rules.deepspeed import Case, keys
from trainctl.rules.deepspeed_overrides import overlap
from trainctl.rules.passed_keys import PASS_THROUGH_KEYS, canonical, entry_of, idle_reason, owner_of
from trainctl.rules.plan.draft import Draft, error

KEY_RULES = (
    keys.removed_keys_are_gone,
    keys.checked_sections_hold_known_keys,
    keys.other_sections_hold_known_keys,
    keys.keys_of_other_programs_are_known,
)
"""Rules about the keys of any JSON, which have an identifier of their own here."""


def pass_through_keys_exist(draft: Draft) -> Iterator[Finding]:
    """The rules over keys of any JSON; an unknown one at the top DeepSpeed ignores silently."""
    case = Case(draft.config.deepspeed)
    for rule in KEY_RULES:
        for problem in rule.check(case):
            yield error(f"deepspeed.{problem.key}", problem.message, problem.hint)


def pass_through_has_no_auto(draft: Draft) -> Iterator[Finding]:
    """DeepSpeed drops a nested "auto" silently, and stumbles over one at the top."""
    for key, value in flatten(draft.config.deepspeed):
        if value == "auto":
            yield error(
                f"deepspeed.{key}",
                f'deepspeed.{key} is "auto", which only other tools fill in',
                "give the value, or leave the key out: trainctl derives what it can",
            )


def pass_through_agrees(draft: Draft) -> Iterator[Finding]:
    """The section adds to what trainctl derives; it does not contradict it."""
    found: dict[str, Finding] = {}
    for key, value in flatten(draft.config.deepspeed):
        entry, owner, name = entry_of(key), owner_of(key, draft.config), canonical(key)
        overlapping = (each for each in draft.settings if overlap(name, each.key))
        derived = None if entry in PASS_THROUGH_KEYS else next(overlapping, None)
        if derived is not None and (derived.key, derived.value) != (name, value):
            found[key] = _contradiction(key, value, derived, owner)
        elif derived is None and owner:
            section = f"deepspeed.{entry}"
            hint = owner if "use " in owner else f"leave it out: {owner}"
            found[entry] = error(section, f"{section} is trainctl's to set", hint)
    yield from found.values()


def pass_through_has_an_effect(draft: Draft) -> Iterator[Finding]:
    """Something reads what is passed through."""
    for key, value in flatten(draft.config.deepspeed):
        reason = idle_reason(key, draft.config)
        if reason:
            message = f"deepspeed.{key}={value} does nothing here: {reason}"
            yield error(f"deepspeed.{key}", message, "leave it out")


def _contradiction(key: str, value: Any, derived: Derived, owner: str) -> Finding:
    return error(
        f"deepspeed.{key}",
        f"deepspeed.{key}={value} contradicts {derived.key}={derived.value}, which comes from: "
        f"{derived.reason}",
        f"leave deepspeed.{key} out: {owner or f'change what {derived.key} comes from'}",
    )
