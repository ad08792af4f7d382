"""Measure on a machine with a GPU, in minutes, where the time of a step goes.

    python scripts/gpu_check.py --call 1           speed of trainctl and other loops, 9.5 minutes
    python scripts/gpu_check.py --call 2 [WORD]    GPU tests, and the fastest cases again, 4 minutes
    python scripts/gpu_check.py --call memory      planned against measured memory, 25 minutes

Each case (`gpu_cases.py`) trains in a process of its own, forked from this one, which has imported
everything and never uses the GPU. The most informative case comes first, each result is written as
soon as it exists, and what has not begun in time is left out: a call that is cut is still of use.
Results go to `docs/benchmarks/gpu-DEVICE.jsonl` and to the page beside it. Cases with results are
not measured again without `--again`, so that a further call goes on where the last one ended.

Call 2 runs the tests marked `gpu` that failed before, then those of files that changed since, then
the fastest configuration of trainctl in each shape with the given overrides (WORD).

Without a GPU everything runs at a small size as a smoke test, nothing is compiled, and results are
only written to `--out`.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from trainctl.hardware.detect import visible_devices

MINUTES = {"1": 9.5, "2": 4.0, "memory": 25.0}
RUN_CASE = "--run-case"
"""Argument of a process that runs one case without being forked (`gpu_call.Check`)."""


def main() -> int:
    """Measure; the exit code is 1 if a case of trainctl or a test failed."""
    began = time.monotonic()
    arguments = None if sys.argv[1:2] == [RUN_CASE] else _arguments()
    devices = visible_devices()
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # else it uses CUDA, and forks cannot
    os.environ["DS_ACCELERATOR"] = "cuda" if devices else "cpu"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if not devices:
        os.environ |= {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    from gpu_call import Check, run_pickled

    if arguments is None:
        run_pickled(Path(sys.argv[2]), on_gpu=bool(devices))
        return 0
    check = Check(
        device=devices[0].name if devices else None,
        began=began,
        minutes=MINUTES[arguments.call] if arguments.minutes is None else arguments.minutes,
        out=arguments.out,
        is_again=arguments.again or arguments.call == "2",
    )
    return check.run(arguments.call, arguments.only, arguments.words)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--call", choices=list(MINUTES), required=True)
    parser.add_argument("--minutes", type=float, help="time for the call, imports included")
    parser.add_argument(
        "--only", action="append", default=[], help="part of a case's name; may be given again"
    )
    parser.add_argument("--again", action="store_true", help="measure cases again")
    parser.add_argument("--out", type=Path, help="folder to write to")
    parser.add_argument("words", nargs="*", help="overrides for the fastest cases of call 2")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
