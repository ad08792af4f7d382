"""Planning: from overrides to a checked plan with its budget and findings; can it start here?"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainctl.config.codec import to_plain
from trainctl.config.compose import NO_EFFECT, SAVED, ComposedConfig, compose_leniently, recompose
from trainctl.config.keys import leaves
from trainctl.config.layers import Layer
from trainctl.config.overrides import ALIASES, SYNTAX, expand_sweep
from trainctl.config.registry import changed_section
from trainctl.config.schema import GROUPS, LIST_GROUPS
from trainctl.config.user_code import check_user_code, ignored_trainer_settings
from trainctl.data.source_lengths import count_epoch, preview_data_plan
from trainctl.errors import ExitCode, Finding, Severity, TrainctlError
from trainctl.hardware import Hardware, resolve_hardware
from trainctl.launchers.config_checks import check_templates, launcher_refusals
from trainctl.memory.budget import MemoryBudget
from trainctl.memory.traced import TracedModel, trace_model
from trainctl.models.anatomy import shape_from_anatomy
from trainctl.models.tracing import factory_in_child
from trainctl.options.launcher import spec_of
from trainctl.plans.shapes import head_dim
from trainctl.plans.types import RunPlan
from trainctl.rules.resolve import CheckedFile, check_file, json_context, resolve
from trainctl.runs.attempts import (
    config_of,
    effective_attempt,
    find_attempt,
    ignored_config_findings,
)
from trainctl.runs.directory import open_run
from trainctl.runs.layout import RunPaths
from trainctl.tuning.assess import DEVICE_TOO_SMALL, Assessment, assess
from trainctl.tuning.input_files import check_inputs, missing_files, reads_urls

if TYPE_CHECKING:
    from trainctl.data.mixture import DataPlan
    from trainctl.tuning.suggest import Suggestion

UNCOUNTED = "TC067"
"""Rule of an epoch that was not counted; dropped if files are missing, which is the cause."""

NO_LENGTH = "TC022"

ANY_STEPS = 1_000_000
"""More steps than any warmup or decay given in steps."""

FACTORY = "model.factory"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedConfig:
    """A composed configuration with its plan, budget and findings."""

    composed: ComposedConfig
    """Configuration with the sources of each key."""
    hardware: Hardware
    """Machines, declared or detected."""
    assessment: Assessment
    """Plan, budget and findings; the plan is None if it cannot be made."""
    findings: tuple[Finding, ...]
    """Findings of the composition and of the assessment, each naming what set its key."""
    traced: TracedModel | None = None
    """Traced model, if a trace was requested."""
    data: DataPlan | None = None
    """Tokens and epochs of each source in the run; None if files were not looked for or counted."""

    @property
    def plan(self) -> RunPlan:
        """The plan.

        Raises:
            TrainctlError: With all findings, if the configuration is not legal.
        """
        if self.assessment.plan is None:
            raise TrainctlError.from_findings(self.findings)
        return self.assessment.plan

    @property
    def budget(self) -> MemoryBudget:
        """The memory budget.

        Raises:
            TrainctlError: With all findings, if the configuration is not legal.
        """
        if self.assessment.budget is None:
            raise TrainctlError.from_findings(self.findings)
        return self.assessment.budget

    @property
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.is_error]

    @property
    def unforceable_errors(self) -> list[Finding]:
        """Errors that `--force` does not override."""
        return unforceable(self.findings)

    @property
    def may_not_fit(self) -> bool:
        """Whether a device is, or may be, too small."""
        return any(each.rule == DEVICE_TOO_SMALL for each in self.assessment.findings)

    def suggestions(self) -> list[Suggestion]:
        """Return up to four changes with which it certainly fits, the least costly first; if it
        does, changes that use its free memory and are faster.
        """
        from trainctl.tuning.suggest import suggest_fitting, suggest_for_slack

        suggest = suggest_fitting if self.errors or self.may_not_fit else suggest_for_slack
        return suggest(self.composed.config, self.hardware)


def unforceable(findings: Iterable[Finding]) -> list[Finding]:
    """Return the errors that `--force` does not override: all but those on memory."""
    return [
        each for each in findings if each.is_error and each.exit_code is not ExitCode.does_not_fit
    ]


def compose_config(overrides: Sequence[str] | None, config_dir: Path | None) -> ComposedConfig:
    """Compose the configuration that the user requested.

    Raises:
        TrainctlError: With every problem. If part of the configuration is wrong, the rest is
            planned all the same to find further problems.
    """
    composed = compose_leniently(overrides or (), config_dir=config_dir)
    if composed.has_error:
        errors = [finding for finding in composed.findings if finding.is_error]
        wrong = {error.key for error in errors}
        further = [f for f in _further_problems(composed) if f.is_error and f.key not in wrong]
        if any(error.rule == SYNTAX for error in errors):  # it may have been to set the length
            further = [each for each in further if each.rule != NO_LENGTH]
        raise TrainctlError.from_findings([*composed.findings, *further])
    return composed


def _further_problems(composed: ComposedConfig) -> Sequence[Finding]:
    """Find further problems of a wrong configuration; by rules alone if its model is unreadable."""
    config = composed.config
    if config.model.is_unread:
        return resolve(config, resolve_hardware(config.hardware)).findings
    return plan_config(composed).findings


def plan_config(
    composed: ComposedConfig,
    *,
    with_files: bool = False,
    resumes: bool = False,
    tokenize: bool = False,
    folder: Path | None = None,
    exact: bool = False,
    calibrated: bool = True,
) -> PlannedConfig:
    """Resolve, check and budget a composed configuration.

    Args:
        with_files: Also check that the files it names exist, as before a launch.
        resumes: Leave out the files that only the start of a run reads.
        tokenize: Tokenize the corpus if the run's length depends on it.
        folder: Folder of the user's own code; None is the current folder.
        exact: Trace the model for its budget, in a process of its own.
        calibrated: Use measurements of this machine, if the hardware is its own.
    """
    composed, unread = read_factory(composed, folder)
    missing = missing_files(composed.config, folder, resumes=resumes) if with_files else []
    if with_files and not any(finding.is_error for finding in missing):
        missing += check_templates(composed.config)
    is_there = not any(finding.is_error for finding in missing)
    composed = count_epoch(composed, tokenize=tokenize and is_there)
    # `validate` reads files too, but answers as the other commands that plan do.
    launches = with_files and tokenize
    hardware = resolve_hardware(composed.config.hardware, calibrated=calibrated, launches=launches)
    if unread:
        wrong = (*resolve(composed.config, hardware).findings, *unread)
        assessment = Assessment(plan=None, budget=None, findings=wrong)
    else:
        if composed.config.model.factory is not None:
            with suppress(TrainctlError):  # cached for callers without the folder, who report it
                trace_model(composed.config, folder)
        assessment = assess(composed.config, hardware)
    traced = None
    if exact and assessment.plan is not None:
        traced = trace_model(composed.config, folder)
        assessment = assess(composed.config, hardware, traced)
    found = [each for each in assessment.findings if is_there or each.rule != UNCOUNTED]
    found += ignored_trainer_settings(composed)
    data = None
    if with_files:
        found += missing
        found += check_inputs(composed.config, resumes=resumes)
        found += launcher_refusals(composed.config, hardware)
        if assessment.plan is not None and not unforceable(found):
            data, problems = preview_data_plan(assessment.plan)
            found += problems
    return PlannedConfig(
        composed=composed,
        hardware=hardware,
        assessment=assessment,
        findings=tuple(dict.fromkeys((*composed.findings, *name_sources(composed, found)))),
        traced=traced,
        data=data,
    )


def with_input_warnings(planned: PlannedConfig, *, has_length: bool = True) -> PlannedConfig:
    """Return the plan with the warnings of `input_warnings`."""
    made = planned.assessment.plan
    if made is None:
        return planned
    found, data = input_warnings(planned.composed, made, has_length=has_length)
    return replace(planned, findings=tuple(dict.fromkeys((*planned.findings, *found))), data=data)


def input_warnings(
    composed: ComposedConfig, made: RunPlan, *, has_length: bool
) -> tuple[list[Finding], DataPlan | None]:
    """Return the warnings of `validate` on texts, tokenizer and weights, and the data plan.

    The plan may be for other machines, so a missing file is no finding. Nothing is downloaded.

    Args:
        has_length: Whether the configuration sets the length of the run; otherwise its epochs are
            unknown.
    """
    config, data = composed.config, None
    found = check_inputs(config, is_quick=True)
    if not reads_urls(config):
        missing = missing_files(config)
        found += missing
        if has_length and not unforceable(missing):
            data, problems = preview_data_plan(made)
            found += problems
    return name_sources(composed, [each for each in found if not each.is_error]), data


def read_factory(
    composed: ComposedConfig, folder: Path | None = None
) -> tuple[ComposedConfig, tuple[Finding, ...]]:
    """Read the model that `model.factory` makes, so that plan and budget count its parameters.

    A saved configuration keeps what was read, unless an override changes the model. The function is
    looked for in `folder`, by default the current one.

    Returns:
        The configuration with the sizes of the real model, and findings if it could not be read.
    """
    config = composed.config
    model = config.model
    is_changed = any(override.startswith("model") for override in composed.overrides)
    if model.factory is None or (model.anatomy and not is_changed):
        return composed, ()
    table: list[str] = []
    arguments: dict[str, Any] = {}
    wrong = tuple(each for each in check_user_code(config, folder) if each.key == FACTORY)
    if not wrong:
        try:
            made = factory_in_child(to_plain(config), folder)
            table, arguments = made["anatomy"], made["arguments"]
        except TrainctlError as error:
            wrong = tuple(error.findings)
    layers, notes = dict(composed.layers), list(composed.findings)
    if arguments:
        for name in arguments.keys() - model.arguments.keys():  # type: ignore[attr-defined]
            source = f"default of {model.factory}"
            layers[f"model.arguments.{name}"] = (Layer(source, arguments[name]),)
        config = replace(config, model=changed_section(model, arguments=arguments))
    read: dict[str, Any] = {"anatomy": table, **(shape_from_anatomy(table) if table else {})}
    for name, value in read.items():
        own = head_dim(model) if name == "head_dim" else getattr(model, name)
        if value == own:
            continue
        key, source = f"model.{name}", composed.source_of(f"model.{name}")
        if source in composed.overrides:
            notes.append(_factory_conflict(key, own, value, model.factory, source))
        layers[key] = (*layers.get(key, ()), Layer(f"made by {model.factory}", value))
        config = replace(config, model=replace(config.model, **{name: value}))
    return replace(composed, config=config, layers=layers, findings=tuple(notes)), wrong


def _factory_conflict(key: str, own: Any, made: Any, factory: str, source: str) -> Finding:
    return Finding(
        rule=NO_EFFECT,
        key=key,
        message=f"{own} is not what {FACTORY}={factory} makes, which has {made}",
        hint=f"let the function take it from the section that it is given, or leave {key} out",
        severity=Severity.warning,
        source=source,
    )


def name_sources(composed: ComposedConfig, findings: Sequence[Finding]) -> list[Finding]:
    """Return the findings, each naming what set its key."""
    return [
        finding
        if finding.source or not finding.key
        else finding.set_by(composed.source_of(finding.key))
        for finding in findings
    ]


def compose_target(
    target: str | None,
    overrides: Sequence[str],
    config_dir: Path | None,
    *,
    attempt: int | None = None,
) -> ComposedConfig:
    """Compose a recipe or the configuration of a run, with overrides on top.

    Args:
        target: Name of a recipe, path of a run directory, or of one of its `attempts/N`; None
            composes the overrides alone.
        config_dir: The user's own folder of conf/ and recipes/.
        attempt: Attempt of the run; None takes the one that stands for it
            (`trainctl.runs.attempts`).

    Raises:
        TrainctlError: The configuration is wrong, the run has no such attempt (exit code 5), or
            `attempt` is given without a run.
    """
    if target is not None:
        found = find_attempt(Path(target))
        if found is not None:
            run, named = found
            return _compose_run(run, named if attempt is None else attempt, overrides, config_dir)
    if attempt is not None:
        raise TrainctlError("--attempt N is of a run", hint="name its directory: runs/NAME")
    if target is None:
        return compose_config(overrides, config_dir)
    if "/" in target:
        open_run(Path(target))  # raises an error that says what the directory is instead
    is_half = target in {*leaves(), *ALIASES, *GROUPS, *LIST_GROUPS, "recipe"}
    return compose_config([target if is_half else f"recipe={target}", *overrides], config_dir)


def _compose_run(
    run: RunPaths, attempt: int | None, overrides: Sequence[str], config_dir: Path | None
) -> ComposedConfig:
    """Compose the configuration of a run, with warnings of configuration that it ignores."""
    standing = effective_attempt(run)
    number = standing.number if attempt is None else attempt
    composed = recompose(
        config_of(run, attempt),
        overrides,
        config_dir=config_dir,
        source=f"attempt {number} of the run" if number else SAVED,
    )
    notes = ignored_config_findings(run, standing if attempt is None else None)
    return replace(composed, findings=(*composed.findings, *notes))


def check_deepspeed_file(
    path: Path, overrides: Sequence[str], *, world_size: int | None, model: Path | None
) -> CheckedFile:
    """Check a DeepSpeed JSON, for the machines that overrides of `hardware` describe.

    Raises:
        TrainctlError: The file or the model cannot be read, or something else is overridden.
    """
    others = [text for text in overrides if not text.startswith(("hardware=", "hardware."))]
    if others:
        raise TrainctlError(
            f"{others[0]} has no effect on a DeepSpeed JSON",
            hint="beside --deepspeed only hardware=... says something: kind and number of devices",
        )
    hardware = (
        resolve_hardware(compose_config(overrides, None).config.hardware) if overrides else None
    )
    return check_file(path, json_context(hardware, world_size, model))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedPoint:
    """One of several configurations that are planned side by side."""

    values: Mapping[str, str]
    """Values of the swept keys."""
    planned: PlannedConfig | None = None
    """Plan and budget; None if the configuration cannot be composed."""
    errors: tuple[str, ...] = ()
    """Messages of the errors that make the configuration illegal."""

    @property
    def name(self) -> str:
        """The swept keys and values."""
        return ", ".join(f"{key}={value}" for key, value in self.values.items())

    @property
    def budget(self) -> MemoryBudget | None:
        return self.planned.assessment.budget if self.planned else None

    def to_json(self) -> dict[str, Any]:
        """Return the swept values with the budget and the errors."""
        found = {"budget": self.budget.to_json()} if self.budget else {}
        return {"values": dict(self.values), **found, "errors": list(self.errors)}


def plan_points(
    target: str | None,
    overrides: Sequence[str],
    config_dir: Path | None,
    *,
    exact: bool,
    calibrated: bool,
) -> list[PlannedPoint]:
    """Plan every combination of the values that the overrides list (`zero_stage=1,2,3`).

    Memory does not depend on the length of a run, so none needs to be set.

    Raises:
        TrainctlError: There is only one configuration, and it cannot be planned.
    """
    points = expand_sweep(overrides)
    found = []
    for point in points:
        try:
            composed = compose_target(target, point.overrides, config_dir)
            with_steps = _with_placeholder_steps(composed)
            planned = plan_config(with_steps, exact=exact, calibrated=calibrated)
            planned = with_input_warnings(planned, has_length=with_steps is composed)
        except TrainctlError as wrong:
            error = _without_length_error(wrong)
            if len(points) == 1:
                raise error from None
            messages = tuple(finding.message for finding in error.findings) or (str(error),)
            found.append(PlannedPoint(values=point.values, errors=messages))
            continue
        errors = tuple(finding.message for finding in planned.unforceable_errors)
        found.append(PlannedPoint(values=point.values, planned=planned, errors=errors))
    return found


def _with_placeholder_steps(composed: ComposedConfig) -> ComposedConfig:
    """Return the configuration with a number of steps if no step or token sets its length."""
    config, training = composed.config, composed.config.training
    if training.steps is not None or training.tokens is not None:
        return composed
    training = replace(training, steps=ANY_STEPS, epochs=None, epoch_tokens=None)
    return replace(composed, config=replace(config, training=training))


def _without_length_error(error: TrainctlError) -> TrainctlError:
    found = [finding for finding in error.findings if finding.rule != NO_LENGTH]
    return TrainctlError.from_findings(found) if found else error


def machine_findings(planned: PlannedConfig, made: RunPlan, folder: Path) -> list[Finding]:
    """Return the launcher's findings on the machines, before a run is made in or below the folder.

    With `launcher=ssh` this connects to the hosts.
    """
    from trainctl.launchers.interface import check, missing_tool

    found = check(made, folder, checkpoint_bytes(planned))
    return name_sources(planned.composed, [*missing_tool(made.config), *found])


def checkpoint_bytes(planned: PlannedConfig) -> int | None:
    """Return the size of a checkpoint of trainctl's own trainer; None if unknown or not its own."""
    budget = planned.assessment.budget
    is_ours = planned.composed.config.trains_itself
    return budget.checkpoint_bytes if budget is not None and is_ours else None


def can_launch(planned: PlannedConfig, folder: Path) -> tuple[bool | None, str]:
    """Decide whether `launch` would start the plan from here, without connecting to other hosts.

    Returns:
        The verdict, None if it is too close to tell or depends on other hosts; and the reason, if
        the verdict is not True.
    """
    made, budget = planned.assessment.plan, planned.assessment.budget
    if made is None or budget is None or planned.errors:
        return False, planned.errors[0].message
    if made.not_yet:
        return False, made.not_yet[0]
    if spec_of(made.config.launcher).asks_hosts:
        return None, "its hosts are asked when it is launched"
    found = [each for each in machine_findings(planned, made, folder) if each.is_error]
    if found:
        return False, found[0].message
    from trainctl.launchers.interface import has_scheduler

    if has_scheduler(made.config):
        return None, f"{made.config.launcher.kind} decides: it can be handed over from here"
    return budget.fits, "" if budget.fits else "too close to tell whether a device holds it"
