"""`scripts/gpu_check.py` runs through where there is no GPU, and says that its figures are none."""

from __future__ import annotations

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def check(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), *arguments],
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("preloaded")
def test_every_loop_is_measured_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "figures"
    size = ("--cases", "zero3-checkpointing", "--steps", "2", "--warmup", "1")
    done = check(*size, "--without-tests", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    assert {path.name for path in out.iterdir()} == {"cpu-small.md", "cpu-small.csv"}
    with (out / "cpu-small.csv").open() as stream:
        rows = {row["loop"]: row for row in csv.DictReader(stream)}
    assert set(rows) == {"trainctl", "bare", "transformers"}
    own = float(rows["trainctl"]["tokens_per_second"])
    for loop, row in rows.items():
        assert row["problem"] == "", row["problem"]
        assert float(row["tokens_per_second"]) > 0 and int(row["peak_bytes"]) > 2**26
        if loop != "trainctl":
            assert float(row["ratio"]) == pytest.approx(own / float(row["tokens_per_second"]))
    assert int(rows["trainctl"]["planned_low_bytes"]) > 0
    page = (out / "cpu-small.md").read_text()
    assert "No GPU here" in page and page.count("| zero3-checkpointing |") == 3


def test_what_is_asked_for_wrongly_is_said() -> None:
    done = check("--cases", "zero1,zero9")
    assert done.returncode == 2
    assert "no such case: zero9" in done.stderr
    assert check("--steps", "3", "--warmup", "3").returncode == 2
