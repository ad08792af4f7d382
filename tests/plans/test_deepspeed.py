"""The rendered JSON: golden files, and what the installed DeepSpeed makes of it at its size."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from plan_cases import config_with, cpus, gpus
from whole_recipes import WHOLE

from trainctl.config.codec import to_plain
from trainctl.config.compose import compose
from trainctl.config.registry import list_kinds
from trainctl.hardware import resolve_hardware
from trainctl.rules.resolve import resolve

GOLDEN = Path(__file__).parent / "golden"
LOADER = Path(__file__).parent / "load_deepspeed_config.py"

NVME = {"offload__optimizer": "nvme", "offload__parameters": "nvme", "offload__nvme_path": "/n"}

CASES = {
    "stage-0-fp32-cpu": ({"zero_stage__stage": 0, "precision__compute": "fp32"}, cpus(2)),
    "stage-1-bf16": ({}, gpus(8)),
    "stage-2-fp16": ({"zero_stage__stage": 2, "precision__compute": "fp16"}, gpus(8)),
    "stage-3-unclipped": ({"zero_stage__stage": 3, "optimizer__gradient_clipping": 0.0}, gpus(8)),
    "stage-3-nvme": ({"zero_stage__stage": 3, **NVME}, gpus(2)),
    "stage-2-offload-zenflow": (
        {
            "zero_stage__stage": 2,
            "offload__optimizer": "cpu",
            "offload__zenflow": True,
            "offload__zenflow_update_interval": 4,
            "offload__zenflow_select_interval": 16,
            "optimizer__gradient_clipping": 0.0,
        },
        gpus(2),
    ),
    "low-memory": (
        {"precision__master_weights": "bf16", "precision__optimizer_states": "bf16"},
        gpus(8),
    ),
    "autocast": ({"precision__autocast": True, "zero_stage__stage": 2}, gpus(8)),
    "tensor-2": ({"parallelism__tensor": 2}, gpus(8)),
    "sequence-4": ({"parallelism__sequence": 4, "precision__communication": "fp32"}, gpus(8)),
    "3d": (
        {
            "parallelism__tensor": 4,
            "parallelism__pipeline": 2,
            "training__gradient_accumulation_steps": 8,
            "launcher__kind": "slurm",
        },
        gpus(8, nodes=8),
    ),
    "checkpointing-offloaded": (
        {
            "activation_checkpointing__mode": "full",
            "activation_checkpointing__offload_to_cpu": True,
        },
        gpus(8),
    ),
    "deepcompile": ({"zero_stage__stage": 3, "kernels__compile": "deepcompile"}, gpus(8)),
    "pass-through": (
        {"deepspeed": {"comms_logger": {"enabled": True}, "zero_optimization": {"stage": 1}}},
        gpus(8),
    ),
}


def plan_of(name):
    changes, hardware = CASES[name]
    resolution = resolve(config_with(**changes), hardware)
    assert resolution.plan is not None, resolution.findings
    return resolution.plan


def optimizer_plan(kind):
    """Plan a user's program with this optimizer: trainctl's own trainer builds some itself."""
    config = config_with(optimizer__kind=kind, zero_stage__stage=1, script="train.py")
    return resolve(config, gpus(2)).plan


def recipe_plan(name):
    config = compose([f"recipe={name}"]).config
    resolution = resolve(config, resolve_hardware(config.hardware))
    assert resolution.plan is not None, resolution.findings
    return resolution.plan


def case_of(plan, *, mpu=True):
    return {"mesh": to_plain(plan.mesh), "json": plan.deepspeed, "mpu": mpu}


@pytest.fixture(scope="module")
def loaded():
    """DeepSpeed's reading of every case, optimizer and recipe, from one process."""
    plans = {name: plan_of(name) for name in CASES}
    plans |= {kind: optimizer_plan(kind) for kind in list_kinds("optimizer")}
    for name in WHOLE:
        config = compose([f"recipe={name}"]).config
        plan = resolve(config, resolve_hardware(config.hardware)).plan
        if plan is not None:  # else the recipe's own test says why
            plans[f"recipe {name}"] = plan
    cases = {name: case_of(plan) for name, plan in plans.items()}
    cases["tensor without mpu"] = case_of(plans["tensor-2"], mpu=False)
    environment = {**os.environ, "DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(LOADER)],
        input=json.dumps(list(cases.values())),
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(cases, json.loads(done.stdout), strict=True))


def reason_of(plan, key):
    return next(derived.reason for derived in plan.derived if derived.key == key)


def assert_accepted(plan, answer):
    assert "error" not in answer, answer["error"]
    assert answer["data_parallel_size"] == plan.mesh.data
    assert answer["train_batch_size"] == plan.batch.global_batch_size
    assert answer["zero_stage"] == plan.config.zero_stage.stage
    trainer_clips = "the trainer clips" in reason_of(plan, "gradient_clipping")
    limit = plan.config.optimizer.gradient_clipping
    assert answer["gradient_clipping"] == (0.0 if trainer_clips else limit)


@pytest.mark.parametrize("name", CASES)
def test_the_json_is_what_it_was(name):
    text = json.dumps(plan_of(name).deepspeed, indent=2) + "\n"
    golden = GOLDEN / f"{name}.json"
    if os.environ.get("TRAINCTL_UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(text)
    assert text == golden.read_text()


@pytest.mark.parametrize("name", CASES)
def test_deepspeed_loads_it_with_the_true_global_batch(name, loaded):
    assert_accepted(plan_of(name), loaded[name])


@pytest.mark.parametrize("name", WHOLE)
def test_deepspeed_loads_every_recipe_at_its_world_size(name, loaded):
    plan = recipe_plan(name)
    assert_accepted(plan, loaded[f"recipe {name}"])
    assert '"auto"' not in json.dumps(plan.deepspeed)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("adamw", "AdamW"),
        ("adam", "Adam"),
        ("sgd", "SGD"),
        ("adafactor", "Adafactor"),
        ("muon", "MuonWithAuxAdam"),
        ("lion", None),
        ("lamb", None),
        ("adamw_8bit", None),
    ],
)
def test_deepspeed_builds_the_optimizer_that_the_block_names(kind, expected, loaded):
    assert_accepted(optimizer_plan(kind), loaded[kind])
    assert loaded[kind]["optimizer"] == expected


def test_without_an_mpu_a_tensor_parallel_json_is_refused_and_not_trained_wrongly(loaded):
    assert "32" not in loaded["tensor without mpu"]
    assert "Check batch related parameters" in loaded["tensor without mpu"]["error"]


def test_sizes_are_written_as_whole_numbers():
    zero = plan_of("stage-3-nvme").deepspeed["zero_optimization"]
    sizes = [value for key, value in zero.items() if key.endswith(("size", "threshold"))]
    assert sizes and all(type(size) is int for size in sizes)


def test_every_key_has_a_reason():
    plan = plan_of("pass-through")
    reasons = {derived.key: derived for derived in plan.derived}
    assert "data 8" in reasons["train_batch_size"].reason
    assert reasons["optimizer.params.lr"].reason.startswith("optimizer.lr")
    assert reasons["zero_optimization.reduce_bucket_size"].reason == "zero_stage.reduce_bucket_size"
    assert reasons["comms_logger.enabled"].reason == "deepspeed.comms_logger.enabled"

    def leaves(value, prefix=""):
        for name, item in value.items():
            if isinstance(item, dict):
                yield from leaves(item, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", item

    assert {key: reasons[key].value for key, _ in leaves(plan.deepspeed)} == dict(
        leaves(plan.deepspeed)
    )
