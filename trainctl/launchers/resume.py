"""Planning of a resume: the checkpoint to continue from, and checks against its training.

A change of the model, the learning rate or the order of samples is refused, or a warning says what
it does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainctl.config.compose import ComposedConfig
from trainctl.config.schema import RunConfig
from trainctl.config.store import Change, diff_configs
from trainctl.data.source_lengths import count_source_tokens
from trainctl.errors import RunStateError, TrainctlError
from trainctl.launchers.planning import PlannedConfig, plan_config
from trainctl.launchers.rank_command import user_code_folder
from trainctl.plans.identity import (
    change_of_rate,
    check_model,
    check_optimizer,
    check_trainable,
    miscounts_tokens,
    step_before_decay,
)
from trainctl.plans.mixture import (
    changes_of_order,
    changes_overlong_handling,
    sources_of,
    stages_of_plan,
)
from trainctl.plans.types import RunPlan
from trainctl.runs.attempts import config_of, effective_attempt
from trainctl.runs.checkpoint_selection import Warn, select_checkpoints
from trainctl.runs.checkpoints import (
    CheckpointInfo,
    examine_checkpoints,
    list_checkpoints,
    newest_checkpoint,
)
from trainctl.runs.directory import last_attempt, read_plan
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import is_old, read_manifest
from trainctl.runs.records import read_events


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedResume:
    """The next attempt of a run, before it is checked against its checkpoint."""

    continues: int
    """Number of the attempt whose configuration it continues; 0 before the first."""
    changes: tuple[Change, ...]
    """Changes of the configuration since that attempt."""
    checkpoint: CheckpointInfo | None
    """Checkpoint to continue from; None begins at step 0."""
    from_start: bool
    """Whether to begin again was requested."""
    planned: PlannedConfig


def plan_resume(
    run: RunPaths,
    configure: Callable[[RunConfig], ComposedConfig],
    *,
    step: int | None = None,
    attempt: int | None = None,
    from_start: bool = False,
    warn: Warn,
) -> PlannedResume:
    """Plan the next attempt of a run; the caller holds the run.

    A run that has never saved anything begins again. A user's own script or function saves and
    resumes by itself.

    Args:
        configure: Makes the attempt's configuration from the run's.
        step: Step of the checkpoint; None takes the newest complete one.
        attempt: Attempt whose configuration to take; None takes the one that stands for the run.
        from_start: Begin again.

    Raises:
        TrainctlError: There is no such checkpoint, or all saved ones are damaged (exit code 5).
    """
    before = config_of(run, attempt)
    checkpoint = None
    if before.trains_itself and not from_start:
        checkpoint = _find_checkpoint(run, step, warn)
    settings = before
    if checkpoint is not None:  # `stop_after_steps` is a setting of one launch
        training = replace(before.training, stop_after_steps=None)
        settings = replace(before, training=training)
    composed = configure(settings)
    if not composed.config.trains_itself:
        checkpoint = None
    elif checkpoint is None and not from_start:
        require_nothing_saved(run)
    folder = user_code_folder(composed.config, run)
    planned = plan_config(
        composed, with_files=True, resumes=checkpoint is not None, tokenize=True, folder=folder
    )
    return PlannedResume(
        continues=attempt or effective_attempt(run).number,
        changes=tuple(diff_configs(before, planned.composed.config)),
        checkpoint=checkpoint,
        from_start=from_start,
        planned=planned,
    )


def _find_checkpoint(run: RunPaths, step: int | None, warn: Warn) -> CheckpointInfo | None:
    """Return the checkpoint of a step, or the newest complete one; warn of damaged newer ones."""
    if step is not None:
        ((_, path), *_) = select_checkpoints(run, [step])
        look = next((look for look in examine_checkpoints(run) if look.step == step), None)
        if look is not None and look.info is not None:
            return look.info
        problem = look.problem if look else f"{path.name} has the weights alone: no run goes on"
        raise RunStateError(problem)
    checkpoint, passed_over = newest_checkpoint(run)
    for problem in passed_over:
        warn(f"checkpoint passed over: {problem}")
    return checkpoint


def require_nothing_saved(run: RunPaths) -> None:
    """Refuse to begin again if checkpoints were saved, and none of them can be resumed from.

    Raises:
        TrainctlError: All are damaged or gone (exit code 5).
    """
    problems = [look.problem for look in examine_checkpoints(run) if look.problem]
    saved = [int(event["step"]) for event in read_events(run.events, "checkpoint")]
    if problems:
        what = f"no checkpoint of {run.root} is complete: {'; '.join(problems)}"
    elif saved:
        what = f"{run.root} saved a checkpoint at step {saved[-1]:,}, and none is there any more"
    else:
        return
    raise RunStateError(
        what, hint=f"bring it back, or begin anew: trainctl resume {run.root} --from-start"
    )


def check_same_model(config: RunConfig, path: Path, warn: Warn) -> None:
    """Refuse to resume from a checkpoint of another model or optimizer.

    Warns of a checkpoint that is too old to tell.

    Raises:
        TrainctlError: The checkpoint is of another one, damaged or gone (exit code 5).
    """
    try:
        manifest = read_manifest(path)
    except ValueError as error:
        raise RunStateError(str(error)) from None
    if is_old(manifest):
        warn(
            f"{path.name} was saved by trainctl {manifest.get('trainctl', '')}, which did not note "
            "which run and model it is of: that its tensors have the names and shapes of the "
            "model's is all that can be checked"
        )
    check_model(config.model, path.name, manifest)
    check_trainable(config, path.name, manifest)
    check_optimizer(config, path.name, manifest)


def compare_with_checkpoint(
    run: RunPaths, checkpoint: CheckpointInfo, made: RunPlan, warn: Warn
) -> None:
    """Compare the schedule and data of the next attempt with the training of the checkpoint.

    Raises:
        TrainctlError: The plan extends a stable phase and the checkpoint is already in the decay
            (exit code 5; the hint names the step to resume from), or the data of stages that have
            begun would change (exit code 2).
    """
    file = run.attempt(checkpoint.attempt or last_attempt(run)).plan
    if not file.is_file():
        return
    before, step = read_plan(file), checkpoint.step
    _compare_order(run, checkpoint, before, made, warn)
    back_to = step_before_decay(before, made, step)
    if back_to is not None:
        earlier = [info.step for info in list_checkpoints(run) if info.step <= back_to]
        raise RunStateError(
            f"{checkpoint.path.name} is {step - back_to:,} steps into the decay: the stable phase "
            f"can be made longer from step {back_to:,} or before",
            hint=f"trainctl resume {run.root} --step {earlier[-1]} with the same overrides goes on "
            "from there"
            if earlier
            else "there is no checkpoint so early any more: start a new run with "
            f"model.initial_weights={run.root}, or keep to training.steps={before.total_steps}",
        )
    change = change_of_rate(before, made, step)
    if change is not None:
        warn(
            f"the learning rate of step {change.step:,} is {change.now:.6g}; as it was planned "
            f"before, it was {change.before:.6g}"
        )
    if miscounts_tokens(before, made, step):
        warn(
            f"the {step:,} steps so far had other batches than this plan gives them, and "
            "schedule.unit=tokens counts them: training.batch_ramp can say what they were"
        )


def _compare_order(
    run: RunPaths, checkpoint: CheckpointInfo, before: RunPlan, made: RunPlan, warn: Warn
) -> None:
    """Compare the order of samples with the order before.

    With sources or stages, a change of samples already drawn is refused; for a single text every
    change is a warning.
    """
    manifest = read_manifest(checkpoint.path)
    samples = int(manifest["samples"])
    if any(data.sources or data.stages for data in (before.config.data, made.config.data)):
        _check_trained_batches(run, manifest, made)
        _check_drawn_samples(run, samples, before, made)
        return
    starts = read_events(run.events, "start")
    if not starts:
        return
    for change in changes_of_order(before, made, samples, int(starts[-1]["train_tokens"])):
        warn(change)


def _check_drawn_samples(run: RunPaths, samples: int, before: RunPlan, made: RunPlan) -> None:
    """Refuse a plan that would change samples already drawn.

    Raises:
        TrainctlError: With all such changes.
    """
    from trainctl.data.corpora import load_recorded_corpora
    from trainctl.data.mixture import sample_order
    from trainctl.data.order import incompatible_changes
    from trainctl.data.packing import packed_token_count

    if not run.corpus.is_file():
        return
    corpora = load_recorded_corpora(run.corpus)
    tokens = {name: packed_token_count(made.config, corpus) for name, corpus in corpora.items()}
    if not set(sources_of(made.config.data)) <= set(tokens):
        counts, _ = count_source_tokens(made.config)
        tokens = {name: count.tokens for name, count in counts.items()} | tokens
    packings = [plan.config.data.packing for plan in (before, made)]
    try:
        if samples and packings[0] is not packings[1]:
            changes = [f"data.packing is {packings[1].value}, and it was {packings[0].value}"]
        elif samples and changes_overlong_handling(before.config.data, made.config.data):
            was, now = (plan.config.data.on_too_long.value for plan in (before, made))
            changes = [f"data.on_too_long is {now}, and it was {was}"]
        else:
            changes = list(
                incompatible_changes(
                    sample_order(before, tokens), sample_order(made, tokens), samples
                )
            )
    except (KeyError, ValueError):  # a source is missing or too short, which is reported elsewhere
        return
    if changes:
        raise TrainctlError(
            f"{run.root} has drawn {samples:,} samples, and this would change them: "
            + "; ".join(changes),
            hint="keep data.sources and data.stages as they were up to there, and change what is "
            "still to come: until_step says where a stage that has begun ends, whatever the length "
            "of the run",
        )


def _check_trained_batches(run: RunPaths, manifest: Mapping[str, Any], made: RunPlan) -> None:
    """Refuse a plan with stages whose batches so far differ from those the run has had.

    The beginning of a stage is counted in samples of the plan's batches. Skipped batches are in
    the run's count of samples, but not in its tokens.

    Raises:
        TrainctlError: A stage is still to come, and the steps so far had other batches.
    """
    step, tokens = int(manifest["step"]), int(manifest["tokens"])
    planned = made.batches.tokens_before(step)
    if stages_of_plan(made)[-1].first_step > step and tokens != planned:
        raise TrainctlError(
            f"{run.root} has trained on {tokens:,} tokens in {step:,} steps, and this plan would "
            f"have given them {planned:,}: its stages would not begin at the steps that it says",
            hint="training.batch_ramp can say what the batches so far were, as in "
            f"[{{until_steps: {step}, global_batch_size: NUMBER}}]; or keep "
            "training.global_batch_size",
        )
