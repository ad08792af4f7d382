"""Every shipped recipe trains, with its own settings, when it is shrunk to this machine.

On ranks that are forked, as in `tests/train`: what a launch adds is the same for all of them. The
one for NVMe is launched in `tests/e2e/test_runs.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from rank_processes import Case, curve, train_cases
from whole_recipes import WHOLE

from trainctl.config.compose import compose
from trainctl.hardware import resolve_hardware
from trainctl.plan.resolve import resolve
from trainctl.runs.layout import RunPaths

SMALL = (
    "model=tiny-llama",
    "launcher=local",
    "training.steps=3",
    "training.tokens=null",
    "training.sequence_length=64",
    "training.global_batch_size=16",
    "training.micro_batch_size=1",
    "training.gradient_accumulation_steps=null",
    "schedule.warmup_steps=1",
    "data=stdlib",
    "data.max_bytes=1000000",
    "tokenizer=byte",
)
FITTED = {
    "70b-3d": ["hardware=8xcpu", "parallelism.data=null", "model.num_key_value_heads=4"],
    "8b-long-context": [
        "hardware=4xcpu",
        "parallelism.sequence=4",
        "training.global_batch_size=4",
        "model.num_attention_heads=4",
        "model.num_key_value_heads=4",
    ],
}
"""What fits a recipe to the small model and to few processes; the others are trained on two."""


NAMES = [name for name in WHOLE if name != "7b-zero3-nvme"]


@pytest.mark.slow
@pytest.mark.timeout(1800)  # DeepSpeed compiles what offload needs when it is first used
@pytest.mark.parametrize("name", NAMES)
def test_it_trains_when_shrunk(name: str, tmp_path: Path) -> None:
    fitted = FITTED.get(name, ["hardware=2xcpu"])
    config = compose([f"recipe={name}", *SMALL, *fitted]).config
    resolution = resolve(config, resolve_hardware(config.hardware))
    assert resolution.plan is not None, resolution.findings
    run = RunPaths(tmp_path / "run")
    train_cases(resolution.plan.mesh.world_size, [Case(resolution.plan, run)])
    assert list(curve(run)) == [1, 2, 3]
