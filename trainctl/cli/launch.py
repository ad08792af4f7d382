"""`trainctl launch` and `trainctl resume`: plan, check, start, watch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Annotated, Literal

import typer

from trainctl import api
from trainctl.cli.arguments import (
    AttemptOption,
    ConfigDir,
    Detach,
    DryRun,
    Force,
    Json,
    RecipeAndOverrides,
    TargetAndOverrides,
    Verbose,
)
from trainctl.cli.console import (
    Meter,
    findings_to_json,
    print_data,
    print_json,
    print_message,
    print_warning,
    show_error,
    show_explain_hint,
    show_findings,
    tolerate_broken_pipe,
)
from trainctl.cli.main import script_arguments
from trainctl.cli.plan_view import (
    show_brief_budget,
    show_budget,
    show_commands,
    show_plan,
    show_suggestions,
)
from trainctl.cli.progress import LiveFollower, Progress
from trainctl.config.codec import to_plain
from trainctl.config.overrides import split_target
from trainctl.config.schema import RunConfig
from trainctl.errors import ExitCode, Finding, TrainctlError
from trainctl.launchers.interface import Outcome, has_scheduler, render_next
from trainctl.launchers.planning import PlannedConfig
from trainctl.launchers.processes import Process
from trainctl.launchers.resume import PlannedResume
from trainctl.launchers.start import Observer, check_machine
from trainctl.plans.types import RunPlan
from trainctl.readers.remote import is_url
from trainctl.runs.attempts import changes_text, find_attempt
from trainctl.runs.command import command_record
from trainctl.runs.directory import DEFAULT_ROOT, last_attempt
from trainctl.runs.event_descriptions import (
    describe_divergence,
    describe_straggler,
    still_diverged,
    still_slow,
)
from trainctl.runs.layout import AttemptPaths, RunPaths
from trainctl.runs.listing import ResumePoint
from trainctl.runs.records import OnEvent, read_events
from trainctl.runs.status import State

FetchedRunDir = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Directory to make from a mirror's URL; default: runs/ and the run's name.",
    ),
]


def launch(
    context: typer.Context,
    overrides: RecipeAndOverrides = None,
    dry_run: DryRun = False,
    force: Force = False,
    run_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Run directory; default: a new one under runs/."),
    ] = None,
    resume: Annotated[
        Literal["auto", "never"],
        typer.Option(help="auto: resume if the run directory has a checkpoint, otherwise start."),
    ] = "never",
    config_dir: ConfigDir = None,
    detach: Detach = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Check a configuration against the hardware, then train.

    Examples: trainctl launch tiny training.steps=200 optimizer.lr=1e-3;
    trainctl launch script=train.py recipe=7b-zero3 -- --its --own arguments
    """
    target, _ = split_target(overrides)
    if target is not None and find_attempt(Path(target)) is not None:
        raise TrainctlError(
            f"{target} is a run, and launch makes a new one",
            hint=f"trainctl resume {target} continues it",
        )
    if not dry_run:
        tolerate_broken_pipe()
    api.launch(
        *(overrides or ()),
        run_dir=run_dir,
        resume=resume == "auto",
        force=force,
        wait=not detach,
        progress=LaunchView(
            as_json=as_json, verbose=verbose, force=force, dry_run=dry_run, run_dir=run_dir
        ),
        config_dir=config_dir,
        script_arguments=script_arguments(context),
        argv=sys.argv,
    )


