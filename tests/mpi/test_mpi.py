"""A real mpirun: two nodes, whose remote shell is stood in for by a local one."""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import TINY, curve, events, finish, live_processes, start, trainctl
from ports import reserved_port

from trainctl.config.compose import compose
from trainctl.hardware import resolve_hardware
from trainctl.launchers import mpi
from trainctl.launchers.config_checks import hosts_in
from trainctl.launchers.interface import AttemptRequest
from trainctl.rules.resolve import resolve
from trainctl.runs.layout import RunPaths

EXAMPLE = Path(__file__).parents[2] / "docs/examples/deepspeed_script.py"
HOSTILE = "$(touch pwned) `touch pwned` 'q\" ;touch pwned"
TWO_NODES = (*TINY, "hardware=2x1xcpu", "launcher=mpi", "training.evaluation_samples=0")

FLAVORS = {
    # mpirun's remote shell gets `HOST COMMAND...`, as ssh would, and gives it to a real shell.
    "openmpi": ("mpirun.openmpi", ["--allow-run-as-root", "--mca", "plm_rsh_agent", "{rsh}"]),
    "mpich": ("mpirun.mpich", ["-launcher", "ssh", "-launcher-exec", "{rsh}"]),
}


@pytest.fixture
def port() -> Iterator[int]:
    with reserved_port() as port:
        yield port


def prepare(flavor: str, folder: Path, port: int) -> list[str]:
    """Write a hostfile of two names and a remote shell; return the overrides that use them."""
    program, options = FLAVORS[flavor]
    if shutil.which(program) is None:
        pytest.skip(f"needs {program} (Debian: apt-get install openmpi-bin mpich)")
    rsh = folder / "rsh"
    rsh.write_text(
        '#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\nshift\nexec sh -c "$*"\n'
    )
    rsh.chmod(0o755)
    names = {"openmpi": "127.0.0.1 slots=1\nnode-b slots=1\n", "mpich": "127.0.0.1:1\nnode-b:1\n"}
    (folder / "hosts").write_text(names[flavor])
    words = ",".join(option.format(rsh=rsh) for option in options)
    return [
        f"launcher.port={port}",
        f"launcher.mpi_program={program}",
        f"launcher.mpi_flavor={flavor}",
        f"launcher.mpi_hostfile={folder / 'hosts'}",
        f"launcher.mpi_options=[{words}]",
    ]


@pytest.mark.cluster
def test_a_program_of_the_user_s_trains_on_two_nodes_and_its_failure_is_reported(
    tmp_path: Path, port: int
) -> None:
    """Words of its own arrive as they are typed; those of a shell execute nothing."""
    overrides = prepare("openmpi", tmp_path, port)
    shutil.copy(EXAMPLE, tmp_path / "own.py")
    own = ("launch", "script=own.py", "recipe=tiny", "hardware=2x1xcpu", "launcher=mpi", *overrides)
    said = trainctl(*own, "--run-dir", "run", "--", "--steps", "3", cwd=tmp_path)
    assert "step 3 of 3: loss" in said
    words = ("--run-dir", "failing", "--", "--steps", HOSTILE)
    trainctl(*own, *words, cwd=tmp_path, code=6)
    failure = events(tmp_path / "failing", "failure")[0]
    assert failure["exit_code"] == 2
    assert f"invalid int value: {HOSTILE!r}" in failure["log_tail"][-1]
    assert not live_processes(tmp_path / "run") and not live_processes(tmp_path / "failing")
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.cluster
def test_stopping_mpirun_leaves_nothing(tmp_path: Path, port: int) -> None:
    overrides = prepare("openmpi", tmp_path, port)
    endless = ("launch", *TWO_NODES, *overrides, "training.steps=1000000")
    run = tmp_path / "r"
    launched = start(*endless, "--run-dir", "r", cwd=tmp_path)
    deadline = time.monotonic() + 150
    while not curve(run):
        assert launched.poll() is None and time.monotonic() < deadline
        time.sleep(0.2)
    launched.send_signal(signal.SIGTERM)
    assert finish(launched)[0] == 143
    assert not live_processes(run)
    trainctl("launch", *TWO_NODES, "launcher.mpi_program=nowhere", cwd=tmp_path, code=4)


