"""Kills at seeded random times in one run, which ends as if nothing had happened.

Two of them in CI, of a rank in a save and of the agent;
`TRAINCTL_SOAK_KILLS=30 python -m pytest tests/faults/test_soak.py` for more.
"""

import os
import random
import signal
import time

import pytest
from commands import curve, trainctl
from safetensors.numpy import load_file
from struck import CONFIG

from trainctl.runs.checkpoints import checkpoint_name
from trainctl.runs.layout import RunPaths
from trainctl.runs.manifest import read_manifest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

KILLS = int(os.environ.get("TRAINCTL_SOAK_KILLS", "2"))
KILLS_IN_SAVES = KILLS // 3 + 1
LEAST_IN_SAVES = KILLS // 6
STEPS = 17 * KILLS
MOST_STEPS_BETWEEN = 14
AGAIN = ("--run-dir", "run", "--resume", "auto")
SOAK = (
    *CONFIG,
    f"training.steps={STEPS}",
    "checkpoint.every_steps=4",
    "checkpoint.keep=1",
    "launcher.max_restarts=1000",
)


def final_state(root):
    """Every tensor of the last checkpoint (master weights, optimizer states) by file and name."""
    folder = RunPaths(root).checkpoints / checkpoint_name(STEPS)
    files = [entry["name"] for entry in read_manifest(folder)["files"]]
    return {
        (file, name): tensor.tobytes()
        for file in files
        if file.endswith(".safetensors")
        for name, tensor in load_file(folder / file).items()
    }


def uncommitted(struck):
    return list(struck.paths.checkpoints.glob(".step-*.tmp"))


class Killer:
    """Strikes the run at seeded random times, and counts the blows that fell inside a save."""

    def __init__(self, struck, seed):
        self.struck = struck
        self.draw = random.Random(seed)
        self.launcher = struck.launch(*SOAK)
        self.kills = self.in_saves = 0
        moments = ["save"] * KILLS_IN_SAVES + ["any"] * (KILLS - KILLS_IN_SAVES)
        self.draw.shuffle(moments)
        self.moments = moments

    def strike(self, moment):
        """Kill one process, and wait until the run trains again."""
        struck = self.struck
        starts = len(struck.events("start"))
        victim = self.draw.choice(["rank", "rank", "rank", "rank", "agent", "launcher"])
        if moment == "save":
            victim = "rank"
        rank = self.draw.randrange(2) if victim == "rank" else None
        pid = {
            "rank": lambda: struck.rank(rank),
            "agent": struck.agent,
            "launcher": lambda: self.launcher.pid,
        }[victim]()
        # Counted in steps, so that a slow machine gets as far between two kills as a fast one.
        self.wait_for_steps(self.draw.randrange(MOST_STEPS_BETWEEN))
        time.sleep(self.draw.uniform(0, 0.05))
        if moment == "save":
            self.wait_for_save()
        os.kill(pid, signal.SIGKILL)
        self.kills += 1
        if victim == "launcher":
            struck.finish(self.launcher, -signal.SIGKILL)
        else:
            # Ranks that were killed in the middle of a save leave it half done until the restart.
            struck.wait(lambda: len(struck.events("failure")) > self.failures)
        if victim == "rank":
            first = struck.events("failure")[self.failures]
            assert (first["rank"], first["pid"], first["cause"]) == (rank, pid, "killed")
            assert first["signal"] == "SIGKILL"
        self.failures = len(struck.events("failure"))
        self.in_saves += bool(uncommitted(struck))
        if victim == "launcher":
            self.resume()
        self.wait_for_start(starts)

    def resume(self):
        again = ("resume", "run") if self.struck.saved else ("launch", *SOAK, *AGAIN)
        self.launcher = self.struck.trainctl(*again)

    def wait_for_start(self, starts):
        """Wait until the next attempt trains. Resume if the launch gave up for want of new
        checkpoints.
        """
        struck = self.struck
        struck.wait(
            lambda: len(struck.events("start")) > starts or self.launcher.poll() is not None
        )
        if self.launcher.poll() is not None:
            struck.finish(self.launcher, 137, "gave up: 3 restarts brought no new checkpoint")
            self.resume()
            struck.wait(lambda: len(struck.events("start")) > starts)

    def wait_for_steps(self, count):
        attempt = self.struck.events("start")[-1]["attempt"]

        def enough():
            steps = [event for event in self.struck.events("step") if event["attempt"] == attempt]
            return len(steps) >= count

        self.struck.wait(enough)

    def wait_for_save(self):
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and not uncommitted(self.struck):
            time.sleep(0.0005)

    def run(self):
        self.failures = 0
        self.struck.wait(lambda: self.struck.events("start"))
        for moment in self.moments:
            self.strike(moment)
        return self.launcher


def test_kills_change_nothing(struck, tmp_path_factory):
    calm = tmp_path_factory.mktemp("calm")
    trainctl("launch", *SOAK, "--run-dir", "run", cwd=calm, **struck.preloaded)
    started = time.monotonic()
    killer = Killer(struck, seed=7)
    struck.finish(killer.run(), 0)
    print(
        f"{killer.kills} kills, {killer.in_saves} of them inside saves, "
        f"{len(struck.events('start'))} attempts, {time.monotonic() - started:.0f} s"
    )
    assert killer.kills == KILLS and killer.in_saves >= LEAST_IN_SAVES
    assert struck.curve == curve(calm / "run")
    assert final_state(struck.root) == final_state(calm / "run")
