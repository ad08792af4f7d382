"""Tasks for SkyPilot: valid by its own code, inert whatever values hold; and new machines."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from commands import TINY, curve, events, live_processes, trainctl
from mirrors import drain, mirrored_run, save_steps

from trainctl.config.compose import compose
from trainctl.errors import MachineError
from trainctl.hardware import resolve_hardware
from trainctl.launchers import skypilot
from trainctl.launchers.interface import AttemptRequest
from trainctl.launchers.kubernetes import job_name
from trainctl.launchers.pod import restore_run
from trainctl.mirror.uploader import Uploader
from trainctl.plans.types import RunPlan
from trainctl.rules.resolve import resolve
from trainctl.runs.checkpoints import newest_checkpoint
from trainctl.runs.directory import create_run, is_run, last_attempt, new_attempt, read_plan
from trainctl.runs.layout import RunPaths
from trainctl.runs.status import SchedulerJob, read_job

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-skypilot" / "bin" / "python"
RUN = RunPaths(Path("/data/runs/First Run_1"))
MIRROR = "checkpoint.mirror=s3://bucket/runs/first"
SETUP = "launcher.skypilot_setup=['pip install trainctl.whl']"
VOLUME = ("launcher.skypilot_volumes={/mnt/runs: shared}", "launcher.skypilot_folder=/mnt/runs")
VALIDATE = """
import json, sys
import sky

found = []
for path in sys.argv[1:]:
    try:
        task = sky.Task.from_yaml(path)
    except Exception as error:
        found.append(str(error))
        continue
    (resources,) = task.resources
    found.append({
        "nodes": task.num_nodes,
        "accelerators": resources.accelerators,
        "spot": resources.use_spot,
        "recovery": resources.job_recovery,
        "mounts": task.file_mounts,
        "volumes": task.volumes,
    })
