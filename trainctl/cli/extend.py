"""Checks of a resume against its checkpoint: learning rate and order of samples.

Each change is refused, or a warning says what it does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainctl.cli.console import say
from trainctl.data.source_lengths import count_source_tokens
from trainctl.errors import ExitCode, TrainctlError
from trainctl.plan.extension import change_of_rate, miscounts_tokens, step_before_decay
from trainctl.plan.mixture import sources_of, stages_of_plan
from trainctl.plan.sample_order import changes_of_order, changes_overlong_handling
from trainctl.plan.types import RunPlan
from trainctl.runs.checkpoints import CheckpointInfo, list_checkpoints
from trainctl.runs.directory import last_attempt, read_plan
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import read_manifest
from trainctl.runs.records import read_events


def compare_with_checkpoint(run: RunPaths, checkpoint: CheckpointInfo, made: RunPlan) -> None:
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
    _compare_order(run, checkpoint, before, made)
    back_to = step_before_decay(before, made, step)
    if back_to is not None:
        earlier = [info.step for info in list_checkpoints(run) if info.step <= back_to]
        raise TrainctlError(
            f"{checkpoint.path.name} is {step - back_to:,} steps into the decay: the stable phase "
            f"can be made longer from step {back_to:,} or before",
            hint=f"trainctl resume {run.root} --step {earlier[-1]} with the same overrides goes on "
            "from there"
            if earlier
            else "there is no checkpoint so early any more: start a new run with "
            f"model.initial_weights={run.root}, or keep to training.steps={before.total_steps}",
            exit_code=ExitCode.run_state,
        )
    change = change_of_rate(before, made, step)
    if change is not None:
        say(
            f"warning: the learning rate of step {change.step:,} is {change.now:.6g}; as it was "
            f"planned before, it was {change.before:.6g}",
            style="warning",
        )
    if miscounts_tokens(before, made, step):
        say(
            f"warning: the {step:,} steps so far had other batches than this plan gives them, and "
            "schedule.unit=tokens counts them: training.batch_ramp can say what they were",
            style="warning",
        )


def _compare_order(
    run: RunPaths, checkpoint: CheckpointInfo, before: RunPlan, made: RunPlan
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
        say(f"warning: {change}", style="warning")


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
