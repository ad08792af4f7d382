"""Tests that gathering by decoder block gives exactly what gathering module by module gives."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from adapter_cases import Adapting, config_of
from expert_cases import mixture
from module_cases import module_config
from parity_cases import Difference
from rank_processes import Case, curve, goes_on_exactly, tiny_config, tiny_plan, train_cases

from trainctl.config.registry import new_section
from trainctl.config.schema import CompileKind, GatherUnit, OffloadDevice, RunConfig
from trainctl.plans.gathering import gathers_blocks
from trainctl.plans.types import RunPlan
from trainctl.runs.layout import RunPaths

STEPS = 4
EXACT = Difference(1e-6, 1e-6)
LORA = Adapting("lora-all", "DP2", "3")
"""The input of the first block has no gradient: the embedding is frozen."""

SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "tied": {},
    "full": {"activation_checkpointing__mode": "full"},
    "selective": {"activation_checkpointing__mode": "selective"},
    "offloaded": {"offload__parameters": OffloadDevice.cpu, "offload__optimizer": "cpu"},
    "nothing ahead": {"zero_stage__prefetch_bucket_size": 0},
    "sequence": {"parallelism__sequence": 2},
    "context": {"parallelism__context": 2, "activation_checkpointing__mode": "selective"},
    "tiles": {"kernels__mlp_tiles": 2, "activation_checkpointing__mode": "full"},
    "bf16": {"precision__compute": "bf16", "model__family": "qwen3"},
}
ON_FOUR: Mapping[str, Mapping[str, Any]] = {
    "tensor": {"parallelism__tensor": 2, "activation_checkpointing__mode": "selective"},
    "hpz": {"zero_stage__hpz_partition_size": 2},
}


def changed(**changes: Any) -> RunConfig:
    mode = changes.pop("activation_checkpointing__mode", None)
    config = tiny_config(
        steps=STEPS,
        sequence_length=32,
        evaluation_samples=0,
        checkpoint__at_end=False,
        optimizer__lr=1e-3,
        optimizer__gradient_clipping=0.5,
        zero_stage__stage=3,
        **changes,
    )
    if mode is not None:
        config.activation_checkpointing = new_section("activation_checkpointing", mode)
    return config


def differences(
    folder: Path, configs: Mapping[str, RunConfig], processes: int = 2
) -> dict[str, Difference]:
    """Train each configuration by block and by module; return the curves that differ by more than
    the order in which a tensor's gradients are added.
    """
    cases: dict[tuple[str, GatherUnit], Case] = {}
    for name, config in configs.items():
        for unit in GatherUnit:
            each = deepcopy(config)
            each.zero_stage.gather = unit
            plan = tiny_plan(each, processes)
            cases[name, unit] = Case(plan, RunPaths(folder / f"{name} by {unit.value}"))
    train_cases(processes, list(cases.values()), together=True)
    curves = {key: curve(case.run) for key, case in cases.items()}
    for name in configs:
        first, *_, last = curves[name, GatherUnit.blocks].values()
        assert first[0] > last[0] > 0, name
    found = {
        name: Difference.between(*(curves[name, unit] for unit in GatherUnit)) for name in configs
    }
    print(found)
    return {name: each for name, each in found.items() if not each.within(EXACT)}


def test_frozen_embeddings_tied_ones_and_recomputation_have_the_same_curve(tmp_path: Path) -> None:
    lora, wanted = config_of(LORA, STEPS), ("tied", "full", "selective")
    lora.zero_stage.reduce_bucket_size = 100  # a gradient that comes late is not in the bucket
    configs = {name: changed(**SETTINGS[name]) for name in wanted}
    assert differences(tmp_path, {"lora": lora, **configs}) == {}


@pytest.mark.slow
def test_all_other_settings_have_the_same_curve(tmp_path: Path) -> None:
    configs = {name: changed(**SETTINGS[name]) for name in list(SETTINGS)[3:]}
    configs["quantized"] = config_of(Adapting("nf4", "DP2", "3", "full"), STEPS)
    configs["module"] = module_config(steps=STEPS, zero_stage__stage=3)
    configs["some frozen"] = config_of(Adapting("last-blocks", "DP2", "3"), STEPS)
    experts = changed(parallelism__expert=2)
    experts.model = mixture(tmp_path / "model", "qwen3_moe")
    configs["experts"] = experts
    assert differences(tmp_path, configs) == {}
    on_four = {name: changed(**values) for name, values in ON_FOUR.items()}
    assert differences(tmp_path, on_four, processes=4) == {}


@pytest.mark.slow
def test_compiled_blocks_have_the_same_curve(tmp_path: Path) -> None:
    compiled = changed(kernels__compile=CompileKind.blocks)
    assert differences(tmp_path, {"compiled": compiled}) == {}


@pytest.mark.slow
def test_a_killed_run_goes_on_exactly(tmp_path: Path) -> None:
    config = changed(checkpoint__every_steps=2, activation_checkpointing__mode="full")
    config.zero_stage.gather = None
    goes_on_exactly(tmp_path, tiny_plan(config, 2), 2)


def counted_plan(unit: GatherUnit) -> RunPlan:
    config = changed(gradient_accumulation_steps=1, zero_stage__gather=unit, model__num_layers=6)
    return tiny_plan(config, 2)


def test_a_block_is_looked_up_once_in_each_pass(tmp_path: Path) -> None:
    """Hooks outside the blocks: the model's three nested modules, embedding, rotary embedding, norm
    and output projection.
    """
    cases = [
        Case(counted_plan(unit), RunPaths(tmp_path / unit.value))
        for unit in (GatherUnit.blocks, GatherUnit.modules)
    ]
    first, second = train_cases(2, cases, probe="gathered_probe:calls")
    assert first == second
    by_block, by_module = first
    assert by_block <= 2 * (6 + 7)
    assert by_module > 6 * by_block


def test_blocks_are_the_default_where_deepspeed_can_take_them() -> None:
    config = tiny_config(steps=1, zero_stage__stage=3)
    assert gathers_blocks(config)
    reasons = {item.key: item.reason for item in tiny_plan(config, 2).derived}
    assert "each block in one go" in reasons["zero_stage.gather"]
    config.zero_stage.max_live_parameters = 10_000
    assert not gathers_blocks(config)
    config.zero_stage.max_live_parameters = 1_000_000
    config.offload.parameters = OffloadDevice.nvme
    assert not gathers_blocks(config)
    config.offload.parameters = OffloadDevice.none
    config.kernels.compile = CompileKind.deepcompile
    assert not gathers_blocks(config)
    assert not gathers_blocks(tiny_config(zero_stage__stage=2))


def test_the_next_block_is_gathered_ahead() -> None:
    config = tiny_config(steps=1, zero_stage__stage=3, zero_stage__prefetch_bucket_size=1)
    key = "stage3_prefetch_bucket_size"
    block = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 176 + 2 * 64
    assert tiny_plan(config, 2).deepspeed["zero_optimization"][key] == block
    config.zero_stage.gather = GatherUnit.modules
    assert tiny_plan(config, 2).deepspeed["zero_optimization"][key] == 1