print("FOUND " + json.dumps(found))
"""


@cache
def make_plan(*overrides: str) -> RunPlan:
    config = compose(["recipe=tiny", "launcher=skypilot", *overrides]).config
    plan = resolve(config, resolve_hardware(config.hardware)).plan
    assert plan is not None
    return plan


def rendered(plan: RunPlan, run: RunPaths = RUN, **environment: str) -> Any:
    return skypilot.render(
        AttemptRequest(plan=plan, run=run, attempt=run.attempt(1), environment=environment, cores=8)
    )


HOSTILE = RunPaths(Path("/data/$(id) `id` 'q\" \n- x: {{ y }} #"))


def spot_plan() -> RunPlan:
    return make_plan(
        "hardware=2x8xh100-80g",
        "training.global_batch_size=64",
        "launcher.skypilot_infra=aws/us-east-1",
        "launcher.skypilot_use_spot=true",
        "launcher.skypilot_resources={disk_size: '500', cpus: 64+}",
        "launcher.max_restarts=3",
        "launcher.environment.HF_TOKEN='${oc.env:HF_TOKEN}'",
        SETUP,
        *VOLUME,
    )


def test_a_task_recovers_with_75_and_has_no_secret() -> None:
    found = rendered(spot_plan(), HF_TOKEN="canary", NCCL_DEBUG="INFO")
    task, name = yaml.safe_load(found.files[skypilot.TASK]), job_name(RUN)
    assert task["resources"] == {
        "infra": "aws/us-east-1",
        "accelerators": {"H100": 8},
        "use_spot": True,
        "job_recovery": {"recover_on_exit_codes": [75], "max_restarts_on_errors": 3},
        "disk_size": "500",
        "cpus": "64+",
    }
    copy = f"~/.trainctl-copies/{name}"
    assert (task["file_mounts"], task["num_nodes"]) == ({copy: str(RUN.root)}, 2)
    assert task["run"] == (
        f"exec python -P -m trainctl.launchers.pod /mnt/runs/{name} "
        f'--copy "$HOME"/.trainctl-copies/{name} --attempt 1'
    )
    assert (task["envs"], task["secrets"]) == ({"NCCL_DEBUG": "INFO"}, {"HF_TOKEN": None})
    (argv,) = found.commands
    assert argv[:7] == ("sky", "jobs", "launch", "--yes", "--detach-run", "--secret", "HF_TOKEN")
    assert "canary" not in str(found.files) + str(argv)


@pytest.mark.parametrize(
    ("overrides", "rule"),
    [
        (["hardware=8xh100-80g", "hardware.name=8xa-new-device", SETUP, MIRROR], "TC513"),
        (["hardware=2x2xcpu", SETUP, MIRROR], "TC514"),
        (["hardware=2xcpu", SETUP], "TC514"),
        (["hardware=2xcpu", SETUP, "checkpoint.mirror=file:///mnt/first"], "TC514"),
        (["hardware=2xcpu", MIRROR], "TC515"),
        (["hardware=2xcpu", SETUP, *VOLUME, "launcher.skypilot_infra='a b'"], "TC160"),
        (["hardware=2xcpu", SETUP, MIRROR, "launcher.skypilot_folder='$(id)'"], "TC160"),
        (["hardware=2xcpu", SETUP, MIRROR, "launcher.skypilot_resources={infra: aws}"], "TC512"),
    ],
)
def test_what_would_not_train_or_be_lost_is_refused(overrides: list[str], rule: str) -> None:
    found = skypilot.check(make_plan("training.global_batch_size=64", *overrides), RUN.root, None)
    assert [finding.rule for finding in found] == [rule]
    assert not skypilot.check(spot_plan(), Path("/data/runs"), None)


def test_launch_gives_it_to_sky(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = (*TINY, "launcher=skypilot", "hardware=2xcpu", SETUP, *VOLUME)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:/usr/bin:/bin")
    refused = trainctl("launch", *arguments, "--run-dir", "r", cwd=tmp_path, code=4)
    assert "pip install 'skypilot[CLOUD]'" in refused and not (tmp_path / "r").exists()
    (tmp_path / "sky").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "sky").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    failed = trainctl("launch", *arguments, "--run-dir", "failed", cwd=tmp_path, code=4)
    unsure = RunPaths(tmp_path / "failed")  # a server of SkyPilot's may have it all the same
    assert f"sky jobs cancel --name {job_name(unsure)}" in failed
    assert read_job(unsure.attempt(1)).id == job_name(unsure)
    (tmp_path / "sky").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {tmp_path}/called\n')
    shown = trainctl("launch", *arguments, "--run-dir", "r", "--dry-run", cwd=tmp_path)
    trainctl("launch", *arguments, "--run-dir", "r", cwd=tmp_path)
    attempt, name = RunPaths(tmp_path / "r").attempt(1), job_name(RunPaths(tmp_path / "r"))
    assert f"name: {name}\n" in shown
    task = attempt.root / skypilot.TASK
    called = (tmp_path / "called").read_text().splitlines()
    assert called == ["jobs", "launch", "--yes", "--detach-run", str(task)]
    assert yaml.safe_load(task.read_text())["name"] == name and read_job(attempt).id == name
    trainctl("runs", "stop", "r", cwd=tmp_path)
    assert (tmp_path / "called").read_text().splitlines()[5:] == [
        *("jobs", "cancel", "--yes", "--name", name)
    ]


def test_what_sky_answers_about_a_job_is_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its exit codes and words are those of its source: no controller runs here."""
    sky, job = (
        tmp_path / "sky",
        SchedulerJob(kind="skypilot", id="a-job", submitted=0.0, host="here"),
    )

    def answers(text: str, code: int) -> None:
        sky.write_text(f"#!/bin/sh\necho '{text}'\nexit {code}\n")
        sky.chmod(0o755)

    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    answers("step 7 loss nan", 100)  # the code of a job that failed
    assert skypilot.job_log(job) == "step 7 loss nan\n"
    answers("no such job", 1)
    with pytest.raises(MachineError, match="sky failed: no such job"):
        skypilot.job_log(job)
    answers("Multiple running jobs found with name a-job.", 0)
    with pytest.raises(MachineError, match="several jobs of the name a-job"):
        skypilot.cancel(job)
    answers("ClusterNotUpError: All managed jobs should have finished.", 1)
    skypilot.cancel(job)