def resume(
    context: typer.Context,
    run: TargetAndOverrides = None,
    step: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Checkpoint after N steps; later ones are set aside. Default: the newest.",
        ),
    ] = None,
    from_start: Annotated[
        bool,
        typer.Option(
            "--from-start", help="Start from the beginning and set existing checkpoints aside."
        ),
    ] = False,
    attempt: AttemptOption = None,
    prove: Annotated[
        bool,
        typer.Option(
            "--prove",
            help="First replay a step with and without the changes; refuse if they differ.",
        ),
    ] = False,
    run_dir: FetchedRunDir = None,
    dry_run: DryRun = False,
    force: Force = False,
    config_dir: ConfigDir = None,
    detach: Detach = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Continue a run (the newest, if none is named) from its newest complete checkpoint.

    One that was stopped before its first checkpoint begins again, as it was configured. A script is
    started again as it was; words after -- replace its arguments. The URL of a mirror
    (checkpoint.mirror) makes the run's directory anew on this machine.

    Examples: trainctl resume runs/NAME training.steps=400; trainctl resume s3://bucket/runs/NAME
    """
    target, overrides = split_target(run)
    if not dry_run:
        tolerate_broken_pipe()
    view = LaunchView(as_json=as_json, verbose=verbose, force=force, dry_run=dry_run, run_dir=None)
    asked = {"dry_run": dry_run, "prove": prove, "as_json": as_json}
    with _fetched(context, target, run_dir, step, **asked) as fetched:
        api.resume(
            fetched,
            *overrides,
            step=step,
            attempt=attempt,
            from_start=from_start,
            prove_first=prove,
            force=force,
            wait=not detach,
            progress=view,
            config_dir=config_dir,
            script_arguments=script_arguments(context),
            run_dir=None if target is not None and is_url(target) else run_dir,
        )


@contextmanager
def _fetched(
    context: typer.Context,
    target: str | None,
    run_dir: Path | None,
    step: int | None,
    *,
    dry_run: bool,
    prove: bool,
    as_json: bool,
) -> Iterator[api.Run | str]:
    """Give the run that is fetched from a URL, and say where it is; a path as it is.

    A dry run gets a temporary copy without tensors, with which a proof cannot begin.
    """
    trusts = context.find_root().params["trust_code"]
    if target is None:
        yield api.Run.newest()
    elif not is_url(target):
        yield target
    elif dry_run and prove:
        raise TrainctlError(
            "--prove needs the weights, and --dry-run of a URL fetches none",
            hint="leave one of them out",
        )
    elif dry_run:
        with api.opened_run(target, step=step, trust_code=trusts, weights=False) as copy:
            print_message(f"{copy.path} is a copy without weights, which is removed")
            yield copy
    else:
        with Meter() as meter:
            run = api.fetch(target, run_dir, step=step, trust_code=trusts, progress=meter)
        if not as_json:
            print_data(f"fetched {target} to {run.path}")
        yield run


def program_name(config: RunConfig) -> str:
    return Path(config.script).name if config.script is not None else str(config.trainer)


class LaunchView(Observer):
    """Prints the phases of a launch or a resume as they are reached; exits as the launch did.

    Args:
        verbose: Show the whole plan and budget. Otherwise a brief form keeps what follows on the
            screen, unless the budget does not fit.
        dry_run: Print the commands in place of a start.
    """

    def __init__(
        self, *, as_json: bool, verbose: bool, force: bool, dry_run: bool, run_dir: Path | None
    ) -> None:
        super().__init__()
        self._as_json, self._verbose, self._force = as_json, verbose or dry_run, force
        self._dry_run, self._run_dir = dry_run, run_dir

    def warn(self, text: str) -> None:
        print_warning(text)

    def proving(self, text: str) -> None:
        print_message(text)

    def found(self, findings: Sequence[Finding]) -> None:
        show_findings(findings)

    def changes(self, run: RunPaths, resume: PlannedResume) -> None:
        is_last = resume.continues == last_attempt(run)
        since = "the last attempt" if is_last else f"attempt {resume.continues}"
        if not resume.changes:
            print_message(f"configuration: unchanged since {since}")
        for change in resume.changes:
            print_message(f"changed since {since}: {changes_text([change])}")

    def nothing_to_do(self, why: str, hint: str) -> None:
        print_message(f"nothing to do: {why}")
        print_message(f"hint: {hint}")

    def planned(self, planned: PlannedConfig) -> None:
        plan, budget = planned.plan, planned.budget
        is_brief = not self._verbose and not planned.errors
        if not self._as_json:
            show_plan(plan, planned.data, brief=is_brief)
        if not self._as_json and is_brief:
            show_brief_budget(budget.to_json())
            print_data("--verbose shows the reasons and the whole budget")
        elif not self._as_json:
            show_budget(budget.to_json(), host_capacity_bytes=planned.hardware.host_memory_bytes)
        show_findings(planned.findings)
        if planned.errors or planned.may_not_fit:
            show_suggestions(planned)
        if not planned.errors or self._force:
            for technique in plan.not_yet:
                print_message(f"error: {technique}", style="error")

    def accepted(
        self,
        planned: PlannedConfig,
        plan: RunPlan,
        run: RunPaths | None,
        resume: PlannedResume | None,
    ) -> None:
        if run is not None and resume is not None:
            print_message(_resume_message(run, plan, resume))
        if self._dry_run:
            if run is None and has_scheduler(plan.config):  # which does not look at this machine
                folder = self._run_dir or DEFAULT_ROOT
                check_machine(planned, plan, folder, self, is_dry_run=True)
            where = run or RunPaths(self._run_dir.resolve() if self._run_dir else Path("runs/NEW"))
            show_start(planned, plan, where, as_json=self._as_json)
            raise typer.Exit

    def left_behind(self, path: Path) -> None:
        print_message(f"left behind: {path}")

    def made(self, run: RunPaths) -> None:
        if not self._as_json:
            print_data(f"run directory: {run.root}")

    def records(
        self, run: RunPaths, attempt: AttemptPaths, plan: RunPlan
    ) -> AbstractContextManager[OnEvent]:
        if not plan.config.trains_itself and not self._as_json:
            return LiveFollower(run)
        return Progress(
            stop_step=plan.stop_step,
            every_steps=plan.config.logging.every_steps,
            as_json=self._as_json,
            run=run,
            attempt=attempt.number,
        )

    def detached(self, run: RunPaths, process: Process) -> None:
        if self._as_json:
            print_json({"schema": 1, "run": str(run.root), "pid": process.pid})
        print_message(
            f"detached: `trainctl runs attach {run.root}` shows it, `trainctl runs stop` ends it"
        )

    def ended(self, run: RunPaths, plan: RunPlan, outcome: Outcome) -> None:
        _show_warnings(run)
        if outcome.state is State.failed:
            _show_failure(outcome)
        elif outcome.message:
            print_message(outcome.message)
        if not self._as_json and not outcome.exit_code:
            print_data(f"run directory: {run.root}")
        # A run whose own files were refused cannot be resumed: the hint says what to do.
        is_cut = outcome.state in (State.failed, State.stopped)
        if is_cut and outcome.exit_code != ExitCode.run_state:
            _show_resume_hint(run, plan)
        if outcome.exit_code:
            raise typer.Exit(outcome.exit_code)


def _show_warnings(run: RunPaths) -> None:
    """Repeat warnings that still hold at the end: they were first shown maybe days ago."""
    told, attempt = read_events(run.events, "straggler", "divergence"), last_attempt(run)
    diverged = still_diverged(told, attempt)
    if diverged is not None:
        print_message(f"warning: {describe_divergence(diverged)}", style="warning")
    for event in still_slow(told, attempt):
        print_message(f"slow: {describe_straggler(event)}", style="warning")


def _show_failure(outcome: Outcome) -> None:
    if outcome.log_tail:
        print_message(f"the end of {outcome.log}:")
        for line in outcome.log_tail:
            print_message(f"  {line}")
    show_error(outcome.message, outcome.hint)
    show_explain_hint([outcome.cause or str(outcome.exit_code)])


def _show_resume_hint(run: RunPaths, made: RunPlan) -> None:
    if made.config.trains_itself:
        print_message(ResumePoint.of(run).sentence(run))
    else:
        print_message(f"trainctl resume {run.root} starts {program_name(made.config)} again")


def show_start(planned: PlannedConfig, made: RunPlan, run: RunPaths, *, as_json: bool) -> None:
    """Print the commands of a dry run; with `as_json` also plan and budget, as one document."""
    rendered = render_next(made, run)
    if not as_json:
        show_commands(rendered.commands)
        for name, text in rendered.files.items():
            print_data(f"{name}:\n{text}")
        return
    assert planned.assessment.budget is not None
    print_json(
        {
            "schema": 1,
            "plan": to_plain(made),
            "budget": planned.assessment.budget.to_json(),
            "findings": findings_to_json(planned.findings),
            "command": command_record(rendered.command),
            "commands": [list(argv) for argv in rendered.commands],
            "files": dict(rendered.files),
        }
    )


def _resume_message(run: RunPaths, plan: RunPlan, resume: PlannedResume) -> str:
    if not plan.config.trains_itself:
        return f"starting {program_name(plan.config)} of {run.root} again"
    where = "the beginning" if resume.from_start else "the beginning: there is no checkpoint yet"
    return f"resuming {run.root} from {resume.checkpoint.path.name if resume.checkpoint else where}"
