"""`scripts/gpu_check.py` measures what a GPU changes, and runs through where there is none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from trainctl.config.compose import compose
from trainctl.hardware import resolve_hardware
from trainctl.memory.budget import budget
from trainctl.rules.resolve import resolve

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "scripts"))  # behind what else has these names

from gpu_check import overrides, write_pairs  # noqa: E402
from gpu_figures import FIGURES, Figure  # noqa: E402

BOTH = {"adam": "adamw's update", "sgd": "less than adamw", "nvme-optimizer": "nvme swaps it, too"}
"""Options that no figure needs: another has the same kernels and memory."""


def check(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / "gpu_check.py"), *arguments],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", **variables},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_a_figure_fits_its_device(figure: Figure, tmp_path: Path) -> None:
    write_pairs(tmp_path / "pairs.jsonl")
    words = overrides(figure, folder=tmp_path, count=1, on_gpu=True)
    config = compose([*words, f"hardware={figure.device}"]).config
    found = resolve(config, resolve_hardware(config.hardware))
    assert found.plan is not None, found.findings
    assert budget(found.plan).fits is not False


def test_every_option_that_a_gpu_computes_otherwise_is_measured() -> None:
    chosen = {word for figure in FIGURES for word in figure.options}
    for group in ("optimizer", "precision", "kernels", "offload", "activation_checkpointing"):
        options = {path.stem for path in (ROOT / "conf" / group).glob("*.yaml")}
        lacking = {name for name in options if f"{group}={name}" not in chosen} - set(BOTH)
        assert lacking <= {"none", "default", "adamw", "bf16"}, (group, lacking)


@pytest.mark.slow
@pytest.mark.usefixtures("preloaded")
def test_it_runs_through_on_a_cpu_and_goes_on_where_it_was(tmp_path: Path) -> None:
    out = tmp_path / "figures"
    done = check("--only", "1b,0.6b-liger-8k", "--out", str(out))
    assert done.returncode == 1, done.stdout + done.stderr  # Liger's kernels are for GPUs
    assert {path.name for path in out.iterdir()} == {"cpu-small.md", "cpu-small.jsonl"}
    lines = [json.loads(line) for line in (out / "cpu-small.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines] == ["1b", "0.6b-liger-8k"]
    rows = {row["loop"]: row for row in lines[0]["rows"]}
    assert set(rows) == {"trainctl", "bare", "transformers", "fsdp2"}
    own = rows["trainctl"]["tokens_per_second"]
    for loop, row in rows.items():
        assert row["problem"] == "", row["problem"]
        assert row["tokens_per_second"] > 0 and row["peak_bytes"] > 2**26
        if loop != "trainctl":
            assert row["ratio"] == pytest.approx(own / row["tokens_per_second"])
    assert rows["trainctl"]["planned_low_bytes"] > 0
    assert "liger" in lines[1]["rows"][0]["problem"]
    page = (out / "cpu-small.md").read_text()
    assert "No GPU here" in page and page.count("| 1b |") == 4

    again = check("--only", "1b,0.6b-zero0", "--minutes", "0", "--out", str(out))
    assert again.returncode == 0 and "1b: measured on" in again.stderr
    assert "not begun" in again.stderr and "0.6b-zero0" not in (out / "cpu-small.md").read_text()


def test_wrong_arguments_are_reported() -> None:
    done = check("--only", "1b,9b")
    assert done.returncode == 2
    assert "no such figure: 9b" in done.stderr