def test_a_new_machine_has_the_newest_checkpoint_and_the_submitted_plan(tmp_path: Path) -> None:
    run = mirrored_run(tmp_path / "submitted", f"file://{tmp_path}/mirror")
    made = restore_run(tmp_path / "first", run, 1)  # before anything was sent
    assert is_run(made.root) and not (tmp_path / "first.incomplete").exists()
    assert last_attempt(made) == 1
    save_steps(made, 2, 4)
    plan = read_plan(made.attempt(1).plan)
    new_attempt(made, plan)  # a restart, which only the machines and the mirror know
    drain(Uploader(made))
    new_attempt(run, replace(plan, total_steps=plan.total_steps + 1))  # `trainctl resume`
    # A new machine, the same one once more, and a volume that has the run already.
    for root in (tmp_path / "second", tmp_path / "second", made.root):
        again = restore_run(root, run, 2)
        assert newest_checkpoint(again)[0].step == 4 and last_attempt(again) == 3
        assert read_plan(again.attempt(3).plan) == read_plan(run.attempt(2).plan)


@pytest.mark.slow
def test_skypilot_takes_the_tasks(tmp_path: Path) -> None:
    if not PYTHON.exists():
        pytest.skip("`make skypilot` installs what is tested here")
    local = make_plan("hardware=2xcpu", MIRROR, SETUP)
    texts = [
        rendered(spot_plan()).files[skypilot.TASK],
        rendered(local, HOSTILE).files[skypilot.TASK],
    ]
    spoiled = yaml.safe_load(texts[0])
    spoiled["resources"]["job_recovery"]["recover_on_exit_codes"] = ["75"]
    texts.append(yaml.safe_dump(spoiled))
    files = [tmp_path / f"{number}.yaml" for number in range(len(texts))]
    for file, text in zip(files, texts, strict=True):
        file.write_text(text.replace(str(RUN.root), str(tmp_path)))
    done = subprocess.run(
        [PYTHON, "-c", VALIDATE, *files],
        env={**os.environ, "HOME": str(tmp_path), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("FOUND ")]
    assert lines, done.stdout + done.stderr
    spot, on_cpu, refusal = json.loads(lines[0].removeprefix("FOUND "))
    copies = "~/.trainctl-copies"
    assert (spot["nodes"], spot["accelerators"], spot["spot"]) == (2, {"H100": 8}, True)
    assert spot["recovery"]["recover_on_exit_codes"] == [75]
    assert spot["volumes"] == {"/mnt/runs": "shared"}
    assert on_cpu["accelerators"] is None
    assert on_cpu["mounts"] == {f"{copies}/{job_name(HOSTILE)}": str(HOSTILE.root)}
    assert "recover_on_exit_codes" in refusal


@pytest.mark.slow
@pytest.mark.usefixtures("preloaded")
def test_a_new_machine_goes_on_where_the_lost_one_ended(tmp_path: Path) -> None:
    """The task's `run` on two machines that share nothing but the mirror: two home directories."""
    config = compose(
        [
            *TINY,
            "launcher=skypilot",
            "hardware=2xcpu",
            f"launcher.skypilot_python={sys.executable}",
            f"checkpoint.mirror=file://{tmp_path}/mirror",
            "training.steps=1000000",
        ]
    ).config
    run = create_run(config, run_dir=tmp_path / "submitted")
    plan = resolve(config, resolve_hardware(config.hardware)).plan
    assert plan is not None
    new_attempt(run, plan)
    task = yaml.safe_load(rendered(plan, run).files[skypilot.TASK])
    (copy,) = task["file_mounts"]
    saved, machines = 0, [tmp_path / "first", tmp_path / "second"]
    for home in machines:
        shutil.copytree(run.root, home / copy.removeprefix("~/"))
        made = home / "trainctl-runs" / job_name(run)
        node = {"SKYPILOT_NODE_RANK": "0", "SKYPILOT_NODE_IPS": "127.0.0.1"}
        process = subprocess.Popen(
            ["bash", "-c", task["run"]],
            env={**os.environ, **task["envs"], **node, "HOME": str(home)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            deadline = time.monotonic() + 150
            while not is_run(made) or max(curve(made), default=0) <= saved + 1:
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.2)
            process.terminate()
            assert process.wait(120) == 75, process.communicate()[0]
        finally:
            process.kill()
            process.communicate()
        assert not live_processes(made)
        *_, started = events(made, "start")
        if saved:
            assert started["resumed_from"].endswith(f"step-{saved:08}")
        saved = events(made, "end")[-1]["step"]
