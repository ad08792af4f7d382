"""The budget where not all of a model trains: states, activations, buckets and checkpoints."""

from __future__ import annotations

import pytest
from memory_plans import GPT2, LLAMA_3_8B, make_plan

from trainctl.memory.budget import budget
from trainctl.memory.engine import read_engine
from trainctl.memory.partial import trained_stages
from trainctl.memory.phases import resident_components
from trainctl.memory.stages import Stage, pipeline_stages
from trainctl.plans.trainable import trainable
from trainctl.plans.types import RunPlan

LORA = {"adapter__kind": "lora", "adapter__rank": 16, "adapter__targets": ["q_proj", "v_proj"]}
ADAPTER = 32 * 16 * (4096 + 4096 + 4096 + 1024)
"""Elements: A and B of queries and of values, in 32 blocks."""


def stages_of(plan: RunPlan) -> tuple[Stage, ...]:
    held = pipeline_stages(
        plan.config.model, tensor=plan.mesh.tensor, stage_blocks=plan.stage_blocks
    )
    return trained_stages(plan.config, held, tensor=plan.mesh.tensor)


@pytest.mark.parametrize("zero", range(4))
def test_frozen_weights_have_nothing_beside_them(zero: int) -> None:
    """Eight replicas: 2 bytes of each weight, an eighth at ZeRO 3; 12 of what trains, shared from
    ZeRO 1 on."""
    plan = make_plan(LLAMA_3_8B, zero_stage__stage=zero, **LORA)
    (stage,) = stages_of(plan)
    held = resident_components(read_engine(plan), stage, 0)
    assert stage.trained.parameters == ADAPTER
    assert stage.parameters == 8_030_261_248 + ADAPTER
    assert held.parameters == pytest.approx(2 * stage.parameters / (8 if zero == 3 else 1))
    own = ADAPTER / (8 if zero else 1)
    assert held.master_weights == pytest.approx(4 * own)
    assert held.optimizer_states == pytest.approx(8 * own)
    assert held.gradients == pytest.approx(2 * own if zero == 3 else 0)


@pytest.mark.parametrize("zero", range(4))
def test_what_trains_is_what_the_plan_says(zero: int) -> None:
    for settings in (LORA, {"training__freeze": ["embeddings", r"layers\.[0-7]\."]}):
        plan = make_plan(LLAMA_3_8B, zero_stage__stage=zero, pipeline=2, devices=4, **settings)
        found = trainable(plan.config)
        held = stages_of(plan)
        assert sum(stage.trained.parameters for stage in held) == found.trained_elements
        frozen = sum(stage.parameters - stage.trained.parameters for stage in held)
        assert frozen == found.frozen_elements


def test_blocks_that_no_gradient_reaches_keep_nothing() -> None:
    def activations(*freeze: str, mode: str = "none") -> int:
        settings = {"training__freeze": list(freeze), "activation_checkpointing__mode": mode}
        moments = budget(make_plan(LLAMA_3_8B, **settings)).stages[0].moments
        return moments["forward_end"].activations - 2048 * 4096 * (4 + 3 * 2)  # the head's input

    for mode in ("none", "full"):
        whole, last = activations(mode=mode), activations("all_but_last_blocks:8", mode=mode)
        blocks = (whole - last) / 24
        assert last == pytest.approx(8 * blocks, rel=0.05)
        # An embedding that trains lets gradients through frozen blocks.
        assert activations(r"layers\.", mode=mode) > last


def test_a_frozen_head_and_embedding_have_no_gradients() -> None:
    def end(*freeze: str) -> int:
        settings = {"zero_stage__stage": 2, "training__freeze": list(freeze)}
        moments = budget(make_plan(LLAMA_3_8B, **settings)).stages[0].moments
        return moments["backward_end"].gradients

    table = 128_256 * 4096
    assert end() - end("head") == pytest.approx(2 * table / 8)
    # Of the embedding also the one that is being computed.
    assert end() - end("embeddings") > 2 * table / 8 + table


def test_a_tied_head_is_frozen_with_the_embedding() -> None:
    (stage,) = stages_of(make_plan(GPT2, training__freeze=["head"]))
    assert stage.trained.head == stage.trained.embedding == 0
    positions = 1024 * 768
    assert stage.trained.parameters == stage.parameters - stage.embedding
    assert any(piece.numel == positions and piece.trains for piece in stage.pieces)


def test_a_checkpoint_holds_what_trains() -> None:
    whole, part = (budget(make_plan(LLAMA_3_8B, **settings)) for settings in ({}, LORA))
    assert part.checkpoint_bytes == 12 * ADAPTER + 1024 * 4 * 32
    assert whole.checkpoint_bytes > 900 * part.checkpoint_bytes / 2


def test_an_adapter_of_rank_1_takes_less_than_training_whole_everywhere() -> None:
    for zero in range(4):
        for settings in ({}, {"offload__optimizer": "cpu"} if zero else {}):
            whole = budget(make_plan(LLAMA_3_8B, zero_stage__stage=zero, **settings))
            part = budget(make_plan(LLAMA_3_8B, zero_stage__stage=zero, **settings, **LORA))
            assert part.device_peak_bytes < whole.device_peak_bytes
            assert part.host.bytes_per_node <= whole.host.bytes_per_node
