"""Tests of ssh commands, host messages and plans for fewer nodes, without ssh or hosts."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from supervised import make_plan

from trainctl.config.compose import compose_leniently
from trainctl.config.hosts import Host
from trainctl.config.schema import (
    Accelerator,
    OffloadConfig,
    OffloadDevice,
)
from trainctl.errors import Severity
from trainctl.hardware import resolve_hardware
from trainctl.launchers import probe
from trainctl.launchers.host_checks import (
    HostGroup,
    check_hosts,
    host_problems,
    unprobed_hosts,
)
from trainctl.launchers.host_probe import HostReport, probe_hosts
from trainctl.launchers.interface import AttemptRequest, LaunchRequest
from trainctl.launchers.node_agents import shrink_plan
from trainctl.launchers.processes import shell_line, ssh_command
from trainctl.launchers.rank_command import unforwarded_variable_findings
from trainctl.launchers.ssh import HostPool, render
from trainctl.options.launcher.ssh import SshConfig
from trainctl.plans.types import RunPlan
from trainctl.runs.layout import RunPaths
from trainctl.runs.processes import encode_command
from trainctl.tuning.assess import assess

HOSTILE = "$(touch PWNED); `touch PWNED`; '\"\\ \n touch PWNED #"


def make_group(**changes: Any) -> HostGroup:
    site = HostGroup(
        hosts=(Host("n1"), Host("me@n2", devices=(4, 6))),
        interfaces=("eth0", "ib0"),
        cores=(8, 4),
        address="10.0.0.1",
        port=29500,
    )
    return replace(site, **changes)


def two_nodes(**launcher: Any) -> RunPlan:
    plan = make_plan(4, kind="ssh", hosts=["n1", "me@n2"], **launcher)
    return replace(plan, hardware=replace(plan.hardware, nodes=2, devices_per_node=2))


def test_each_host_gets_an_agent_and_its_command(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    plan = two_nodes(
        environment={"SECRET_TOKEN": HOSTILE}, interfaces={"me@n2": "ib0"}, ssh_config="/s/config"
    )
    shell = {"NCCL_DEBUG": "INFO", "OTHER": "x"}
    start = AttemptRequest(plan=plan, run=run, attempt=run.attempt(2), environment=shell, cores=1)
    rendered = render(start, group=make_group())
    command = rendered.command
    assert (command.address, command.port, command.ranks_per_node) == ("10.0.0.1", 29500, 2)
    first, second = command.nodes
    assert second.host == "me@n2"
    assert second.argv[:4] == (sys.executable, "-P", "-m", "trainctl.launchers.agent")
    assert second.argv[-2:] == ("--node", "1")
    assert first.environment["GLOO_SOCKET_IFNAME"] == "eth0"
    assert "NCCL_SOCKET_IFNAME" not in first.environment, "NCCL chooses better by itself"
    assert second.environment["NCCL_SOCKET_IFNAME"] == "ib0"
    assert second.environment["CUDA_VISIBLE_DEVICES"] == "4,6"
    assert first.environment["NCCL_DEBUG"] == "INFO" and "OTHER" not in first.environment
    assert (first.environment["OMP_NUM_THREADS"], second.environment["OMP_NUM_THREADS"]) == (
        "4",
        "2",
    )
    assert first.environment["SECRET_TOKEN"] == HOSTILE
    # Nothing of it is in a command line, here or there.
    assert all("PWNED" not in word for argv in rendered.commands for word in argv)
    argv = rendered.commands[1]
    assert argv[:3] == ("ssh", "-F", "/s/config") and argv[-3:-1] == ("--", "me@n2")
    assert "BatchMode=yes" in argv
    assert not list(tmp_path.iterdir()), "rendering writes nothing"


def test_a_dry_run_asks_no_host(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    start = AttemptRequest(
        plan=two_nodes(), run=run, attempt=run.attempt(1), environment={}, cores=4
    )
    rendered = render(start)
    assert [argv[-2] for argv in rendered.commands] == ["n1", "me@n2"]
    assert rendered.command.address == "n1"


@pytest.mark.parametrize("shell", ["sh", "bash", "dash"])
def test_the_line_for_the_remote_shell_is_quoted(tmp_path: Path, shell: str) -> None:
    words = (sys.executable, "-c", "import sys; print(repr(sys.argv[1:]))", HOSTILE, "", "-x", "~")
    out = subprocess.run(
        [shell, "-c", shell_line(words)], cwd=tmp_path, capture_output=True, text=True, check=True
    ).stdout
    assert out.strip() == repr(list(words[3:]))
    assert not list(tmp_path.iterdir())


def test_values_reach_a_node_by_its_stdin_as_they_are(tmp_path: Path) -> None:
    folder = tmp_path / "a $(touch PWNED) folder"
    folder.mkdir()
    show = (
        "import os, sys; print(repr((sys.argv[1], os.environ['X'], os.getcwd(), sys.stdin.read())))"
    )
    line = encode_command((sys.executable, "-c", show, HOSTILE), {"X": HOSTILE}, folder)
    done = subprocess.run(
        [sys.executable, "-P", "-m", "trainctl.runs.processes", "exec"],
        input=line + b"what follows",
        capture_output=True,
        cwd="/",
        check=True,
    )
    assert done.stdout.decode().strip() == repr((HOSTILE, HOSTILE, str(folder), "what follows"))
    assert [path.name for path in tmp_path.rglob("*")] == [folder.name]
    gone = encode_command(("true",), {}, tmp_path / "gone")
    done = subprocess.run(
        [sys.executable, "-P", "-m", "trainctl.runs.processes", "exec"],
        input=gone,
        capture_output=True,
    )
    assert done.returncode == 4 and b"gone is not there: No such file" in done.stderr


def test_ssh_never_asks_and_keeps_its_own_connection() -> None:
    argv = ssh_command(Host("n1"), SshConfig(node_timeout_seconds=30), "some.module", "a b")
    for option in ("BatchMode=yes", "ControlPath=none", "ServerAliveInterval=10"):
        assert option in argv
    assert argv[-1].endswith("-P -m some.module 'a b'")


# --------------------------------------------------------------------------- preflight

OWN = {f"/code/{number}.py": "0123" for number in range(7)}
FACTS: dict[str, Any] = {
    "packages": {"trainctl": "1", "torch": "2"},
    "code": "abc",
    "files": OWN,
    "machine": {"devices": [["H100", 80 << 30]] * 8, "cores": 8, "memory_bytes": 64 << 30},
    "interface": "eth0",
    "address": "10.0.0.1",
    "listens": 4000,
    "port": None,
    "storage": {"free_bytes": 10**9, "problem": ""},
    "builds": [],
}


def found(plan: RunPlan, checkpoint_bytes: int | None = None, **report: Any) -> list[Any]:
    facts = FACTS | report.pop("facts", {})
    reports = [HostReport(host=report.pop("host", Host("n1")), facts=facts, **report)]
    return host_problems(plan, reports, FACTS["packages"], "abc", OWN, checkpoint_bytes)


def gpus(**hardware: Any) -> RunPlan:
    plan = two_nodes()
    facts = {"accelerator": Accelerator.cuda, "devices_per_node": 8} | hardware
    return replace(plan, hardware=replace(plan.hardware, **facts))


def with_machine(**changes: Any) -> dict[str, Any]:
    return {"facts": {"machine": FACTS["machine"] | changes}}


def test_a_fit_host_has_no_problem() -> None:
    assert not found(two_nodes(), 10**8)
    assert not found(gpus(device_memory_bytes=80 << 30, host_memory_bytes=64 << 30))


@pytest.mark.parametrize(
    ("rule", "plan", "report", "words"),
    [
        ("TC184", two_nodes(), {"facts": {"packages": {"trainctl": "1"}}}, "torch none, and"),
        ("TC185", two_nodes(), {"facts": {"code": "x"}}, "another code of trainctl"),
        ("TC194", two_nodes(), {"facts": {"files": OWN | {"/code/3.py": "x"}}}, "of /code/3.py"),
        ("TC194", two_nodes(), {"facts": {"files": dict.fromkeys(OWN, "")}}, " and 2 more files"),
        ("TC186", gpus(), with_machine(devices=[["H100", 80 << 30]] * 7), "shows 7 devices"),
        ("TC186", gpus(), with_machine(devices=[]), "n1 has no cuda device"),
        ("TC186", gpus(), {"host": Host("n1", devices=(0, 9))}, "shows 8 devices"),
        ("TC186", gpus(device_memory_bytes=141 << 30), {}, "H100 with 80.0 GiB"),
        ("TC186", gpus(host_memory_bytes=512 << 30), {}, "64.0 GiB of memory"),
        (
            "TC188",
            two_nodes(),
            {"facts": {"storage": {"free_bytes": 5, "problem": ""}}},
            "5 B free",
        ),
        ("TC190", two_nodes(), {"clock_seconds": -31.0}, "31 s behind that of"),
        ("TC190", two_nodes(), {"clock_seconds": 7.0}, "7 s ahead of that of"),
        ("TC191", two_nodes(), {"facts": {"address": None}}, "no outer interface"),
    ],
)
def test_each_problem_has_its_message(
    rule: str, plan: RunPlan, report: dict[str, Any], words: str
) -> None:
    (problem,) = found(plan, 10**8, **report)
    assert problem.rule == rule and words in problem.message and problem.exit_code == 4
    assert problem.message.startswith("n1") or "n1" in problem.message
    assert problem.hint


def test_few_cores_are_a_warning() -> None:
    (problem,) = found(two_nodes(), **with_machine(cores=1))
    assert (
        problem.severity is Severity.warning and "2 processes will share 1 cores" in problem.message
    )


@pytest.mark.parametrize(
    ("stderr", "code", "rule"),
    [
        ("Host key verification failed.", 255, "TC181"),
        ("root@n1: Permission denied (publickey).", 255, "TC182"),
        ("ssh: Could not resolve hostname n1: Name or service not known", 255, "TC180"),
        ("ssh: connect to host n1 port 22: Connection refused", 255, "TC180"),
        ("sh: 1: exec: /x/python: not found", 127, "TC183"),
        ("", None, "TC180"),
    ],
)
def test_why_a_host_gave_no_answer(stderr: str, code: int | None, rule: str) -> None:
    report = HostReport(host=Host("n1"), return_code=code, stderr=stderr)
    (problem,) = host_problems(two_nodes(), [report], {}, "", {}, None)
    assert problem.rule == rule and stderr.strip() in problem.message


@pytest.fixture
def remote_shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts an `ssh` into PATH that runs its last word here, after some lines of a shell."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def put(lines: str) -> None:
        script = folder / "ssh"
        script.write_text(f'#!/bin/sh\nfor last; do :; done\n{lines}\nexec sh -c "$last"\n')
        script.chmod(0o755)

    return put


def test_what_a_login_shell_prints_is_not_taken_for_an_answer(
    remote_shell: Callable[[str], None], tmp_path: Path
) -> None:
    remote_shell("echo Welcome; echo 42; printf 'no newline, then '; echo")
    (report,) = probe_hosts([Host("n1")], two_nodes(interface="lo"), tmp_path)
    assert report.facts is not None and report.facts["address"] == "127.0.0.1"
    assert report.unreached == () and report.unseen == ()


def test_a_host_that_cannot_compile_is_reported_before_the_start(
    remote_shell: Callable[[str], None], tmp_path: Path
) -> None:
    remote_shell("export CXX=no-such-compiler")
    plan = two_nodes(interface="lo")
    offload = OffloadConfig(optimizer=OffloadDevice.cpu)
    plan = replace(plan, config=replace(plan.config, offload=offload))
    (problem,) = check_hosts(plan, [Host("n1")], tmp_path, None).findings
    assert (problem.rule, problem.key) == ("TC126", "offload.optimizer")
    assert problem.message.startswith("n1: DeepSpeed has to compile cpu_adam")
    assert "no C++ compiler (no-such-compiler)" in problem.message
    # The ranks will have another one.
    launcher = replace(plan.config.launcher, environment={"CXX": "sh"})
    plan = replace(plan, config=replace(plan.config, launcher=launcher))
    assert check_hosts(plan, [Host("n1")], tmp_path, None).findings == []


def test_many_hosts_are_asked_where_few_files_may_be_open(
    remote_shell: Callable[[str], None], tmp_path: Path
) -> None:
    remote_shell("exit 255")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, limits[1]))
    try:
        reports = probe_hosts([Host(f"n{number}") for number in range(30)], two_nodes(), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert [report.return_code for report in reports] == [255] * 30


def test_a_port_is_tried_where_the_address_is_of_version_6(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probe, "addresses_of", lambda name: ["::1"])
    question = {
        "interface": "lo", "port": 0, "folder": str(tmp_path), "mark": "m", "files": [],
        "config": {}, "hardware": {}, "environment": {},
    }  # fmt: skip
    asked = probe.Probe()
    try:
        facts = asked.answer({"facts": question})
    finally:
        asked.close()
    # Neither can be had on a machine without IPv6.
    assert bool(facts["port"]["problem"]) == (facts["listens"] is None)


# --------------------------------------------------------------------------- fewer nodes


def planned(*overrides: str) -> RunPlan:
    config = compose_leniently(
        ["recipe=tiny", "launcher=ssh", "launcher.hosts=[a,b,c,d]", "hardware=4x2xcpu", *overrides]
    ).config
    plan = assess(config, resolve_hardware(config.hardware)).plan
    assert plan is not None
    return plan


def pool_of(plan: RunPlan, hosts: list[Host]) -> HostPool:
    run = RunPaths(Path("/runs/a"))
    launch = LaunchRequest(run=run, attempt=run.attempt(1), plan=plan, on_event=lambda _: None)
    return HostPool(launch, hosts, unprobed_hosts(plan))


@pytest.mark.parametrize(
    ("overrides", "nodes", "micro", "accumulation"),
    [
        (["training.global_batch_size=48", "training.micro_batch_size=2"], 3, 2, 4),
        (["training.global_batch_size=48", "training.micro_batch_size=2"], 2, 2, 6),
        (["training.global_batch_size=48", "training.micro_batch_size=6"], 3, 2, 4),
        (
            ["training.global_batch_size=null", "training.micro_batch_size=3",
             "training.gradient_accumulation_steps=1", "parallelism.data=8"], 1, 3, 4,
        ),
    ],
)  # fmt: skip
def test_fewer_nodes_keep_the_global_batch(
    overrides: list[str], nodes: int, micro: int, accumulation: int
) -> None:
    plan = planned(*overrides)
    hosts = [Host(name) for name in "abcd"]
    smaller = shrink_plan(plan, nodes, pool_of(plan, hosts).section(nodes))
    assert smaller is not None
    assert smaller.batch.global_batch_size == plan.batch.global_batch_size
    assert (smaller.batch.micro_batch_size, smaller.batch.gradient_accumulation_steps) == (
        micro,
        accumulation,
    )
    assert smaller.mesh.data == 2 * nodes and smaller.hardware.name == f"{nodes}x2xcpu"
    assert smaller.config.launcher.hosts == list("abcd"[:nodes])
    assert smaller.total_steps == plan.total_steps


def test_a_batch_that_fewer_nodes_cannot_share_is_refused() -> None:
    plan = planned("training.global_batch_size=16", "training.micro_batch_size=2")
    pool = pool_of(plan, [Host(name) for name in "abc"])
    assert shrink_plan(plan, 3, pool.section(3)) is None  # 16 over 6 ranks
    assert shrink_plan(plan, 2, pool.section(2)) is not None


def test_what_was_rendered_is_written(tmp_path: Path) -> None:
    run = RunPaths(tmp_path)
    attempt = run.attempt(1)
    attempt.root.mkdir(parents=True)
    plan = two_nodes(environment={"API_TOKEN": "hush"})
    start = AttemptRequest(plan=plan, run=run, attempt=attempt, environment=os.environ, cores=1)
    render(start, group=make_group()).write(attempt)
    record = json.loads(attempt.command.read_text())
    assert record["nodes"][0]["environment"]["API_TOKEN"] == "redacted"
    lines = (attempt.root / "commands.txt").read_text().splitlines()
    assert len(lines) == 2 and lines[0].startswith("ssh ") and "hush" not in lines[0]


def test_a_variable_that_is_set_here_and_not_carried_is_named() -> None:
    plan = make_plan()
    shell = {"NCCL_DEBUG": "INFO", "UCX_TLS": "rc", "HOME": "/root", "LD_PRELOAD": "x.so"}
    first, second = unforwarded_variable_findings(plan, shell)
    assert first.message == "LD_PRELOAD is set here, and ranks on other hosts do not get it"
    assert second.message == "UCX_TLS is set here, and ranks on other hosts do not get it"
    assert "add UCX_TLS to launcher.forward_environment" in second.hint
    assert not second.is_error
    plan.config.launcher.environment["LD_PRELOAD"] = "y.so"
    assert [finding.message for finding in unforwarded_variable_findings(plan, shell)] == [
        second.message
    ]
