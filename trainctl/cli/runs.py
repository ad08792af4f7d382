"""`trainctl runs`: list, inspect, follow, stop and remove runs, by their directories alone."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from trainctl import api
from trainctl.cli.arguments import Json, NamedRuns, Run, open_run_or_newest
from trainctl.cli.console import (
    print_data,
    print_json,
    print_message,
    print_table,
    show_error,
    to_printable,
    tolerate_broken_pipe,
)
from trainctl.cli.progress import PLAIN_TERMINALS, Progress
from trainctl.cli.record_lines import record_lines
from trainctl.config.registry import load_spec
from trainctl.config.schema import RunConfig
from trainctl.errors import ExitCode, MachineError, RunStateError, TrainctlError
from trainctl.launchers.interface import job_log, job_state
from trainctl.launchers.processes import (
    companion_names,
    companion_problem,
    send_rest,
    settle_run,
)
from trainctl.launchers.stop import ask_to_stop, wait_for_end
from trainctl.monitor.loggers.delivery import ALERTS, read_cursor
from trainctl.runs.attempts import config_of
from trainctl.runs.checkpoint_selection import require_no_checkpoint
from trainctl.runs.directory import (
    DEFAULT_ROOT,
    find_runs,
    last_attempt,
    open_or_newest,
    open_run,
    read_plan,
    remove_run,
)
from trainctl.runs.event_descriptions import describe_divergence, describe_straggler
from trainctl.runs.failures import describe_failure, disk_fault, first_failure
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.listing import LOST, NEW, RunSummary, age_text, summarise_run, summarise_runs
from trainctl.runs.logs import LogFollower, cut_line, logs_of, tail_logs
from trainctl.runs.mirror_state import MIRROR, describe_mirror, mirror_text
from trainctl.runs.records import Event, EventFollower, events_from_end, read_events
from trainctl.runs.status import SchedulerJob, State, read_job

_ENDED = (State.finished, State.failed, State.stopped)

LINES = 20
"""Lines shown of each log, and of the records."""

_POLL_SECONDS = 0.2

app = typer.Typer(help="List, follow, stop and remove runs.", add_completion=False)


@app.command("ls")
def list_(
    folder: Annotated[
        Path | None, typer.Argument(metavar="[FOLDER]", help="Folder of runs; default: runs/.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the runs of a folder, oldest first, whatever launcher started them."""
    root = folder or DEFAULT_ROOT
    if folder is not None and not folder.is_dir():
        raise RunStateError(f"{folder} is not a folder")
    runs, damaged = find_runs(root)
    for problem in damaged:
        print_message(f"warning: left out: {problem}", style="warning")
    for run in runs:
        settle_run(run)
    found = summarise_runs(runs)
    if as_json:
        print_json({"schema": 1, "runs": [summary.to_json() for summary in found]})
    elif found:
        _print_table(found)
    else:
        print_message(f"there is no run in {root}")


@app.command()
def status(run: Run = None, as_json: Json = False) -> None:
    """Show how a run stands: state, progress, what failed first, and what to do next."""
    found = open_run_or_newest(run).status
    job = _ask_scheduler(job_state, found.job) if found.state not in _ENDED else None
    if as_json:
        print_json({"schema": 1, **found.to_json(), "job_state": job})
        return
    for line in _status_lines(found, job):
        print_data(line)
    if found.divergence is not None:
        print_data(f"warning: {describe_divergence(found.divergence)}", style="warning")
    for event in found.stragglers:
        print_data(f"slow: {describe_straggler(event)}", style="warning")
    if found.recompilation is not None:
        for line in record_lines(found.recompilation, stop_step=None):
            print_data(f"compiler: {line}", style="warning")
    if found.failure:
        print_data(f"first failure: {describe_failure(found.failure)}", style="error")
        print_data(f"its log: {found.failure['log']}")
    saved = "none yet" if found.checkpoint is None else f"step {found.checkpoint:,}"
    print_data(f"checkpoint: {saved}")
    if found.mirror is not None:
        print_data(f"mirror: {mirror_text(found.mirror)}")
        if found.mirror["problem"]:
            print_data(f"mirror: {to_printable(found.mirror['problem'])}", style="warning")


