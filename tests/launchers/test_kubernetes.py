"""Manifests: golden, valid by the controllers' own schemas, and inert whatever values hold."""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from trainctl.cli.main import run as command
from trainctl.config.compose import compose
from trainctl.config.registry import FOLDER_VARIABLE
from trainctl.hardware import resolve_hardware
from trainctl.launchers import kubernetes
from trainctl.launchers.interface import AttemptRequest
from trainctl.plans.types import RunPlan
from trainctl.rules.resolve import resolve
from trainctl.runs.layout import RunPaths

HERE = Path(__file__).with_name("kubernetes")
RUN = RunPaths(Path("/data/runs/First Run_1"))
OVERRIDES = (
    "recipe=tiny",
    "hardware=2x8xh100-80g",
    "training.global_batch_size=64",
    "launcher=kubernetes",
    "launcher.kubernetes_image=registry.example/trainctl:1",
    "launcher.kubernetes_namespace=team-a",
    "launcher.kubernetes_queue=gpus",
    "launcher.kubernetes_claims={data: /data, cache: /cache}",
    "launcher.kubernetes_node_selector={node.kubernetes.io/instance-type: p5}",
    "launcher.kubernetes_service_account=trainer",
    "launcher.max_restarts=3",
)


@cache
def make_plan(*overrides: str) -> RunPlan:
    config = compose([*OVERRIDES, *overrides]).config
    plan = resolve(config, resolve_hardware(config.hardware)).plan
    assert plan is not None
    return plan


def manifest(plan: RunPlan, run: RunPaths = RUN) -> Any:
    start = AttemptRequest(plan=plan, run=run, attempt=run.attempt(1), environment={}, cores=8)
    rendered = kubernetes.render(start)
    return yaml.safe_load(rendered.files[kubernetes.MANIFEST])


@pytest.mark.parametrize("api", ["jobset", "trainjob"])
def test_a_manifest_is_golden_and_valid(api: str) -> None:
    found = manifest(make_plan(f"launcher.kubernetes_api={api}"))
    golden = HERE / f"{api}.json"
    if os.environ.get("TRAINCTL_UPDATE_GOLDEN"):
        golden.write_text(json.dumps(found, indent=2) + "\n")
    assert found == json.loads(golden.read_text())
    schema = json.loads((HERE / f"{api}.schema.json").read_text())
    jsonschema.validate(found, schema)
    # The schema can refuse: a field that the API does not know, a wrong type, a missing one.
    for spoil in (
        lambda m: m["spec"].update(replicas=2),
        lambda m: m.update(spec={**m["spec"], "runtimeRef": 5, "replicatedJobs": 5}),
        lambda m: m.pop("spec"),
    ):
        spoiled = json.loads(golden.read_text())
        spoil(spoiled)
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(spoiled, schema)


def test_pods_and_agents_get_the_folder_of_the_users_options(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(FOLDER_VARIABLE, "/data/own/options")
    plan = make_plan()
    (node,) = manifest(plan)["spec"]["replicatedJobs"]
    (pod,) = node["template"]["spec"]["template"]["spec"]["containers"]
    assert {"name": FOLDER_VARIABLE, "value": "/data/own/options"} in pod["env"]
    start = AttemptRequest(plan=plan, run=RUN, attempt=RUN.attempt(1), environment={}, cores=8)
    for each in kubernetes.pod_command(start).nodes:
        assert each.environment[FOLDER_VARIABLE] == "/data/own/options"


@pytest.mark.parametrize("api", ["jobset", "trainjob"])
def test_without_options_it_is_valid_too(api: str) -> None:
    plan = make_plan(
        f"launcher.kubernetes_api={api}",
        "launcher.kubernetes_namespace=null",
        "launcher.kubernetes_queue=null",
        "launcher.kubernetes_node_selector={}",
        "launcher.kubernetes_service_account=null",
        "launcher.kubernetes_shared_memory=null",
        "hardware=2x2xcpu",
    )
    found = manifest(plan)
    jsonschema.validate(found, json.loads((HERE / f"{api}.schema.json").read_text()))
    assert "nvidia.com/gpu" not in json.dumps(found)


def test_hostile_values_stay_values() -> None:
    hostile = "/data/$(id) `id` 'q\" \n- x: {{ y }} #"
    found = manifest(make_plan(), RunPaths(Path(hostile)))
    pod = found["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    # Kubernetes itself expands $(NAME) in a command, unless the dollar is doubled.
    assert pod["containers"][0]["command"][4] == hostile.replace("$(", "$$(")
    assert len(found["metadata"]["name"]) <= 40 and found["metadata"]["name"].islower()
    assert kubernetes.job_name(RUN) != kubernetes.job_name(RunPaths(Path("/other/First Run_1")))
    assert len(kubernetes.pod_host(kubernetes.job_name(RUN), 99).split(".")[0]) < 63


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("launcher.kubernetes_image=null", "TC164"),
        ("launcher.kubernetes_image='a b'", "TC160"),
        ("launcher.kubernetes_claims.data=/elsewhere", "TC165"),
        ("launcher.kubernetes_namespace='--all'", "TC166"),
        ("launcher.kubernetes_claims={Data: /data}", "TC166"),
    ],
)
def test_what_no_cluster_would_take_is_refused(override: str, rule: str) -> None:
    found = kubernetes.check(make_plan(override), Path("/data/runs"), None)
    assert rule in {finding.rule for finding in found}
    assert not kubernetes.check(make_plan(), Path("/data/runs"), None)


def test_launch_gives_it_to_kubectl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "kubectl").write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {tmp_path}/called\n')
    (tmp_path / "kubectl").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    claims = f"launcher.kubernetes_claims={{data: {tmp_path}}}"
    assert command(["launch", *OVERRIDES, claims, "--run-dir", "r"]) == 0
    called = (tmp_path / "called").read_text().splitlines()
    made = tmp_path / "r" / "attempts" / "1" / "manifest.yaml"
    assert called == ["--namespace", "team-a", "create", "--filename", str(made)]
    assert yaml.safe_load(made.read_text())["kind"] == "JobSet"
    assert command(["runs", "stop", "r"]) == 0
    name = kubernetes.job_name(RunPaths(tmp_path / "r"))
    last = (tmp_path / "called").read_text().splitlines()[5:]
    assert last == ["--namespace", "team-a", "delete", "--ignore-not-found", "jobset", name]
    assert "stopped" in capsys.readouterr().out
