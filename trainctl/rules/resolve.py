"""Resolution of a configuration and the hardware to a frozen plan, with all problems at once.

The rules are those of a plan, of a DeepSpeed JSON and of its file. Importing `Draft` and `Case`
imports their packages, whose modules register their rules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainctl.config.derived import DerivedValue, derived
from trainctl.config.extras import package_version
from trainctl.config.json_file import JsonDocument, read_json
from trainctl.config.model_directory import fill_from_directory
from trainctl.config.schema import ModelConfig, RunConfig
from trainctl.config.sections import callbacks_of
from trainctl.errors import Finding
from trainctl.hardware import Hardware
from trainctl.options.engine import engine_of
from trainctl.plans.deepspeed import nest_settings, user_settings
from trainctl.plans.derive import (
    derive_batch,
    derive_mesh,
    derive_ramp,
    derive_shape,
    derive_stable_steps,
    derive_stages,
    derive_stop_step,
    derive_total_steps,
    derive_warmup_steps,
    uncounted_steps,
)
from trainctl.plans.gathering import gather_reasons
from trainctl.plans.mup import derived_settings as mup_reasons
from trainctl.plans.optimizers import implementation_reasons as optimizer_reasons
from trainctl.plans.optimizers import learning_rate_reasons, lr_scale
from trainctl.plans.settings import expert_reasons, number_formats, recomputed_blocks
from trainctl.plans.trainable import parameter_count_reasons as trainable_reasons
from trainctl.plans.types import RunPlan
from trainctl.rules.deepspeed.case import Case, JsonContext
from trainctl.rules.deepspeed_schema import Schema, load, versions
from trainctl.rules.kernel_choice import choose_kernels
from trainctl.rules.passed_keys import PlanNames, keys_overlap, plan_json_case
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


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckedFile:
    """A DeepSpeed JSON with its findings."""

    document: JsonDocument
    """Content with its line numbers."""
    findings: tuple[Finding, ...]
    """Findings by severity, then by line; each names its line."""
    schema: Schema
    """Schema of the DeepSpeed version it was checked against."""
    installed: str
    """Version of the installed DeepSpeed; empty if there is none."""
    around: JsonContext
    """Devices, ranks and model that it was checked for."""

    @property
    def has_error(self) -> bool:
        return any(finding.is_error for finding in self.findings)


def check_file(path: Path, around: JsonContext) -> CheckedFile:
    """Read and check a DeepSpeed JSON.

    Raises:
        TrainctlError: The file cannot be read at all.
    """
    document = read_json(path)
    installed = installed_deepspeed()
    schema = load(installed if installed in versions() else None)
    found = check_json(document.value, around, schema) if document.is_readable else ()
    named = [*document.findings, *(_with_line(finding, document, path) for finding in found)]
    named.sort(key=lambda finding: (not finding.is_error, _finding_line(finding)))
    return CheckedFile(
        document=document, findings=tuple(named), schema=schema, installed=installed, around=around
    )


def json_context(
    hardware: Hardware | None, world_size: int | None, model: Path | None
) -> JsonContext:
    """Return the devices, ranks and model that a JSON is for.

    Args:
        hardware: Machines that it runs on, if known.
        world_size: Number of ranks; None takes one for each device of the hardware.
        model: A transformers directory.

    Raises:
        TrainctlError: The model cannot be read.
    """
    return JsonContext(
        world_size=world_size or (hardware.world_size if hardware else None),
        devices_per_node=hardware.devices_per_node if hardware else None,
        accelerator=hardware.accelerator if hardware else None,
        fills_auto=True,
        model=None if model is None else _model_shape(model),
    )


def installed_deepspeed() -> str:
    """Return the installed DeepSpeed's version without importing it; empty if there is none."""
    return package_version("deepspeed").partition("+")[0]


def _model_shape(directory: Path) -> ModelConfig:
    return fill_from_directory(ModelConfig(name="hf", family="hf", path=str(directory)))


def _with_line(finding: Finding, document: JsonDocument, path: Path) -> Finding:
    line = document.line_of(finding.key)
    return finding.set_by(f"{path}:{line}" if line else str(path))


def _finding_line(finding: Finding) -> int:
    number = finding.source.rpartition(":")[2]
    return int(number) if number.isdecimal() else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Resolution:
    """Result of resolving a configuration."""

    plan: RunPlan | None
    """Plan; ``None`` exactly when a finding is an error."""
    findings: tuple[Finding, ...]
    """Errors and warnings, in the order of the rules."""


