"""Tests of the rendered Slurm script, step and value checks, without Slurm."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from trainctl.config.compose import compose
from trainctl.hardware import resolve_hardware
from trainctl.launchers import slurm
from trainctl.launchers.interface import AttemptRequest
from trainctl.plans.types import RunPlan
from trainctl.rules.resolve import resolve
from trainctl.runs.layout import RunPaths

HOSTILE = RunPaths(Path("/runs/a $(id) `id` 'q\" %j\\;#"))


def make_plan(*overrides: str) -> RunPlan:
    words = ("recipe=tiny", "training.global_batch_size=64", "hardware=2x8xh100-80g")
    config = compose([*words, "launcher=slurm", *overrides]).config
    plan = resolve(config, resolve_hardware(config.hardware)).plan
    assert plan is not None
    return plan


def render(plan: RunPlan, run: RunPaths, **environment: str) -> slurm.RenderedLaunch:
    start = AttemptRequest(
        plan=plan, run=run, attempt=run.attempt(1), environment=environment, cores=8
    )
    return slurm.render(start)


@pytest.mark.parametrize(
    ("listed", "names"),
    [
        ("", []),
        ("login", ["login"]),
        ("gpu[01-03,7],login", ["gpu01", "gpu02", "gpu03", "gpu7", "login"]),
        ("a[08-10]-x,b", ["a08-x", "a09-x", "a10-x", "b"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
    ],
)
def test_lists_of_nodes(listed: str, names: list[str]) -> None:
    assert slurm.node_names(listed) == names


def test_the_script_says_what_the_job_needs() -> None:
    plan = make_plan(
        "launcher.slurm_partition=gpu",
        "launcher.slurm_account=proj",
        "launcher.slurm_qos=high",
        "launcher.slurm_constraint='a|b'",
        "launcher.slurm_time_minutes=90",
        "launcher.slurm_dependency='afterok:4711'",
        "launcher.slurm_requeue=false",
        "launcher.slurm_modules=[cuda/12.8]",
        "launcher.slurm_options=['--exclude=node7']",
        "launcher.stop_grace_seconds=60",
    )
    lines = render(plan, RunPaths(Path("/runs/r"))).files["job.sh"].splitlines()
    for option in (
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--partition=gpu",
        "--account=proj",
        "--qos=high",
        "--constraint=a|b",
        "--time=90",
        "--dependency=afterok:4711",
        "--output=/runs/r/attempts/1/logs/launcher.log",
        "--exclusive",
        "--no-requeue",
        "--signal=B:TERM@75",
        "--exclude=node7",
    ):
        assert f"#SBATCH {option}" in lines, option
    assert "module load cuda/12.8 || exit 4" in lines
    assert lines[-1].endswith("-P -m trainctl.launchers /runs/r --attempt 1")


def test_a_hostile_folder_is_one_word_to_the_shell(tmp_path: Path) -> None:
    for text in (
        render(make_plan(), HOSTILE).files["job.sh"],
        slurm.array_script(make_plan(), HOSTILE.root, tasks=range(3), parallel=2),
    ):
        # The same script with a command in place of the launcher that prints its words.
        last = text.splitlines()[-1].replace("exec ", "exec printf '%s\\n' ", 1)
        (tmp_path / "job.sh").write_text(f"{text.rpartition('exec')[0]}\n{last}\n")
        done = subprocess.run(
            ["bash", "job.sh"],
            cwd=tmp_path,
            env={"SLURM_ARRAY_TASK_ID": "2", "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=True,
        )
        words = done.stdout.splitlines()
        assert words[4] in (str(HOSTILE.root), f"{HOSTILE.root}/2") and done.stderr == ""
        outputs = [line for line in text.splitlines() if line.startswith("#SBATCH --output=")]
        assert len(outputs) == 1 and "%%j" in outputs[0] and '\\"' in outputs[0]


def test_an_array_has_a_log_for_each_task() -> None:
    text = slurm.array_script(make_plan(), Path("/sweeps/s"), tasks=range(4), parallel=2)
    assert "#SBATCH --array=0-3%2\n" in text
    assert "#SBATCH --output=/sweeps/s/%a/attempts/1/logs/launcher.log\n" in text


def test_inside_a_job_a_step_is_started() -> None:
    job = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "n[5-6]", "SLURM_CPUS_ON_NODE": "32"}
    plan = make_plan(
        "launcher.slurm_container=image.sqsh", "launcher.slurm_container_mounts=[/data:/data]"
    )
    rendered = render(plan, RunPaths(Path("/runs/r")), **job)
    (argv,) = rendered.commands
    assert argv[0] == "srun" and "--kill-on-bad-exit=1" in argv
    assert "--container-mounts=/runs/r:/runs/r,/data:/data" in argv
    command = rendered.command
    assert [node.host for node in command.nodes] == ["n5", "n6"]
    assert command.address == "n5" and command.port == 20_000 + 4711
    assert command.nodes[0].environment["OMP_NUM_THREADS"] == "4"
    assert command.nodes[0].environment["TRAINCTL_SIGTERM_SAVES"] == "1"
    at_once = render(make_plan("launcher.stop_grace_seconds=0"), RunPaths(Path("/r")), **job)
    assert "TRAINCTL_SIGTERM_SAVES" not in at_once.command.nodes[0].environment


@pytest.mark.parametrize(
    ("override", "folder", "rule"),
    [
        ("launcher.slurm_partition='a b'", "/r", "TC160"),
        ('launcher.slurm_account="a\nb"', "/r", "TC160"),
        ("launcher.slurm_qos='$(id)'", "/r", "TC160"),
        ("launcher.slurm_modules=['-x']", "/r", "TC160"),
        ("launcher.slurm_options=['-pfoo']", "/r", "TC160"),
        ("launcher.slurm_options=['--wrap=`id`']", "/r", "TC160"),
        ("launcher.slurm_options=['--arr=0-3','--nodelist=a']", "/r", "TC512"),
        ("launcher.slurm_partition=a", "/r\n#SBATCH --wrap=id", "TC161"),
    ],
)
def test_what_could_be_more_than_a_word_is_refused(override: str, folder: str, rule: str) -> None:
    assert [f.rule for f in slurm.check(make_plan(override), Path(folder), None)] == [rule]
    assert not slurm.check(make_plan(), Path("/r"), None)
