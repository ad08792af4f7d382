"""States and phases against DeepSpeed's published measurements and the ZeRO paper."""

from __future__ import annotations

import pytest
from memory_plans import GIB, LLAMA_3_8B, make_plan

from trainctl.config.registry import new_section
from trainctl.config.schema import (
    AttentionKind,
    DataType,
    ModelConfig,
    OffloadDevice,
)
from trainctl.memory.engine import read_engine
from trainctl.memory.phases import phases
from trainctl.memory.rank import Components
from trainctl.memory.stages import Piece, Stage, pipeline_stages
from trainctl.plans.types import RunPlan


def one_stage(plan: RunPlan) -> Stage:
    (stage,) = pipeline_stages(plan.config.model)
    return stage


def moments(plan: RunPlan, stage: Stage | None = None) -> dict[str, Components]:
    """Phases without any runtime, so that all is tensors."""
    return phases(plan, read_engine(plan), stage or one_stage(plan), 0)


def states(moment: Components) -> int:
    """Return the bytes of model states that Figure 1 of the ZeRO paper counts."""
    return moment.parameters + moment.gradients + moment.master_weights + moment.optimizer_states


@pytest.mark.parametrize(
    ("zero", "published"), [(0, 120e9), (1, 31.41e9), (2, 16.64e9), (3, 1.875e9)]
)
def test_zero_paper_figure_1(zero: int, published: float) -> None:
    """arXiv:1910.02054, Figure 1: 7.5B parameters, 64 ranks."""
    plan = make_plan(devices=8, nodes=8, accumulation=2, zero_stage__stage=zero)
    stage = Stage(
        index=0,
        blocks=1,
        has_embedding=True,
        has_head=True,
        embedding=0,
        head=0,
        pieces=(
            Piece(numel=7_500_000, count=1000, is_matrix=True, in_block=True, embedding=False),
        ),
    )
    forward = moments(plan, stage)["forward_end"]
    assert states(forward) == pytest.approx(published, rel=1e-3)


def test_offload_states_readme_to_the_byte() -> None:
    """DeepSpeedExamples, training/offload_states/README.md: 4 linear layers of 32768, ZeRO-3 on 4
    devices, 18,198,419,456 bytes allocated, of which its log leaves 17,763,840 when all states
    have been moved away."""
    pieces = (
        Piece(numel=32_768**2, count=4, is_matrix=True, in_block=True, embedding=False),
        Piece(numel=32_768, count=4, is_matrix=False, in_block=True, embedding=False),
    )
    stage = Stage(
        index=0, blocks=4, has_embedding=True, has_head=True, embedding=0, head=0, pieces=pieces
    )
    step = moments(make_plan(devices=4, zero_stage__stage=3), stage)["step"]
    assert step.total - step.step_transient == 18_198_419_456 - 17_763_840


TRANSFORMER_7B = ModelConfig(
    family="gpt2",
    vocab_size=50_000,
    hidden_size=4096,
    intermediate_size=16_384,
    num_layers=32,
    num_attention_heads=32,
    max_position_embeddings=512,
    attention=AttentionKind.eager,
)


def bf16_master_plan(*, low: bool) -> RunPlan:
    """DeepSpeedExamples, training/bf16_master_weight: 6.86B, ZeRO-3 on 4 H100, FusedAdam."""
    kept_in = DataType.bf16 if low else DataType.fp32
    return make_plan(
        TRANSFORMER_7B,
        devices=4,
        sequence_length=512,
        zero_stage__stage=3,
        zero_stage__reduce_bucket_size=50_000_000,
        zero_stage__param_persistence_threshold=0,
        precision__master_weights=kept_in,
        precision__optimizer_states=kept_in,
        activation_checkpointing__mode="full",
    )


@pytest.mark.parametrize(("low", "measured"), [(False, 25.74), (True, 16.17)])
def test_allocated_after_a_step(low: bool, measured: float) -> None:
    """`measured` is the README's allocated memory. Its script also keeps the logits (0.05 GiB)."""
    step = moments(bf16_master_plan(low=low))["step"]
    resident = step.total - step.step_transient
    assert resident == pytest.approx((measured - 0.05) * GIB, rel=0.005)


def test_peak_is_the_update_of_a_sub_group() -> None:
    """The same README's peak with checkpointing is 31.38 GiB: 6 bytes for each of 10^9 elements."""
    fullest = moments(bf16_master_plan(low=False))["step"]
    assert fullest.step_transient == 6 * 10**9
    assert fullest.total == pytest.approx(31.38 * GIB, rel=0.01)


