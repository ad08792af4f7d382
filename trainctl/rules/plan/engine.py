"""Rules about what the engine lacks, and about keys passed through to DeepSpeed's JSON."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from trainctl.config.codec import flatten
from trainctl.config.derived import DerivedValue
from trainctl.config.registry import load_spec
from trainctl.config.sections import callbacks_of
from trainctl.options.engine import engine_of
from trainctl.rules.deepspeed import keys
from trainctl.rules.deepspeed.case import Case
from trainctl.rules.passed_keys import (
    PASS_THROUGH_KEYS,
    canonical_key,
    entry_of,
    idle_reason,
    keys_overlap,
    owner_of,
)
from trainctl.rules.plan.draft import Draft, values_outside_limits
from trainctl.rules.rule import Problem, rule


@rule("TC405", "*", example="recipe=tiny engine=fsdp2 zero_stage=1")
def engine_supports_settings(draft: Draft) -> Iterator[Problem]:
    """The engine supports every setting of the configuration.

    engine=fsdp2 is torch's fully_shard: data parallel, fp32 and bf16, optimizers that look at one
    element at a time. The rest is DeepSpeed's.

    Fix: Use engine=deepspeed, or leave out what the message names.
    """
    spec = engine_of(draft.config)
    for key, value, limit in values_outside_limits(draft.config, spec.limits):
        yield Problem(
            f"{key}={value}: engine.kind={spec.name} {limit.why}",
            limit.nearest if spec.takes_json else f"{limit.nearest}, or engine=deepspeed",
            key=key,
        )


@rule("TC412", "*", example="recipe=tiny callbacks=[layer_statistics] kernels.compile=blocks")
def callbacks_support_settings(draft: Draft) -> Iterator[Problem]:
    """The chosen callbacks support the settings of the plan.

    A callback that reads activations or gradients of micro-batches on a rank can do so only where a
    rank has them. The gradient noise scale compares micro-batches, and needs two of them in a step.

    Fix: Leave the callback out, or change the setting that the message names.
    """
    for name in callbacks_of(draft.config):
        spec = load_spec("callbacks", name)
        for key, value, limit in values_outside_limits(draft.config, spec.limits):
            yield Problem(
                f"{key}={value}: the callback {name} {limit.why}",
                f"{limit.nearest}, or leave {name} out of `callbacks`",
                key=key,
            )
        if draft.batch is not None and draft.mesh is not None:
            found = draft.batch.gradient_accumulation_steps * draft.mesh.data
            if found < spec.min_micro_batches:
                yield Problem(
                    f"a step is {found} micro-batch, and the callback {name} compares "
                    f"{spec.min_micro_batches}",
                    f"a smaller training.micro_batch_size, or leave {name} out of `callbacks`",
                    key=f"callbacks.{name}",
                )


KEY_RULES = (
    keys.removed_keys_are_gone,
    keys.checked_sections_hold_known_keys,
    keys.other_sections_hold_known_keys,
    keys.keys_of_other_programs_are_known,
)
"""Rules about the keys of any JSON, which have an identifier of their own here."""


@rule("TC090", "deepspeed.*", example="recipe=tiny +deepspeed.gradient_cliping=1")
def pass_through_keys_exist(draft: Draft) -> Iterator[Problem]:
    """Keys of the deepspeed section exist in DeepSpeed's JSON.

    `deepspeed.*` goes into DeepSpeed's JSON as it is. DeepSpeed ignores an unknown key at the top
    in silence, so a typing mistake changes nothing, and nobody notices.

    Fix: Write the key that the message proposes.
    """
    case = Case(draft.config.deepspeed)
    for each in KEY_RULES:
        for problem in each.problems(case):
            yield Problem(problem.message, problem.hint, key=f"deepspeed.{problem.key}")


@rule("TC091", "deepspeed.*", example="recipe=tiny '+deepspeed.aio={queue_depth: auto}'")
def pass_through_has_no_auto(draft: Draft) -> Iterator[Problem]:
    """No value of the deepspeed section is "auto".

    "auto" is filled in by accelerate or transformers on the way. Nobody does it here; DeepSpeed
    itself drops it in a section, and fails on it at the top.

    Fix: Give the value, or leave the key out: trainctl derives what it can.
    """
    for key, value in flatten(draft.config.deepspeed):
        if value == "auto":
            yield Problem(
                f'deepspeed.{key} is "auto", which only other tools fill in',
                "give the value, or leave the key out: trainctl derives what it can",
                key=f"deepspeed.{key}",
            )


@rule("TC092", "deepspeed.*", example="recipe=tiny '+deepspeed.fp16={enabled: true}'")
def pass_through_agrees(draft: Draft) -> Iterator[Problem]:
    """The deepspeed section does not contradict the plan.

    The plan, the budget and the trainer go by the configuration. A passed-through key that says
    something else would train what was neither checked nor budgeted. The same holds of keys that
    the trainer counts on: with `gradient_allreduce_op=sum` every gradient norm would be as many
    times too large as there are ranks.

    Fix: Change the configuration's own key; `trainctl config why KEY` names it.
    """
    found: dict[str, Problem] = {}
    for key, value in flatten(draft.config.deepspeed):
        entry, owner, name = entry_of(key), owner_of(key, draft.config), canonical_key(key)
        overlapping = (each for each in draft.settings if keys_overlap(name, each.key))
        derived = None if entry in PASS_THROUGH_KEYS else next(overlapping, None)
        if derived is not None and (derived.key, derived.value) != (name, value):
            found[key] = _contradiction(key, value, derived, owner)
        elif derived is None and owner:
            section = f"deepspeed.{entry}"
            hint = owner if "use " in owner else f"leave it out: {owner}"
            found[entry] = Problem(f"{section} is trainctl's to set", hint, key=section)
    yield from found.values()


@rule("TC430", "deepspeed.*", example="recipe=tiny '+deepspeed.aio={queue_depth: 32}'")
def pass_through_has_an_effect(draft: Draft) -> Iterator[Problem]:
    """Every key of the deepspeed section is read in this plan.

    Nothing reads the key of DeepSpeed's that is passed through: it is for another stage of ZeRO or
    for offload to NVMe, for DeepSpeed's own checkpoints and data loader, or for nothing any more.
    It was written for a reason, which is not met.

    Fix: Leave it out, or switch on what the message names.
    """
    for key, value in flatten(draft.config.deepspeed):
        reason = idle_reason(key, draft.config)
        if reason:
            message = f"deepspeed.{key}={value} does nothing here: {reason}"
            yield Problem(message, "leave it out", key=f"deepspeed.{key}")


def _contradiction(key: str, value: Any, derived: DerivedValue, owner: str) -> Problem:
    return Problem(
        f"deepspeed.{key}={value} contradicts {derived.key}={derived.value}, which comes from: "
        f"{derived.reason}",
        f"leave deepspeed.{key} out: {owner or f'change what {derived.key} comes from'}",
        key=f"deepspeed.{key}",
    )
