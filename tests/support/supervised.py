"""Launch in processes of its own, which tests watch and send signals to."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from preloaded_server import Forked, PreloadedServer

from trainctl.config.codec import to_plain
from trainctl.config.registry import new_section
from trainctl.config.schema import Accelerator, CheckpointConfig, LoggingConfig, RunConfig
from trainctl.hardware import Hardware
from trainctl.plans.types import Batch, Mesh, RunPlan
from trainctl.runs.directory import create_run, run_id
from trainctl.runs.files import write_json
from trainctl.runs.layout import RunPaths
from trainctl.runs.records import read_events
from trainctl.runs.status import Status, read_status

REPOSITORY = Path(__file__).resolve().parents[2]
CLEAN_SECONDS = 5.0


def make_plan(
    ranks: int = 2,
    kind: str = "local",
    *,
    loggers: Sequence[str] = (),
    checkpoint: CheckpointConfig | None = None,
    **launcher: Any,
) -> RunPlan:
    """Return a plan of which only the launcher matters; stand-ins get no grace to save."""
    launcher.setdefault("interrupt_grace_seconds", 0.0)
    return RunPlan(
        config=RunConfig(
            launcher=new_section("launcher", kind, **launcher),
            logging=LoggingConfig(to=list(loggers)),
            checkpoint=checkpoint or CheckpointConfig(),
        ),
        hardware=Hardware(
            name=f"{ranks}xcpu", accelerator=Accelerator.cpu, nodes=1, devices_per_node=ranks
        ),
        mesh=Mesh(data=ranks, tensor=1, pipeline=1, sequence=1),
        batch=Batch(
            global_batch_size=ranks,
            micro_batch_size=1,
            gradient_accumulation_steps=1,
            sequence_length=16,
        ),
        total_steps=10,
        stop_step=10,
        warmup_steps=0,
        deepspeed={"train_batch_size": ranks},
    )


def carriers(identity: str) -> dict[int, str]:
    """Return live processes with the run's id in their environment, and their command lines."""
    by_pid = {}
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                if f"TRAINCTL_RUN_ID={identity}".encode() in (process / "environ").read_bytes():
                    line = (process / "cmdline").read_bytes()
                    by_pid[int(process.name)] = line.replace(b"\0", b" ").decode()
            except OSError:
                continue
    return by_pid


class Launch:
    """Launcher in a session of its own, like the foreground job of a terminal.

    Args:
        run: A run from `Launches.make_run`.
        behaviour: Behaviour of its ranks.
        server: Server to fork from, with everything imported; None starts a new process.
    """

    def __init__(
        self, run: RunPaths, behaviour: str, server: PreloadedServer | None = None
    ) -> None:
        self.run = run
        self.identity = run_id(run)
        environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
        self.started = time.monotonic()
        self.process: subprocess.Popen[str] | Forked
        if server is not None:
            arguments = [str(run.root), behaviour]
            self.process = Forked(
                server, "forked_driver", arguments, environment=environment, own_session=True
            )
            return
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("driver.py")), run.root, behaviour],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def events(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in read_events(self.run.events) if event["event"] == kind]

    def wait_for(self, condition: Callable[[], Any], seconds: float = 40.0) -> Any:
        """Return the first true value of the condition."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            result = condition()
            if result:
                return result
            assert self.process.poll() is None, self.process.communicate()[1]
            time.sleep(0.01)
        raise AssertionError(f"not within {seconds} s; alive: {carriers(self.identity)}")

    def wait_for_step(self, step: int = 2) -> None:
        self.wait_for(lambda: len(self.events("step")) >= step)

    def agent(self) -> int | None:
        pids = [
            pid
            for pid, line in carriers(self.identity).items()
            if "trainctl.launchers.agent" in line
        ]
        return pids[0] if pids else None

    def rank(self, rank: int) -> int | None:
        """Return the pid of a rank, whatever program it has executed so far; its own forks do not
        count.
        """
        for pid in carriers(self.identity):
            try:
                environment = Path("/proc", str(pid), "environ").read_bytes().split(b"\0")
                parent = int(
                    Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[1]
                )
            except OSError:
                continue
            if f"RANK={rank}".encode() in environment and parent == self.agent():
                return pid
        return None

    def end(self, seconds: float = 60.0) -> tuple[int, str]:
        """Wait for the end; return exit code and output."""
        talk = self.process.communicate(timeout=seconds)[1]
        return self.process.returncode, talk

    def seconds_to_clean(self, since: float) -> float:
        """Return the seconds from `since` until no process carries the run's id; fails after five
        seconds.
        """
        while alive := carriers(self.identity):
            assert time.monotonic() - since < CLEAN_SECONDS, f"still alive: {alive}"
            time.sleep(0.01)
        took = time.monotonic() - since
        time.sleep(0.1)
        assert not carriers(self.identity), "a process came back"
        return took

    def status(self) -> Status:
        status = read_status(self.run)
        assert status is not None
        return status


class Launches:
    """Maker of runs and launches that leaves no process behind.

    Args:
        folder: Folder for the runs.
        server: Server to fork the launchers from.
    """

    def __init__(self, folder: Path, server: PreloadedServer | None = None) -> None:
        self._folder, self._server = folder, server
        self._launches: list[Launch] = []

    def make_run(self, ranks: int = 2, **launcher: Any) -> RunPaths:
        plan = make_plan(ranks, **launcher)
        run = create_run(plan.config, root=self._folder, folder=self._folder)
        write_json(run.root / "plan_for_tests.json", to_plain(plan))
        return run

    def start(self, behaviour: str, *, run: RunPaths | None = None, **plan: Any) -> Launch:
        launch = Launch(run or self.make_run(**plan), behaviour, self._server)
        self._launches.append(launch)
        return launch

    def close(self) -> None:
        for launch in self._launches:
            if launch.process.poll() is None:
                launch.process.kill()
            launch.process.communicate()
            for pid in carriers(launch.identity):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