def resolve(config: RunConfig, hardware: Hardware) -> Resolution:
    """Derive everything that the config leaves open, and check it.

    An impossible derivation gives ``None``, which the rules report. The others still run, so that
    all problems are reported together. Reads no files.

    Raises:
        TrainctlError: A callback is not installed here, or its folder is not trusted.
    """
    callbacks_of(config)  # raises for a callback that is not installed or trusted here
    mesh, mesh_reasons = derive_mesh(config.parallelism, hardware)
    batch, batch_reasons = derive_batch(config.training, mesh.data) if mesh else (None, ())
    batches, ramp_reasons = derive_ramp(config.training, batch)
    total_steps, total_reasons = derive_total_steps(config.training, batches, config.objective)
    draft = Draft(
        config=config,
        hardware=hardware,
        mesh=mesh,
        batch=batch,
        batches=batches,
        total_steps=total_steps,
    )
    draft, kernel_reasons = choose_kernels(draft)
    config = draft.config
    findings = check_draft(draft)
    if any(finding.is_error for finding in findings):
        return Resolution(plan=None, findings=findings)
    # Without an error each of these has a value: rules report every way to have none.
    assert mesh is not None and batch is not None and batches is not None
    if total_steps is None:  # TC067 warns of this
        total_steps, total_reasons = uncounted_steps(config.training)
    passed, has_json = user_settings(config.deepspeed), engine_of(config).takes_json
    case = plan_json_case(config, hardware, mesh, draft.settings, passed) if passed else draft.case
    if has_json:
        findings += tuple(_check_plan_json(case, draft.settings))
    if any(finding.is_error for finding in findings):
        return Resolution(plan=None, findings=findings)

    stop_step, stop_reasons = derive_stop_step(config.training, total_steps)
    warmup_steps, warmup_reasons = derive_warmup_steps(config.schedule, total_steps, batches)
    stage_blocks, stage_reasons = derive_stages(config)
    plan = RunPlan(
        config=config,
        hardware=hardware,
        mesh=mesh,
        batch=batch,
        total_steps=total_steps,
        stop_step=stop_step,
        warmup_steps=warmup_steps,
        stage_blocks=stage_blocks,
        ramp=batches.phases if len(batches.phases) > 1 else (),
        lr_scale=lr_scale(config.optimizer, batch),
        engine=config.engine.kind,
        deepspeed=dict(case.json) if has_json else {},
        settings={} if has_json else nest_settings(draft.settings),
        derived=(
            *mesh_reasons,
            *batch_reasons,
            *ramp_reasons,
            *total_reasons,
            *stop_reasons,
            *warmup_reasons,
            *derive_shape(config.schedule, total_steps, warmup_steps, batches),
            *derive_stable_steps(config.schedule, total_steps, warmup_steps, batches),
            *recomputed_blocks(config),
            *kernel_reasons,
            *stage_reasons,
            *_format_reasons(config),
            *gather_reasons(config),
            *optimizer_reasons(config, hardware),
            *learning_rate_reasons(config, batch),
            *mup_reasons(config),
            *expert_reasons(config),
            *trainable_reasons(config),
            *draft.settings,
            *passed,
        ),
        not_yet=not_yet(config),
    )
    return Resolution(plan=plan, findings=findings)


def _format_reasons(config: RunConfig) -> tuple[DerivedValue, ...]:
    """Return the number formats that follow from `precision.compute` or from the engine."""
    used, always = number_formats(config.precision), engine_of(config).gradients
    why, source = f"precision.compute={config.precision.compute}", "precision.compute"
    if always is not None:
        why, source = f"engine.kind={config.engine.kind}, whatever the weights are", "engine.kind"
    why = why if always else f"the format of the weights under {why}"
    return tuple(
        derived(f"precision.{name}", (always or getattr(used, name)).value, source, why=why)
        for name in ("gradient_accumulation", "communication")
        if getattr(config.precision, name) is None
    )


def _check_plan_json(case: Case, settings: Sequence[DerivedValue]) -> Iterator[Finding]:
    """Yield what DeepSpeed would refuse or misread in the JSON of a plan.

    A finding about a key of the user's `deepspeed` section names it there. An error about another
    key names the config key that it is derived from. Warnings about keys that trainctl sets are
    left out: it sets them on purpose. `case` comes from `plan_json_case`, with the user's keys.
    `settings` are all JSON keys that trainctl sets, with their sources.
    """
    names = case.names
    assert isinstance(names, PlanNames)
    for finding in check_case(case):
        if names.passes(finding.key):
            yield replace(finding, key=f"deepspeed.{finding.key}")
        elif finding.is_error:
            yield replace(finding, key=_comes_from(finding.key, settings))


def _comes_from(key: str, settings: Sequence[DerivedValue]) -> str:
    """Return the config key that a JSON key is derived from; empty if there is none."""
    near = (setting for setting in settings if keys_overlap(key, setting.key))
    return next((setting.sources[0] for setting in near if setting.sources), "")


def not_yet(config: RunConfig) -> tuple[str, ...]:
    """Return one sentence, naming the key, for each technique that `launch` refuses today."""
    if config.trains_itself and config.model.trust_remote_code:
        what = "training with a model's own code is not there yet"
        return (f"model.trust_remote_code=true: {what}",)
    return ()
