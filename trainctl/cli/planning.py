"""Planning, the first part of every command: from arguments to a plan with its budget."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainctl.cli.console import gib, say
from trainctl.cli.epochs import count_epoch
from trainctl.cli.ignored_config import ignored_config_findings
from trainctl.config.codec import to_plain
from trainctl.config.compose import NO_EFFECT, SAVED, Composed, compose_leniently, recompose
from trainctl.config.layers import Layer
from trainctl.config.schema import RunConfig
from trainctl.config.user_code import check_user_code
from trainctl.data.source_lengths import preview_data_plan
from trainctl.errors import ExitCode, Finding, Severity, TrainctlError
from trainctl.hardware import Hardware, resolve_hardware
from trainctl.launch.config_checks import refusals
from trainctl.memory.traced import TracedModel, trace
from trainctl.models.anatomy import shape_in
from trainctl.models.tracing import anatomy_in_child
from trainctl.plan.shapes import head_dim
from trainctl.rules.named_files import missing_files
from trainctl.rules.resolve import resolve
from trainctl.runs.attempts import config_of, find_attempt, standing_attempt
from trainctl.runs.directory import open_run
from trainctl.runs.layout import RunPaths
from trainctl.search.assess import Assessment, assess
from trainctl.search.input_files import (
    check_corpus_is_meant,
    check_model_files,
    check_tokenizer_files,
)
from trainctl.search.suggest import Suggestion, suggest_fitting, suggest_for_slack

if TYPE_CHECKING:
    from trainctl.data.mixture import DataPlan

UNCOUNTED = "TC067"
"""Rule of an epoch that was not counted; dropped if files are missing, which is the cause."""

FACTORY = "model.factory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A composed configuration with its plan, budget and findings."""

    composed: Composed
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
    def errors(self) -> list[Finding]:
        return [finding for finding in self.findings if finding.is_error]

    @property
    def unforceable_errors(self) -> list[Finding]:
        """Errors that `--force` does not override."""
        return [error for error in self.errors if error.exit_code is not ExitCode.does_not_fit]


def compose(overrides: Sequence[str] | None, config_dir: Path | None) -> Composed:
    """Compose the configuration that the user requested.

    Raises:
        TrainctlError: With every problem. If part of the configuration is wrong, the rest is
            planned all the same to find further problems.
    """
    composed = compose_leniently(overrides or (), config_dir=config_dir)
    if composed.has_error:
        wrong = {finding.key for finding in composed.findings if finding.is_error}
        further = [f for f in _further_problems(composed) if f.is_error and f.key not in wrong]
        raise TrainctlError.from_findings([*composed.findings, *further])
    return composed


def _further_problems(composed: Composed) -> Sequence[Finding]:
    """Find further problems of a wrong configuration; by rules alone if its model is unreadable."""
    config = composed.config
    if config.model.is_unread:
        return resolve(config, resolve_hardware(config.hardware)).findings
    return plan(composed).findings


