"""Steps per second of a run with metrics logger processes, over the same run without them.

    python scripts/benchmarks/logger_overhead.py [--pairs 6] [--seconds 20] [--loggers NAME,...]

One run trains throughout; the logger processes that its launcher would start are started and ended
in turns, so that other load of the machine affects both. `stuck` is a logger that only waits, as
for a server that hangs. The median step time of each turn counts, without its first seconds, in
which the processes start. Target: a median ratio of at least 0.99.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainctl.config.schema import RunConfig
from trainctl.monitor.loggers.delivery import command
from trainctl.runs.layout import RunPaths
from trainctl.runs.listing import last_step
from trainctl.runs.records import EventFollower

STUCK = "stuck"
SETTLING_SECONDS = 15.0

LAUNCH = (
    "recipe=tiny",
    "training.steps=100000",
    "training.evaluate_every_steps=null",
    "training.evaluation_samples=0",
    "training.sample_tokens=0",
    "checkpoint.every_steps=null",
    "logging.to=[]",
)


def main() -> None:
    """Measure, and print a line for each pair."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=20.0, help="duration of each turn")
    parser.add_argument("--loggers", default=f"tensorboard,csv,prometheus,{STUCK}")
    given = parser.parse_args()
    names = given.loggers.split(",")
    with tempfile.TemporaryDirectory() as folder:
        run = RunPaths(Path(folder) / "run")
        start = [sys.executable, "-m", "trainctl", "launch", *LAUNCH, "--run-dir", str(run.root)]
        launch = subprocess.Popen(start, stdout=subprocess.DEVNULL)
        try:
            while last_step(run) < 3:
                assert launch.poll() is None, "the run has ended"
                time.sleep(0.2)
            ratios = []
            for pair in range(given.pairs):
                with following(run, names):
                    on = step_seconds(run, given.seconds)
                off = step_seconds(run, given.seconds)
                ratios.append(off / on)
                print(f"pair {pair + 1}: {on:.4f} s a step with, {off:.4f} s without", flush=True)
        finally:
            launch.send_signal(signal.SIGTERM)
            launch.wait()
    print(
        f"ratio: median {statistics.median(ratios):.4f}, from {min(ratios):.4f} to "
        f"{max(ratios):.4f} of {given.pairs} pairs, load {os.getloadavg()[0]:.1f}"
    )


@contextmanager
def following(run: RunPaths, names: list[str]) -> Iterator[None]:
    """Run the named logger processes as a launcher does, and kill them on exit."""
    argv = [command(run, name, "--follow", config=RunConfig()) for name in names if name != STUCK]
    started = [subprocess.Popen(each, stdin=subprocess.PIPE) for each in argv]
    if STUCK in names:
        started.append(subprocess.Popen(command(run, "csv", "--follow", config=RunConfig())))
        started[-1].send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.communicate()


def step_seconds(run: RunPaths, seconds: float) -> float:
    """Return the median time of the steps recorded in the next `seconds`, after the start of the
    processes.
    """
    time.sleep(SETTLING_SECONDS)
    follower = EventFollower(run.events)
    time.sleep(seconds)
    steps = [event for event in follower.poll() if event["event"] == "step"]
    return statistics.median(event["seconds"]["total"] for event in steps)


if __name__ == "__main__":
    main()
