"""What a resume does to the learning rate and to the order of the samples: refused, or said."""

from __future__ import annotations

from trainctl.cli.console import say
from trainctl.errors import ExitCode, TrainctlError
from trainctl.plan.extension import change_of_rate, miscounts_tokens, step_before_decay
from trainctl.plan.sample_order import changes_of_order
from trainctl.plan.types import RunPlan
from trainctl.runs.checkpoints import CheckpointInfo, list_checkpoints
from trainctl.runs.directory import last_attempt, read_plan
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import read_manifest
from trainctl.runs.records import read_events


def compare_with_checkpoint(run: RunPaths, checkpoint: CheckpointInfo, made: RunPlan) -> None:
    """Compare the schedule and data of a plan with those that a checkpoint was trained with.

    Args:
        run: The run.
        checkpoint: That the plan goes on from.
        made: The plan of the next attempt.

    Raises:
        TrainctlError: The plan makes a stable phase longer, and the checkpoint lies behind its end
            (exit code 5); names the step to go back to.
    """
    file = run.attempt(checkpoint.attempt or last_attempt(run)).plan
    if not file.is_file():
        return
    before, step = read_plan(file), checkpoint.step
    _say_order(run, checkpoint, before, made)
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


def _say_order(run: RunPaths, checkpoint: CheckpointInfo, before: RunPlan, made: RunPlan) -> None:
    """Say what the plan does to the order of the samples."""
    starts = read_events(run.events, "start")
    if not starts:
        return
    samples, tokens = read_manifest(checkpoint.path)["samples"], starts[-1]["train_tokens"]
    for change in changes_of_order(before, made, int(samples), int(tokens)):
        say(f"warning: {change}", style="warning")