@app.command()
def logs(
    run: Run = None,
    attempt: Annotated[
        int | None, typer.Option(metavar="N", help="Attempt; default: the newest.")
    ] = None,
    rank: Annotated[
        list[int] | None, typer.Option(metavar="K", help="Show only this rank; may be repeated.")
    ] = None,
    lines: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of lines from the end of each log.")
    ] = LINES,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the logs until the run has ended.")
    ] = False,
) -> None:
    """Print the records of a run (its losses), and the logs of its ranks, each with its node.

    The first error comes first.
    """
    paths = open_or_newest(run)
    number = attempt if attempt is not None else last_attempt(paths)
    chosen = paths.attempt(number)
    if not chosen.root.is_dir():
        there = last_attempt(paths)
        raise RunStateError(
            f"{paths.root} has no attempt {number}",
            hint=f"attempts: 1 to {there}" if there else "nothing of it was started yet",
        )
    failure = first_failure(read_events(paths.events, "failure"), number)
    if failure is not None and not rank:
        _show_failure(failure)
    follower = LogFollower(chosen, rank or ())
    records, stop_step = EventFollower(paths.events, number), _stop_step(chosen)
    if not rank:
        _show_records(paths, chosen, lines)
    found = logs_of(chosen, rank or ())
    for log, tail in tail_logs(found, lines):
        print_data(f"==> {log.label}: {log.path}")
        for line in tail:
            print_data(to_printable(line))
    output = _ask_scheduler(job_log, read_job(chosen)) if not rank else None
    if output:
        print_data("==> job:")
        for line in output.splitlines()[-lines:]:
            print_data(to_printable(line))
    elif not found:
        print_message(f"attempt {number} has no such log yet")
    while follow:
        ended = not _may_still_log(paths, chosen)
        for event in records.poll() if not rank else []:
            for line in record_lines(event, stop_step=stop_step):
                print_data(f"records: {cut_line(line)}")
        for log, line in follower.poll():
            print_data(f"{log.label}: {to_printable(line)}")
        if ended:
            return
        time.sleep(_POLL_SECONDS)


def _ask_scheduler(
    question: Callable[[SchedulerJob], str | None], job: SchedulerJob | None
) -> str | None:
    """Return a scheduler's answer about a job; None, with a warning, if it gives none."""
    try:
        return None if job is None else question(job)
    except TrainctlError as error:
        print_message(f"warning: {error.message}", style="warning")
        return None


def _show_records(run: RunPaths, attempt: AttemptPaths, most: int) -> None:
    stop_step = _stop_step(attempt)
    shown: list[str] = []  # newest first
    for event in events_from_end(run.events):
        # A sample's text would push out the rest.
        if event["attempt"] == attempt.number and event["event"] != "sample":
            shown += reversed(record_lines(event, stop_step=stop_step))
        if len(shown) >= most:
            break
    if shown:
        print_data(f"==> records: {run.events}")
    for line in reversed(shown[:most]):
        print_data(cut_line(line))


def _stop_step(attempt: AttemptPaths) -> int | None:
    try:
        return read_plan(attempt.plan).stop_step
    except (OSError, ValueError, TrainctlError):
        return None


@app.command()
def stop(
    runs: NamedRuns,
    now: Annotated[
        bool, typer.Option("--now", help="Kill the run at once, without saving.")
    ] = False,
    wait: Annotated[bool, typer.Option(help="Wait until the run has ended.")] = True,
) -> None:
    """Have runs save at their next step and end, on whatever machines they train.

    Example: trainctl runs stop runs/NAME
    """
    tolerate_broken_pipe()
    opened = [open_run(run) for run in runs]
    live = [paths for paths in opened if summarise_run(paths).is_live]
    for paths in live:
        print_message(f"{paths.root}: {ask_to_stop(paths, now=now)}")
    for paths in live if wait else []:
        ended = wait_for_end(paths, now=now)
        print_data(f"{paths.root}: {ended.state}" + (f", {ended.message}" if ended.message else ""))
    idle = [paths for paths in opened if paths not in live]
    if idle:
        names = ", ".join(str(paths.root) for paths in idle)
        raise RunStateError(f"not running: {names}")