@pytest.mark.cluster
@pytest.mark.usefixtures("preloaded")
@pytest.mark.parametrize("flavor", FLAVORS)
def test_mpirun_trains_on_two_nodes(flavor: str, tmp_path: Path, port: int) -> None:
    """Folder and variable contain text that a shell would execute; losses are those of one
    machine.
    """
    overrides = prepare(flavor, tmp_path, port)
    run = tmp_path / HOSTILE
    value = f"launcher.environment={{HOSTILE: {json.dumps(HOSTILE)}}}"
    plain = "launcher.plain_environment=[HOSTILE]"
    launched = ("launch", *TWO_NODES, *overrides, value, plain, "training.steps=3")
    trainctl(*launched, "--run-dir", str(run), cwd=tmp_path)
    assert set(curve(run)) == {1, 2, 3} and events(run, "start")[0]["world_size"] == 2
    assert not list(tmp_path.rglob("pwned"))
    if flavor == "openmpi":
        one = ("launch", *TINY, "training.evaluation_samples=0", "hardware=1x2xcpu")
        trainctl(*one, "training.steps=3", "--run-dir", "one", cwd=tmp_path)
        assert curve(tmp_path / "one") == curve(run)


def test_command_lines() -> None:
    run = RunPaths(Path("/r"))
    for flavor, expected in (
        (
            "openmpi",
            "mpirun -n 2 --map-by ppr:1:node --bind-to none --tag-output "
            "--mca odls_base_sigkill_timeout 5 --hostfile /h -x",
        ),
        ("mpich", "mpirun -n 2 -ppn 1 -prepend-rank -f /h -genvlist"),
    ):
        overrides = [*TWO_NODES, f"launcher.mpi_flavor={flavor}", "launcher.mpi_hostfile=/h"]
        value = "launcher.environment={SECRET: '$(id)'}"
        config = compose([*overrides, value, "launcher.plain_environment=[SECRET]"]).config
        plan = resolve(config, resolve_hardware(config.hardware)).plan
        assert plan is not None
        start = AttemptRequest(plan=plan, run=run, attempt=run.attempt(1), environment={}, cores=2)
        rendered = mpi.render(start, hosts=["node-a", "node-b"])
        (argv,) = rendered.commands
        assert " ".join(argv).startswith(expected)
        assert "$(id)" not in " ".join(argv)
        assert argv[-6:] == ("-P", "-m", "trainctl.launchers.agent", "/r", "--attempt", "1")
        assert rendered.command.address == "node-a"
        assert rendered.command.nodes[1].environment["SECRET"] == "$(id)"


def test_hostfiles_of_both() -> None:
    text = "# first\nuser@node-a slots=8\n\nnode-b:4  # half\n[::1]\n"
    assert hosts_in(text) == ["node-a", "node-b", "[::1]"]


def test_a_hostfile_is_checked(tmp_path: Path) -> None:
    names = "-oProxyCommand=x slots=1\n$(touch${IFS}pwned)\n`id` slots=2\na;b\nx;y@node-a\n"
    names += "me@node-a slots=1\n[fe80::1]\nnode.example.org:4\n"
    (tmp_path / "hosts").write_text(names)
    config = compose(
        [*TWO_NODES, f"launcher.mpi_hostfile={tmp_path / 'hosts'}", "launcher.mpi_program=sh"]
    ).config
    plan = resolve(config, resolve_hardware(config.hardware)).plan
    assert plan is not None
    assert [finding.rule for finding in mpi.check(plan, tmp_path, None)] == ["TC160"] * 5
    (tmp_path / "hosts").unlink()
    assert "there is no file" in mpi.check(plan, tmp_path, None)[0].message
