"""Task of a preparation's array job: `python -m trainctl.data FOLDER DIGEST`."""

from __future__ import annotations

import sys
from pathlib import Path

from trainctl.data.executors.slurm import run_array_task

if __name__ == "__main__":
    sys.exit(run_array_task(Path(sys.argv[1]), sys.argv[2]))