@app.command()
def rm(
    runs: NamedRuns,
    force: Annotated[
        bool, typer.Option("--force", help="Remove the run even if it has a complete checkpoint.")
    ] = False,
) -> None:
    """Remove whole run directories; never one that is in use or waits in a queue.

    Example: trainctl runs rm runs/NAME
    """
    tolerate_broken_pipe()
    opened = [open_run(run) for run in runs]
    for paths in opened:
        summary = summarise_run(paths)
        if summary.is_live:
            raise RunStateError(
                f"{paths.root} is {summary.state}",
                hint=f"stop it first: trainctl runs stop {paths.root}",
            )
        if not force:
            require_no_checkpoint(paths)
    for paths in opened:
        remove_run(paths)
        print_data(f"removed {paths.root}")


@app.command()
def attach(run: Run = None, as_json: Json = False) -> None:
    """Show a running run as `launch` does, until it ends; exits with its exit code.

    Ctrl-C ends the view, and the run goes on.
    """
    code = follow_run(open_run_or_newest(run), as_json=as_json)
    if code:
        raise typer.Exit(code)


@app.command()
def follow(run: Run = None) -> None:
    """Draw the curves of a run in the terminal, until it ends; also of one that has ended.

    Ctrl-C ends the view, and the run goes on. Where stdout is no terminal it prints the last
    records, then those to come.
    """
    opened = open_run_or_newest(run)
    if _can_redraw():
        from trainctl.cli.curves_view import follow_curves

        follow_curves(opened.paths)
        return
    attempt = opened.paths.attempt(last_attempt(opened.paths))
    records, stop_step = opened.follow(from_start=False), _stop_step(attempt)
    _show_records(opened.paths, attempt, LINES)
    for event in records:
        for line in record_lines(event, stop_step=stop_step):
            print_data(line)


def _can_redraw() -> bool:
    return sys.stdout.isatty() and os.environ.get("TERM") not in PLAIN_TERMINALS


@app.command()
def sync(
    runs: NamedRuns,
    to: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Logger to send to instead of those in logging.to, or mirror; may be repeated.",
        ),
    ] = None,
    again: Annotated[
        bool,
        typer.Option(
            "--again", help="Send everything from the first step, even what was already sent."
        ),
    ] = False,
) -> None:
    """Send to the loggers and the mirror what was not sent while a run trained.

    On any machine that sees the run. A step that was sent is not sent again.

    Example: trainctl runs sync runs/NAME --to wandb
    """
    for name in to or []:
        if name not in (ALERTS, MIRROR):
            load_spec("logger", name)
    failed = []
    for paths in [open_run(run) for run in runs]:
        config = config_of(paths)
        names = to or companion_names(config, with_alerts=False)
        if not names:
            print_message(f"{paths.root}: it has no logger in logging.to; name one with --to")
        failed += [
            f"{paths.root.name}: {name}"
            for name in names
            if not _send_rest(paths, name, config, again)
        ]
    if failed:
        raise MachineError(
            f"not everything was sent: {', '.join(failed)}",
            hint="repeat the command when what is in the way is gone",
        )


def _send_rest(run: RunPaths, name: str, config: RunConfig, again: bool) -> bool:
    """Send to one logger, or to the mirror, and print how far it is.

    Returns:
        Whether it has everything, or another process is sending.
    """
    code = send_rest(run, name, config, again=again)
    if code == ExitCode.run_state:
        print_message(f"{run.root}: another process sends to {name} now", style="warning")
        return True
    if name == MIRROR:
        mirror = describe_mirror(run, config.checkpoint)
        print_data(f"{run.root}: {mirror_text(mirror) if mirror else 'it has no mirror'}")
    else:
        step = read_cursor(run.companion(name).cursor).step
        print_data(f"{run.root}: {name} is at step {max(0, step):,}")
    if code:
        why = companion_problem(run, name) or f"its process ended with {code}"
        print_message(f"{run.root}: {name}: {why}; see {run.companion(name).log}", style="error")
    return code == ExitCode.success


