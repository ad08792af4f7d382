"""A torch module that is not of transformers trains as torch alone would train it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from module_cases import module_config
from plain_torch import plain_torch
from rank_processes import Case, curve, tiny_plan, train_cases, with_stop
from test_census import counted, kept_of_stage, predicted

from trainctl.memory.engine import read_engine
from trainctl.memory.stages import stages_from_anatomy
from trainctl.plans.types import RunPlan
from trainctl.runs.layout import RunPaths
from trainctl.train.models.trace import trace

STEPS = 4

CASES: dict[str, dict[str, Any]] = {
    **{f"ZeRO {stage}": {"zero_stage__stage": stage} for stage in range(4)},
    "recomputed, ZeRO 3": {"zero_stage__stage": 3, "activation_checkpointing__mode": "full"},
    "products kept, ZeRO 1": {
        "zero_stage__stage": 1,
        "activation_checkpointing__mode": "selective",
    },
    "on the host, averaged": {
        "zero_stage__stage": 2,
        "offload__optimizer": "cpu",
        "ema_decay": 0.9,
    },
    "FSDP2": {"engine__kind": "fsdp2", "zero_stage__stage": 3},
    "FSDP2, recomputed": {
        "engine__kind": "fsdp2",
        "zero_stage__stage": 3,
        "activation_checkpointing__mode": "full",
    },
}


@pytest.mark.slow
def test_every_layout_has_the_curve_of_torch_alone(tmp_path: Path) -> None:
    common = {
        "steps": STEPS,
        "optimizer__lr": 1e-2,
        "schedule__kind": "constant",
        "schedule__warmup_steps": 0,
    }
    expected = plain_torch(module_config("bare", **common), tmp_path / "plain", steps=STEPS).curve
    runs = {name: RunPaths(tmp_path / str(index)) for index, name in enumerate(CASES)}
    cases = [
        Case(tiny_plan(module_config("bare", **common, **changes), 2), runs[name])
        for name, changes in CASES.items()
    ]
    train_cases(2, cases, together=True)
    for name, run in runs.items():
        found = curve(run)
        assert list(found) == list(expected), name
        for step, (loss, norm) in expected.items():
            assert found[step] == pytest.approx((loss, norm), rel=1e-5), (name, step)


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{"zero_stage__stage": 3}, {"engine__kind": "fsdp2"}])
def test_resume_is_exact(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = module_config("full", steps=STEPS, **{"zero_stage__stage": 3, **changes})
    plan, whole, parts = tiny_plan(config, 2), RunPaths(tmp_path / "a"), RunPaths(tmp_path / "b")
    train_cases(2, [Case(plan, whole), Case(with_stop(plan, 2), parts)])
    train_cases(2, [Case(plan, parts, attempt=2)])
    assert len(curve(whole)) == STEPS and curve(parts) == curve(whole)


@pytest.mark.slow
def test_memory_is_that_of_the_budget(tmp_path: Path) -> None:
    """States of every ZeRO stage after a step, and what a forward pass saves, within 2 %."""
    wide = {"width": 128, "depth": 6}
    plans = {
        f"ZeRO {stage}": tiny_plan(
            module_config(
                "full",
                arguments=wide,
                steps=2,
                sequence_length=64,
                zero_stage__stage=stage,
                zero_stage__reduce_bucket_size=5_000,
            ),
            2,
        )
        for stage in range(4)
    }
    expected = {name: pytest.approx(predicted(of), rel=0.02) for name, of in plans.items()}
    for rank in counted(2, plans, tmp_path / "states"):
        assert rank == expected
    saved = {name: pytest.approx(traced_kept(of), rel=0.02) for name, of in plans.items()}
    for rank in counted(2, plans, tmp_path / "saved", probe="kept_probe:kept"):
        assert rank == saved


def traced_kept(of: RunPlan) -> int:
    """Bytes of activations of the blocks, the last norm and the head, by the trace."""
    engine, traced = read_engine(of), trace(of.config)
    (stage,) = stages_from_anatomy(traced.anatomy, traced=traced.block)
    return kept_of_stage(of, engine, stage)
