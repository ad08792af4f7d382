"""Rules about the `deepspeed` section: keys of DeepSpeed's own JSON, passed through."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainctl.errors import Finding
from trainctl.plan.deepspeed import flatten
from trainctl.plan.deepspeed_rules import Case, keys
from trainctl.plan.own_json import overlap
from trainctl.plan.rules.draft import Draft, error

OWNED_KEYS = {
    "scheduler": "the trainer sets the learning rate at each step: use the schedule group",
    "data_parallel_size": "it is derived from the devices: use parallelism.data",
    "optimizer": "use the optimizer group",
    "expert_parallel": "use parallelism.expert",
}
"""Keys that would work against trainctl even where it does not write them, and what to use."""

MONITORS = {"comet": "", "csv_monitor": "csv", "tensorboard": "tensorboard", "wandb": "wandb"}
"""DeepSpeed's own, and the logger that has what each is for."""

KEY_RULES = (
    keys.removed_keys_are_gone,
    keys.checked_sections_hold_known_keys,
    keys.other_sections_hold_known_keys,
)
"""What holds of the keys of every JSON, here with an identifier of its own."""


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


def monitors_are_left_to_programs(draft: Draft) -> Iterator[Finding]:
    """DeepSpeed's own monitors are for programs of the user's: of trainctl's steps they get the
    learning rate alone, and count samples from zero again after a resume."""
    if not draft.config.trains_itself:
        return
    for name, instead in MONITORS.items():
        monitor = draft.config.deepspeed.get(name)
        if isinstance(monitor, dict) and monitor.get("enabled"):
            yield error(
                f"deepspeed.{name}.enabled",
                f"deepspeed.{name} would get nothing but the learning rate, and begin again at 0 "
                "after a resume",
                "leave it out, and name "
                + (f"{instead} in logging.to" if instead else "a logger in logging.to, as wandb"),
            )


def pass_through_agrees(draft: Draft) -> Iterator[Finding]:
    """The section adds to what trainctl derives; it does not contradict it."""
    section = draft.config.deepspeed
    owned = {
        name: instead
        for name, instead in OWNED_KEYS.items()
        if name != "scheduler" or draft.config.trains_itself  # a script may leave it to DeepSpeed
    }
    for name, instead in owned.items():
        if name in section:
            yield error(f"deepspeed.{name}", f"deepspeed.{name} is trainctl's to set", instead)
    derived = {setting.key: setting for setting in draft.settings}
    for key, value in flatten(section):
        if key.split(".")[0] in owned:
            continue
        for other, setting in derived.items():
            if overlap(key, other) and not (other == key and setting.value == value):
                yield _contradiction(key, value, other, setting.value, setting.reason)
                break


def _contradiction(key: str, value: Any, other: str, derived: Any, reason: str) -> Finding:
    return error(
        f"deepspeed.{key}",
        f"deepspeed.{key}={value} contradicts {other}={derived}, which comes from: {reason}",
        f"change what {other} comes from, and leave deepspeed.{key} out",
    )