def _print_table(found: list[RunSummary]) -> None:
    heads = ("run", "state", "step", "loss", "attempt", "launcher", "nodes", "updated")
    rows = [
        (
            summary.path.name,
            summary.shown_state,
            _progress_cell(summary),
            f"{summary.loss:.4f}" if summary.loss is not None else "-",
            str(summary.attempt),
            f"{summary.launcher} {summary.job.id}" if summary.job else summary.launcher,
            str(summary.nodes),
            f"{age_text(summary.updated)} ago",
        )
        for summary in found
    ]
    print_table(heads, rows, right=(2, 3, 4, 6), wraps=False)


def _progress_cell(summary: RunSummary) -> str:
    cut = " (records are missing)" if summary.missing_records else ""
    steps = summary.total_steps or summary.stop_step
    return f"{summary.step}/{steps}{cut}" if steps else "-"


def _why_lost(summary: RunSummary) -> str:
    """Return why a run that is not running has recorded no end, and how it goes on."""
    fault = disk_fault(summary.path)
    if fault is not None:
        return f"nothing can be written to {summary.path} ({fault.words}): {fault.hint}"
    return "launcher and agent were ended at one blow; `trainctl resume` goes on"


def _status_lines(summary: RunSummary, job_state: str | None) -> list[str]:
    ended = f", exit code {summary.exit_code}" if summary.exit_code is not None else ""
    lines = [f"run: {summary.path}", f"state: {summary.shown_state}{ended}"]
    if summary.message:
        lines.append(f"why: {summary.message}")
    if summary.state == LOST:
        lines.append(f"why: {_why_lost(summary)}")
    if summary.stop_step:
        loss = f", loss {summary.loss:.4f}" if summary.loss is not None else ""
        steps = summary.total_steps or summary.stop_step
        ends = f" (this launch ends at {summary.stop_step:,})" if summary.stop_step != steps else ""
        lines.append(f"progress: step {summary.step:,} of {steps:,}{ends}{loss}")
    if summary.is_cut_short:
        lines.append("why: training.stop_after_steps ended it; `trainctl resume` goes on")
    if summary.missing_records:
        lines.append(f"records are missing in events.jsonl: {summary.missing_records}")
    where = f" from {summary.host}" if summary.host else ""
    lines.append(
        f"attempt: {summary.attempt}, launcher {summary.launcher or 'none'}{where}, "
        f"{summary.nodes} x {summary.ranks // summary.nodes} processes"
    )
    if summary.job:
        told = f": {job_state}" if job_state else ""
        lines.append(f"job: {summary.job.id} ({summary.job.kind}){told}")
    if summary.holder:
        lines.append(f"held by: process {summary.holder.pid} on {summary.holder.host}")
    return [*lines, f"updated: {age_text(summary.updated)} ago"]


def _show_failure(failure: Event) -> None:
    print_data(f"first failure: {describe_failure(failure)}", style="error")
    for line in failure["log_tail"]:
        print_data(f"  {to_printable(line)}")


def _may_still_log(run: RunPaths, attempt: AttemptPaths) -> bool:
    return last_attempt(run) == attempt.number and summarise_run(run).is_live


def follow_run(run: api.Run, *, as_json: bool) -> int:
    """Show all records of the newest attempt, and new ones until the run ends.

    Returns:
        The run's exit code.

    Raises:
        TrainctlError: The run was never started, or its launcher and agent are gone (exit code 5).
    """
    summary = summarise_run(run.paths)
    if summary.state == NEW and not summary.is_live:
        raise RunStateError(
            f"nothing of {run.path} was started yet", hint=f"trainctl resume {run.path} starts it"
        )
    first = last_attempt(run.paths)
    plan = read_plan(run.paths.attempt(first).plan)
    if not as_json:
        print_data(f"run directory: {run.path}")
        if summary.state == "queued":
            print_message(f"job {summary.job.id if summary.job else '?'} waits in its queue")
    every = plan.config.logging.every_steps
    with Progress(
        stop_step=plan.stop_step, every_steps=every, as_json=as_json, run=run.paths, attempt=first
    ) as progress:
        for event in run.follow():
            progress(event)
    summary = summarise_run(run.paths)
    if summary.state == LOST:
        raise RunStateError(
            f"{run.path}: {_why_lost(summary).partition(';')[0]}",
            hint=f"trainctl resume {run.path} goes on from its newest checkpoint",
        )
    if summary.exit_code:
        show_error(summary.message)
    elif summary.message:
        print_message(summary.message)
    return summary.exit_code or 0
