"""The whole budget: its JSON, whether a plan fits, monotony, and degenerate plans."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from memory_plans import GIB, GPT2, LLAMA_2_7B, LLAMA_3_8B, TINY, make_plan

from trainctl.config.registry import list_kinds
from trainctl.config.schema import (
    Accelerator,
    AttentionKind,
    ModelConfig,
    OffloadDevice,
)
from trainctl.memory.budget import MemoryBudget, budget

COMPONENTS = {
    "parameters",
    "gradients",
    "master_weights",
    "optimizer_states",
    "weight_average",
    "activations",
    "logits",
    "key_value_cache",
    "communication_buffers",
    "gathered_parameters",
    "retained_weights",
    "step_transient",
    "runtime",
}


def test_json_has_the_settled_keys() -> None:
    plain = budget(make_plan(LLAMA_3_8B, pipeline=2, accumulation=4)).to_json()
    assert set(plain) == {
        "schema",
        "fits",
        "device_capacity_bytes",
        "device_peak_bytes",
        "device_peak_low_bytes",
        "device_peak_high_bytes",
        "device_reserved_bytes",
        "peak_phase",
        "phases",
        "components",
        "stages",
        "host",
        "nvme_bytes_per_node",
        "checkpoint_bytes",
        "checkpoints_kept_bytes",
        "weights_only_bytes",
        "weights_only_kept_bytes",
        "notes",
    }
    assert plain["schema"] == 1
    assert list(plain["phases"]) == [
        "load",
        "forward_end",
        "backward_start",
        "backward_end",
        "step",
    ]
    assert set(plain["components"]) == COMPONENTS
    assert [set(stage) for stage in plain["stages"]] == 2 * [
        {"pipeline_stage", "peak_bytes", "components"}
    ]
    assert set(plain["stages"][0]["components"]) == COMPONENTS
    assert set(plain["host"]) == {"bytes_per_node", "components"}
    assert json.loads(json.dumps(plain)) == plain


def test_peak_is_the_largest_phase_of_the_fullest_stage() -> None:
    memory = budget(make_plan(LLAMA_3_8B, pipeline=4, accumulation=8, zero_stage__stage=1))
    assert memory.device_peak_bytes == max(memory.phases.values())
    assert memory.device_peak_bytes == memory.phases[memory.peak_phase]
    assert memory.device_peak_bytes == sum(memory.components.to_json().values())
    assert memory.device_peak_bytes == max(stage.peak_bytes for stage in memory.stages)
    assert memory.device_peak_low_bytes < memory.device_peak_bytes < memory.device_peak_high_bytes


def test_first_pipeline_stage_holds_most_micro_batches() -> None:
    plan = make_plan(
        LLAMA_3_8B, pipeline=4, accumulation=8, sequence_length=16_384, zero_stage__stage=1
    )
    memory = budget(plan)
    assert memory.peak_phase == "backward_start"
    activations = [stage.components.activations for stage in memory.stages]
    assert activations[0] > activations[1] > activations[2]


def test_fits_only_outside_the_band() -> None:
    memory = budget(make_plan(LLAMA_3_8B))

    def verdict(capacity: int | None) -> bool | None:
        return budget(make_plan(LLAMA_3_8B, device_memory=capacity)).fits

    assert verdict(memory.device_peak_high_bytes) is True
    assert verdict(memory.device_peak_bytes) is None
    assert verdict(memory.device_peak_low_bytes - 1) is False


def test_unknown_capacity_is_not_decided() -> None:
    memory = budget(make_plan(device_memory=None))
    assert memory.fits is None
    assert memory.device_capacity_bytes == 0
    assert any("not known" in note for note in memory.notes)


def test_budget_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        budget(make_plan()).fits = True  # type: ignore[misc]


def test_checkpoints_kept_count_the_one_being_written_and_the_best() -> None:
    memory = budget(make_plan(LLAMA_3_8B, checkpoint__keep=2))
    assert memory.checkpoint_bytes == pytest.approx(12 * 8_030_261_248, rel=1e-4)
    assert memory.checkpoints_kept_bytes == 3 * memory.checkpoint_bytes
    best = budget(make_plan(LLAMA_3_8B, checkpoint__keep=2, checkpoint__best_of="loss"))
    assert best.checkpoints_kept_bytes == 4 * memory.checkpoint_bytes


def test_weights_alone_are_counted_beside_the_checkpoints() -> None:
    """2 bytes a parameter in bf16; in 10 steps every 3 three of them, or those kept and one."""
    memory = budget(make_plan(LLAMA_3_8B))
    assert memory.weights_only_bytes == memory.weights_only_kept_bytes == 0
    alone = budget(make_plan(LLAMA_3_8B, checkpoint__weights_only_every_steps=3))
    assert alone.weights_only_bytes == pytest.approx(2 * 8_030_261_248, rel=1e-4)
    assert alone.weights_only_kept_bytes == 3 * alone.weights_only_bytes
    assert alone.checkpoints_kept_bytes == memory.checkpoints_kept_bytes
    kept = make_plan(
        LLAMA_3_8B, checkpoint__weights_only_every_steps=3, checkpoint__weights_only_keep=1
    )
    assert budget(kept).weights_only_kept_bytes == 2 * alone.weights_only_bytes


def test_on_cpu_the_host_contains_the_ranks_once() -> None:
    memory = budget(make_plan(TINY, devices=2, accelerator=Accelerator.cpu))
    assert memory.host.components == {"processes": 2 * memory.device_peak_bytes}
    assert memory.host.bytes_per_node == 2 * memory.device_peak_bytes


@pytest.mark.parametrize("pin", [False, True])
def test_offloaded_adam_takes_18_bytes_a_parameter_before_rounding(pin: bool) -> None:
    plan = make_plan(
        LLAMA_3_8B,
        zero_stage__stage=3,
        offload__optimizer=OffloadDevice.cpu,
        offload__pin_memory=pin,
    )
    parts = dict(budget(plan).host.components)
    parts.pop("processes")
    per_parameter = sum(parts.values()) / 8_030_261_248
    if pin:
        assert 18 < per_parameter < 24
        assert (parts["gradients"] // 8).bit_count() == 1
    else:
        assert per_parameter == pytest.approx(18, rel=1e-3)


def test_nvme_holds_shard_master_and_moments() -> None:
    plan = make_plan(
        LLAMA_3_8B,
        devices=1,
        zero_stage__stage=3,
        offload__optimizer=OffloadDevice.nvme,
        offload__parameters=OffloadDevice.nvme,
        offload__max_in_cpu=0,
    )
    memory = budget(plan)
    assert memory.nvme_bytes_per_node == pytest.approx(14 * 8_030_261_248, rel=1e-4)
    assert memory.host.components["nvme_parameter_buffers"] == 2**30


def test_writing_checkpoints_behind_takes_a_copy_on_the_host() -> None:
    options = {"zero_stage__stage": 3, "offload__optimizer": OffloadDevice.cpu}
    copied = budget(make_plan(LLAMA_3_8B, checkpoint__asynchronous=True, **options))
    waiting = budget(make_plan(LLAMA_3_8B, **options))
    copy = copied.host.components["checkpoint_copy"]
    assert copy == pytest.approx(12 * 8_030_261_248, rel=1e-3)
    assert copied.host.bytes_per_node == waiting.host.bytes_per_node + copy
    options |= {"offload__optimizer": OffloadDevice.nvme, "offload__nvme_path": "/n"}
    on_nvme = budget(make_plan(LLAMA_3_8B, checkpoint__asynchronous=True, **options))
    assert "checkpoint_copy" not in on_nvme.host.components


@pytest.mark.parametrize("zero", [0, 3])
def test_layer_statistics_copy_each_weight_to_some_host_once(zero: int) -> None:
    plan = make_plan(LLAMA_3_8B, nodes=2, zero_stage__stage=zero)
    plan.config.callbacks = {"layer_statistics": {}}
    found = budget(plan).host.components["callbacks"]
    assert found == pytest.approx(4 * 8_030_261_248 / 2, rel=1e-6)


def test_offloaded_block_inputs_move_to_the_host() -> None:
    common = {"sequence_length": 8192, "activation_checkpointing__mode": "full"}
    stay = budget(make_plan(LLAMA_3_8B, **common))
    move = budget(make_plan(LLAMA_3_8B, activation_checkpointing__offload_to_cpu=True, **common))
    inputs = 2 * 8192 * 4096 * 32
    assert move.host.components["activations"] == 8 * inputs
    # One block's input is on the device at a time.
    assert stay.phases["forward_end"] - move.phases["forward_end"] == inputs * 31 // 32


def test_known_configurations_are_judged_right() -> None:
    """Llama-2 7B on one 24 GB card does not fit without offload, and does on 8 x 80 GB."""
    assert budget(make_plan(LLAMA_2_7B, devices=1, device_memory=24 * GIB)).fits is False
    plan = make_plan(
        LLAMA_2_7B,
        zero_stage__stage=3,
        activation_checkpointing__mode="full",
    )
    assert budget(plan).fits is True


MODES = st.fixed_dictionaries(
    {
        "zero_stage__stage": st.integers(0, 3),
        "activation_checkpointing__mode": st.sampled_from(list_kinds("activation_checkpointing")),
        "offload__optimizer": st.sampled_from([OffloadDevice.none, OffloadDevice.cpu]),
        "accumulation": st.integers(1, 3),
        "accelerator": st.sampled_from([Accelerator.cuda, Accelerator.cpu]),
        "model": st.sampled_from(
            [
                LLAMA_2_7B,
                GPT2,
                replace(TINY, attention=AttentionKind.eager),
                replace(TINY, family="qwen3"),
            ]
        ),
    }
)


def peak(modes: dict[str, Any], **changes: Any) -> MemoryBudget:
    return budget(make_plan(**{**modes, **changes}))


@given(modes=MODES, micro=st.integers(1, 8))
@settings(max_examples=60)
def test_more_micro_batch_never_needs_less(modes: dict[str, Any], micro: int) -> None:
    less, more = peak(modes, micro_batch=micro), peak(modes, micro_batch=micro + 1)
    assert all(less.phases[name] <= more.phases[name] for name in less.phases)


@given(modes=MODES, length=st.integers(1, 4096))
@settings(max_examples=60)
def test_longer_sequences_never_need_less(modes: dict[str, Any], length: int) -> None:
    less, more = peak(modes, sequence_length=length), peak(modes, sequence_length=length + 1)
    assert less.device_peak_bytes <= more.device_peak_bytes


@given(modes=MODES, layers=st.integers(0, 40))
@settings(max_examples=60)
def test_more_layers_never_need_less(modes: dict[str, Any], layers: int) -> None:
    less = peak(modes, model=replace(modes["model"], num_layers=layers))
    more = peak(modes, model=replace(modes["model"], num_layers=layers + 1))
    assert less.device_peak_bytes <= more.device_peak_bytes
    assert less.checkpoint_bytes <= more.checkpoint_bytes


@given(modes=MODES, zero=st.integers(0, 2))
@settings(max_examples=60)
def test_a_higher_stage_keeps_no_more_states(modes: dict[str, Any], zero: int) -> None:
    # Without ZeRO, fp32 weights need no copy and nothing can be offloaded.
    modes = {**modes, "offload__optimizer": OffloadDevice.none, "accumulation": 2}

    def states(stage: int) -> int:
        parts = peak(modes, zero_stage__stage=stage).stages[0].components
        return parts.master_weights + parts.optimizer_states + parts.parameters

    assert states(zero + 1) <= states(zero)


@pytest.mark.parametrize(
    "model",
    [
        replace(TINY, num_layers=0),
        replace(TINY, num_layers=0, vocab_size=0, hidden_size=0, intermediate_size=0),
        replace(LLAMA_2_7B, num_layers=12_500, hidden_size=8192, intermediate_size=24_576),
    ],
    ids=["no layers", "no parameters", "10^13 parameters"],
)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_degenerate_models_break_nothing(model: ModelConfig, zero: int) -> None:
    for offload in OffloadDevice:
        plan = make_plan(
            model,
            pipeline=4,
            zero_stage__stage=zero,
            offload__optimizer=offload,
            offload__parameters=offload,
        )
        plain = budget(plan).to_json()
        assert all(value >= 0 for value in plain["components"].values())
        assert plain["device_peak_low_bytes"] <= plain["device_peak_high_bytes"]


def test_needs_no_torch() -> None:
    code = (
        "import sys, trainctl.memory.budget, trainctl.tuning.suggest;"
        "sys.exit('torch' in sys.modules or 'deepspeed' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
