"""A run that is struck again and again, and what must hold after each blow."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from commands import TINY, curve, events, finish, live_processes, start

from trainctl.runs.checkpoints import list_checkpoints
from trainctl.runs.layout import RunPaths
from trainctl.runs.lock import find_holder

STEPS = 100
SAVES_EVERY = 10
CONFIG = (
    *TINY,
    f"training.steps={STEPS}",
    f"checkpoint.every_steps={SAVES_EVERY}",
    "training.evaluation_samples=0",
    "logging.every_steps=100",
)
CLEAN_SECONDS = 5.0

Curve = dict[int, tuple[float, float]]
"""Loss and gradient norm by step."""


class Struck:
    """Run of the real command in `folder/run`.

    `preloaded` holds variables for launches that get no signal from outside: their ranks have
    imported everything before they start.
    """

    def __init__(self, folder: Path, preloaded: dict[str, str]) -> None:
        self.folder = folder
        self.preloaded = preloaded
        self.root = folder / "run"
        self.paths = RunPaths(self.root)
        self._launchers: list[subprocess.Popen[str]] = []

    def launch(self, *overrides: str, **variables: str) -> subprocess.Popen[str]:
        """Start the run, or, once it has a checkpoint, resume it."""
        if self.saved:
            return self.trainctl("resume", "run", *overrides, **variables)
        return self.trainctl("launch", *overrides, "--run-dir", "run", **variables)

    def trainctl(self, *arguments: str, **variables: str) -> subprocess.Popen[str]:
        """Start the command in the folder of the run."""
        launcher = start(*arguments, cwd=self.folder, **variables)
        self._launchers.append(launcher)
        return launcher

    def finish(self, launcher: subprocess.Popen[str], code: int, *messages: str) -> str:
        """Expect an exit code and messages, and that nothing is left five seconds later."""
        found, out, err = finish(launcher)
        said = out + err
        assert found == code, f"exit code {found}, not {code}\n{said}"
        assert "Traceback" not in out, said
        for message in messages:
            assert message in said, f"{message!r} was not said:\n{said}"
        self.wait(self.is_clean, CLEAN_SECONDS)
        return said

    def complete(self, undisturbed: Curve, *overrides: str) -> None:
        """Resume to the end: every loss and norm is that of the undisturbed run, bit for bit."""
        self.finish(self.launch(*overrides, **self.preloaded), 0)
        assert self.curve == undisturbed

    @property
    def curve(self) -> Curve:
        return curve(self.root)

    @property
    def steps_done(self) -> int:
        return max((event["step"] for event in events(self.root, "step")), default=0)

    def events(self, kind: str) -> list[dict[str, Any]]:
        return events(self.root, kind)

    @property
    def saved(self) -> list[int]:
        """Steps of the checkpoints that count."""
        return [info.step for info in list_checkpoints(self.paths)]

    def is_clean(self) -> bool:
        """Whether no process carries the run's id and the run is free."""
        return not live_processes(self.root) and find_holder(self.paths) is None

    def status(self) -> dict[str, Any]:
        return dict(json.loads(self.paths.status.read_text()))

    def wait(self, condition: Callable[[], Any], seconds: float = 180.0) -> Any:
        """Wait until the condition is true, and return its value."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            value = condition()
            if value:
                return value
            time.sleep(0.03)
        left = live_processes(self.root) if self.root.exists() else set()
        raise AssertionError(f"not within {seconds} s; alive: {left}")

    def wait_for_step(self, step: int) -> None:
        self.wait(lambda: self.root.exists() and self.steps_done >= step)

    def rank(self, rank: int) -> int:
        """Pid of a rank that trains."""
        return int(self.wait(lambda: self._find("trainctl.train", f"rank-{rank}.log"), 20))

    def agent(self) -> int:
        return int(self.wait(lambda: self._find("trainctl.launchers.agent", "agent-0.log"), 20))

    def _find(self, module: str, log: str) -> int | None:
        for pid in live_processes(self.root):
            try:
                arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                written = Path(f"/proc/{pid}/fd/1").readlink().name
            except OSError:
                continue
            if module.encode() in arguments and written == log:
                return pid
        return None

    def close(self) -> None:
        for launcher in self._launchers:
            if launcher.poll() is None:
                launcher.kill()
            launcher.communicate()
        if (self.root / "run.json").is_file():
            for pid in live_processes(self.root):
                os.kill(pid, signal.SIGKILL)