def test_stage_3_keeps_weights_for_backward_without_memory_efficient_linear() -> None:
    """12.0 GiB of the 15.5 GiB that the README's peak rises without checkpointing."""
    plan = bf16_master_plan(low=False)
    plan.config.activation_checkpointing = new_section("activation_checkpointing", "none")
    assert moments(plan)["forward_end"].retained_weights == pytest.approx(12.0 * GIB, rel=0.01)
    llama = make_plan(LLAMA_3_8B, zero_stage__stage=3)
    assert moments(llama)["forward_end"].retained_weights == 0
    old = make_plan(
        LLAMA_3_8B,
        zero_stage__stage=3,
        deepspeed={"zero_optimization": {"memory_efficient_linear": False}},
    )
    assert moments(old)["forward_end"].retained_weights > 13e9


@pytest.mark.parametrize("compute", [DataType.bf16, DataType.fp32])
def test_bytes_per_parameter_of_a_real_engine(compute: DataType) -> None:
    """Bytes per parameter resident after a step, 1 rank, Adam, as counted over the live tensors of
    DeepSpeed 0.19.8 engines of a small Llama on the CPU."""
    counted = {DataType.bf16: (14, 14, 14, 16), DataType.fp32: (12, 16, 16, 20)}[compute]
    for zero, expected in enumerate(counted):
        plan = make_plan(
            devices=1,
            precision__compute=compute,
            zero_stage__stage=zero,
            zero_stage__param_persistence_threshold=0,
        )
        stage = one_stage(plan)
        step = moments(plan)["step"]
        kept = step.parameters + step.master_weights + step.optimizer_states
        if zero == 3:
            kept += moments(plan)["forward_end"].gradients
        assert kept == expected * stage.parameters


def test_fp32_accumulation_at_stage_1_is_not_partitioned() -> None:
    """BF16_Optimizer: 2 + 4 (gradients) + 12/N, and bf16 gradients until the step."""
    plan = make_plan(
        devices=8,
        accumulation=2,
        zero_stage__stage=1,
        precision__gradient_accumulation=DataType.fp32,
    )
    per_parameter = states(moments(plan)["forward_end"]) / one_stage(plan).parameters
    assert per_parameter == pytest.approx(2 + 4 + 2 + 12 / 8, rel=1e-3)


def test_offloaded_optimizer_leaves_the_device() -> None:
    for zero in (1, 2, 3):
        step = moments(
            make_plan(LLAMA_3_8B, zero_stage__stage=zero, offload__optimizer=OffloadDevice.cpu)
        )["step"]
        assert step.master_weights == step.optimizer_states == step.gradients == 0


def test_offload_ratio_keeps_whole_sub_groups() -> None:
    common = {"zero_stage__stage": 3, "offload__optimizer": OffloadDevice.cpu}
    plan = make_plan(
        LLAMA_3_8B, zero_stage__sub_group_size=100_000_000, offload__ratio=0.5, **common
    )
    half = moments(plan)["step"]
    assert half.optimizer_states == pytest.approx(4e9, rel=0.1)
    # One sub-group cannot be halved.
    whole = moments(make_plan(LLAMA_3_8B, devices=64, offload__ratio=0.5, **common))["step"]
    assert whole.optimizer_states in (0, pytest.approx(0.5e9, rel=0.01))


@pytest.mark.parametrize(
    ("kind", "per_parameter"),
    [
        ("adamw", 8),
        ("lion", 4),
        ("adamw_8bit", 2.03),
        ("sgd", 4),
    ],
)
def test_optimizer_states(kind: str, per_parameter: float) -> None:
    plan = make_plan(LLAMA_3_8B, devices=1, optimizer__kind=kind)
    states_bytes = moments(plan)["step"].optimizer_states
    assert states_bytes / one_stage(plan).parameters == pytest.approx(per_parameter, rel=0.001)


def test_muon_keeps_one_moment_of_block_matrices_and_two_of_the_rest() -> None:
    plan = make_plan(LLAMA_3_8B, devices=1, optimizer__kind="muon")
    stage = one_stage(plan)
    matrices = sum(piece.total for piece in stage.pieces if piece.in_block and piece.is_matrix)
    expected = 4 * matrices + 8 * (stage.parameters - matrices)
    assert moments(plan)["step"].optimizer_states == expected


def test_long_sequences_peak_at_the_loss() -> None:
    """ALST, sp1 8B, one H100: 71.91 GiB by NVML at 32,000 tokens, plain cross entropy."""
    plan = make_plan(
        LLAMA_3_8B,
        devices=1,
        sequence_length=32_000,
        zero_stage__stage=3,
        offload__optimizer=OffloadDevice.cpu,
        offload__parameters=OffloadDevice.cpu,
        activation_checkpointing__mode="full",
    )
    start = moments(plan)["backward_start"]
    assert start.logits == 14 * 32_000 * 128_256
    assert start.total == pytest.approx(71.91 * GIB, rel=0.10)
