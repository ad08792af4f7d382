"""Start-up times of trainctl as ratios to `deepspeed --help` and `accelerate launch --help`.

Runs of all commands are interleaved, so that a slowdown of the machine affects all of them; the
medians are compared. Run it with the Python of an environment that has all three packages.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from pathlib import Path

BIN = Path(sys.executable).parent
PEERS = {
    "deepspeed --help": [str(BIN / "deepspeed"), "--help"],
    "accelerate launch --help": [str(BIN / "accelerate"), "launch", "--help"],
}
TRAINCTL = [sys.executable, "-m", "trainctl"]
RECIPE = ["recipe=7b-zero3", "hardware=8xh100-80g"]
COMMANDS = {
    "trainctl --help": [*TRAINCTL, "--help"],
    "trainctl validate": [*TRAINCTL, "validate", *RECIPE],
    "trainctl config show": [*TRAINCTL, "config", "show", *RECIPE],
    "trainctl estimate-memory": [*TRAINCTL, "estimate-memory", *RECIPE],
}


def seconds(command: list[str]) -> float:
    """Return the wall time of one run of the command, which must succeed."""
    start = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - start


def main() -> None:
    """Measure and print one row for each command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=7)
    repetitions = parser.parse_args().repetitions
    commands = COMMANDS | PEERS
    for command in commands.values():
        seconds(command)  # warms the file cache and the bytecode
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(repetitions):
        for name, command in commands.items():
            times[name].append(seconds(command))
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f"{'median of ' + str(repetitions):<28}{'seconds':>9}  " + "  ".join(PEERS))
    for name, median in medians.items():
        ratios = "  ".join(f"{median / medians[peer]:>{len(peer)}.3f}" for peer in PEERS)
        print(f"{name:<28}{median:>9.3f}  {ratios}")


if __name__ == "__main__":
    main()