def plan(
    composed: Composed,
    *,
    with_files: bool = False,
    tokenize: bool = False,
    folder: Path | None = None,
    exact: bool = False,
    calibrated: bool = True,
) -> Planned:
    """Resolve, check and budget a composed configuration.

    Args:
        with_files: Also check that the files it names exist, as before a launch.
        tokenize: Tokenize the corpus if the run's length depends on it.
        folder: Folder of the user's own code; None is the current folder.
        exact: Trace the model for its budget, in a process of its own.
        calibrated: Use measurements of this machine, if the hardware is its own.
    """
    composed, unread = read_factory(composed, folder)
    missing = missing_files(composed.config, folder) if with_files else []
    is_there = not any(finding.is_error for finding in missing)
    composed = count_epoch(composed, tokenize=tokenize and is_there)
    hardware = resolve_hardware(composed.config.hardware, calibrated=calibrated)
    if unread:
        wrong = (*resolve(composed.config, hardware).findings, *unread)
        assessment = Assessment(plan=None, budget=None, findings=wrong)
    else:
        if composed.config.model.factory is not None:
            with suppress(TrainctlError):  # cached for callers without the folder, who report it
                trace(composed.config, folder)
        assessment = assess(composed.config, hardware)
    traced = None
    if exact and assessment.plan is not None:
        traced = trace(composed.config, folder)
        assessment = assess(composed.config, hardware, traced)
    found = [each for each in assessment.findings if is_there or each.rule != UNCOUNTED]
    data = None
    if with_files:
        found += missing
        found += check_model_files(composed.config)
        found += check_tokenizer_files(composed.config)
        found += check_corpus_is_meant(composed.config)
        found += refusals(composed.config, hardware)
        if assessment.plan is not None and not any(finding.is_error for finding in found):
            data, problems = preview_data_plan(assessment.plan)
            found += problems
    return Planned(
        composed=composed,
        hardware=hardware,
        assessment=assessment,
        findings=tuple(dict.fromkeys((*composed.findings, *name_sources(composed, found)))),
        traced=traced,
        data=data,
    )


def read_factory(
    composed: Composed, folder: Path | None = None
) -> tuple[Composed, tuple[Finding, ...]]:
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
    wrong = tuple(each for each in check_user_code(config, folder) if each.key == FACTORY)
    if not wrong:
        try:
            table = anatomy_in_child(to_plain(config), folder)
        except TrainctlError as error:
            wrong = tuple(error.findings)
    layers, notes = dict(composed.layers), list(composed.findings)
    read: dict[str, Any] = {"anatomy": table, **(shape_in(table) if table else {})}
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


def name_sources(composed: Composed, findings: Sequence[Finding]) -> list[Finding]:
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
) -> Composed:
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
        return compose(overrides, config_dir)
    if "/" in target:
        open_run(Path(target))  # raises: it says what the directory is instead
    return compose([f"recipe={target}", *overrides], config_dir)


def _compose_run(
    run: RunPaths, attempt: int | None, overrides: Sequence[str], config_dir: Path | None
) -> Composed:
    """Compose the configuration of a run, with warnings of configuration that it ignores."""
    standing = standing_attempt(run)
    number = standing.number if attempt is None else attempt
    composed = recompose(
        config_of(run, attempt),
        overrides,
        config_dir=config_dir,
        source=f"attempt {number} of the run" if number else SAVED,
    )
    notes = ignored_config_findings(run, standing if attempt is None else None)
    return replace(composed, findings=(*composed.findings, *notes))


def show_suggestions(config: RunConfig, hardware: Hardware) -> None:
    """Print, on stderr, overrides with which the configuration would fit."""
    suggestions = suggest_fitting(config, hardware)
    if not suggestions:
        say("hint: nothing that trainctl tried makes it fit; use more or larger devices")
        return
    say("what would fit:")
    for suggestion in suggestions:
        say(f"  {_suggestion(suggestion)}")


def show_slack(config: RunConfig, hardware: Hardware) -> None:
    """Print, on stderr, what the free memory of a configuration could buy."""
    suggestions = suggest_for_slack(config, hardware)
    if suggestions:
        say("what the free memory could buy:")
    for suggestion in suggestions:
        say(f"  {_suggestion(suggestion)}")


def _suggestion(suggestion: Suggestion) -> str:
    """Format a suggestion with its memory and its cost in speed."""
    change = suggestion.speed - 1
    speed = "as fast" if abs(change) < 0.005 else f"{abs(change):.0%} "
    if speed != "as fast":
        speed += "faster" if change > 0 else "slower"
    saved = suggestion.saved_bytes
    memory = f"{gib(abs(saved))} {'less' if saved >= 0 else 'more'}"
    peak = gib(suggestion.peak_bytes)
    return f"{' '.join(suggestion.overrides)}  (peak {peak}, {memory}; {speed})"
