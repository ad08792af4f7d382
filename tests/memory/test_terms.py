"""Single terms of the budget, each by what changes when the plan does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from anatomies import SMALL
from memory_plans import GIB, LLAMA_3_8B, TINY, make_plan

from trainctl.config.schema import (
    Accelerator,
    CrossEntropyKind,
    DataType,
    OffloadDevice,
)
from trainctl.memory import constants
from trainctl.memory.activations import ring_bytes
from trainctl.memory.budget import (
    budget,
    count_communicators,
    expected_fragmentation,
    runtime_range,
)
from trainctl.memory.engine import read_engine
from trainctl.memory.phases import phases
from trainctl.memory.rank import Components
from trainctl.memory.stages import pipeline_stages
from trainctl.plans.shapes import attended_width
from trainctl.plans.types import Mesh

HEAD = 4096 * 128_256
"""Elements of Llama-3 8B's output projection."""


def moments(**settings: Any) -> list[dict[str, Components]]:
    """Phases of each pipeline stage, without runtime."""
    plan = make_plan(LLAMA_3_8B, **settings)
    held = pipeline_stages(
        plan.config.model, tensor=plan.mesh.tensor, stage_blocks=plan.stage_blocks
    )
    return [phases(plan, read_engine(plan), stage, 0) for stage in held]


def test_a_fused_loss_computes_gradients_in_the_forward_pass() -> None:
    common = {"zero_stage__stage": 2, "sequence_length": 4096}
    fused = moments(kernels__cross_entropy=CrossEntropyKind.liger_fused, **common)
    (end,) = (moment["forward_end"] for moment in fused)
    chunk = 128  # 4096 tokens in 32 parts
    assert end.logits == 8 * HEAD + 2 * 4096 * 4096 + 10 * chunk * 128_256


def test_a_pipeline_keeps_what_it_has_sent_on() -> None:
    """A stage keeps an output for each micro-batch in flight and one gradient; the last stage does
    not.
    """
    common = {"pipeline": 4, "accumulation": 8, "sequence_length": 1024, "zero_stage__stage": 1}
    first, second, third, last = (
        stage["forward_end"].activations
        for stage in moments(activation_checkpointing__mode="full", **common)
    )
    hidden = 2 * 1024 * 4096
    blocks = [stage.blocks for stage in pipeline_stages(LLAMA_3_8B, stage_blocks=_blocks(common))]
    for index, activations in enumerate((first, second, third)):
        in_flight = 4 - index
        assert activations == hidden * (blocks[index] * in_flight + in_flight + 1)
    assert last > hidden * blocks[3]  # and the head's input


def _blocks(settings: dict[str, Any]) -> tuple[int, ...]:
    return make_plan(LLAMA_3_8B, **settings).stage_blocks


def test_a_single_rank_gathers_nothing_at_stage_3() -> None:
    (alone,) = moments(devices=1, zero_stage__stage=3)
    assert all(moment.gathered_parameters == 0 for moment in list(alone.values())[1:])
    offloaded = {"offload__parameters": OffloadDevice.cpu, "offload__optimizer": OffloadDevice.cpu}
    (copied,) = moments(devices=1, zero_stage__stage=3, **offloaded)
    assert copied["forward_end"].gathered_parameters > 0


def test_int8_weights_take_a_byte_an_element_on_their_way() -> None:
    (plain,) = moments(zero_stage__stage=3)
    (quantized,) = moments(zero_stage__stage=3, zero_stage__quantized_weights=True)
    extra = quantized["forward_end"].gathered_parameters - plain["forward_end"].gathered_parameters
    assert extra == HEAD + 218_112_000  # the head, and the next block, which is prefetched


def test_int4_gradients_between_machines_are_smaller_than_a_bucket() -> None:
    common = {"zero_stage__stage": 3, "nodes": 2}
    (plain,) = moments(**common)
    (quantized,) = moments(zero_stage__quantized_gradients=True, **common)
    name = "backward_end"
    saved = plain[name].communication_buffers - quantized[name].communication_buffers
    assert saved == 2 * 500_000_000 - 500_000_000 - (HEAD - 500_000_000)


def test_a_secondary_partition_is_a_second_copy() -> None:
    (plain,) = moments(zero_stage__stage=3)
    (second,) = moments(zero_stage__stage=3, zero_stage__hpz_partition_size=8)
    extra = second["step"].gathered_parameters - plain["step"].gathered_parameters
    assert extra == pytest.approx(2 * 8_030_261_248 / 8, rel=1e-6)


@pytest.mark.parametrize(("emulate", "element"), [(False, 1), (True, 4)])
def test_fp8_casts_what_one_product_multiplies(emulate: bool, element: int) -> None:
    common = {"zero_stage__stage": 2, "sequence_length": 8192}
    (bf16,) = moments(**common)
    fp8 = {"precision__compute": DataType.fp8, "precision__emulate_fp8": emulate}
    (cast,) = moments(**fp8, **common)
    extra = cast["backward_end"].activations - bf16["backward_end"].activations
    assert extra == element * (8192 * 14_336 + 4096 * 14_336)


@pytest.mark.parametrize(
    ("axes", "groups"),
    [
        ({"data": 1}, 0),
        ({"data": 8}, 1),
        ({"data": 4, "tensor": 2}, 3),
        ({"data": 4, "tensor": 8, "pipeline": 12}, 5),
        ({"data": 4, "sequence": 2}, 3),
        ({"data": 4, "sequence": 2, "context": 2}, 4),
    ],
)
def test_each_group_of_ranks_has_a_communicator(axes: dict[str, int], groups: int) -> None:
    mesh = Mesh(**{"data": 1, "tensor": 1, "pipeline": 1, "sequence": 1} | axes)
    plan = replace(make_plan(devices=8), mesh=mesh)
    assert count_communicators(plan) == groups
    alone = replace(plan, mesh=Mesh(data=1, tensor=1, pipeline=1, sequence=1))
    extra = runtime_range(plan).usual - runtime_range(alone).usual
    assert extra == groups * constants.COMMUNICATOR.usual


def test_shard_groups_and_shared_heads_have_communicators_too() -> None:
    plan = make_plan(LLAMA_3_8B, devices=16, zero_stage__stage=3)
    grouped = make_plan(LLAMA_3_8B, devices=16, zero_stage__stage=3, zero_stage__shard_group_size=8)
    assert count_communicators(grouped) == count_communicators(plan) + 2
    shared = replace(plan, mesh=Mesh(data=1, tensor=16, pipeline=1, sequence=1))
    assert count_communicators(shared) == 2  # eight key-value heads, each on two ranks


def test_ring_attention_holds_keys_as_wide_as_they_are() -> None:
    masked = {"sequence_length": 8192, "data__mask_documents": True}
    # A sequence rank's 4096 tokens: eight heads of keys and of values in use, and their gradients;
    # 32 heads of queries' gradients.
    alone = ring_bytes(make_plan(LLAMA_3_8B, sequence=2, **masked), 2)
    assert alone == 4096 * 128 * (16 * (2 + 4) + 32 * 4)
    ring = ring_bytes(make_plan(LLAMA_3_8B, context=2, **masked), 2)
    assert ring == 4096 * 128 * (16 * (2 * 2 + 3 * 4) + 32 * 4)
    assert ring_bytes(make_plan(LLAMA_3_8B, sequence=2, sequence_length=8192), 2) == 0
    latent = [*SMALL[:-1], "model.layers.{0-1} block 0 attention=4x48x16"]
    narrow, wide = (
        make_plan(replace(TINY, family="hf", path="m", anatomy=table), context=2)
        for table in (SMALL, latent)
    )
    assert attended_width(wide.config.model) == 48
    assert ring_bytes(wide, 2) == 3 * ring_bytes(narrow, 2)


def test_large_tensors_leave_less_unused() -> None:
    short = make_plan(LLAMA_3_8B, sequence_length=32_768)
    long = make_plan(LLAMA_3_8B, sequence_length=65_536)  # 512 MiB of hidden states
    assert expected_fragmentation(short).usual == 0.12
    assert expected_fragmentation(long).usual == 0.03
    assert expected_fragmentation(replace(short, hardware=_measured(short))).usual == 0.05
    cpu = make_plan(LLAMA_3_8B, sequence_length=32_768, accelerator=Accelerator.cpu)
    assert expected_fragmentation(cpu).usual == 0.03


def _measured(plan: Any) -> Any:
    return replace(plan.hardware, fragmentation=0.05)


def test_reserved_is_more_than_the_tensors_and_less_than_the_driver_sees() -> None:
    memory = budget(make_plan(LLAMA_3_8B, zero_stage__stage=2))
    tensors = memory.components.allocated
    assert memory.device_reserved_bytes > tensors * 1.12
    assert memory.device_reserved_bytes == int((tensors + 2**26) * 1.12)
    assert memory.device_peak_high_bytes > memory.device_reserved_bytes + 0.5 * GIB


def test_saving_takes_one_tensor_on_the_host_unless_it_is_there() -> None:
    parts = budget(make_plan(LLAMA_3_8B, devices=4, zero_stage__stage=2)).host.components
    assert parts["checkpoint_tensor"] == 4 * 4 * HEAD
    offloaded = make_plan(LLAMA_3_8B, zero_stage__stage=2, offload__optimizer=OffloadDevice.cpu)
    assert "checkpoint_tensor" not in budget(offloaded).host.components
    assert (
        "checkpoint_tensor"
        not in budget(make_plan(TINY, accelerator=Accelerator.cpu)).host.components
    )


def test_the_allocator_holds_no_more_than_the_device_has() -> None:
    """The caching allocator frees its unused blocks before it raises an out-of-memory error."""
    settings = {"zero_stage__stage": 2, "devices": 8}
    plan = make_plan(LLAMA_3_8B, device_memory=200 * GIB, **settings)
    roomy = budget(plan)
    tensors = roomy.components.allocated + 2**26
    tight = tensors + runtime_range(plan).usual
    held = budget(make_plan(LLAMA_3_8B, device_memory=tight, **settings)).device_reserved_bytes
    assert held == tensors + 2**26  # cuBLAS's workspaces are among the tensors
    too_small = make_plan(LLAMA_3_8B, device_memory=tensors // 2, **settings)
    assert budget(too_small).device_reserved_bytes == tensors
    assert roomy.device_reserved_bytes == int(tensors * 1.12)


def test_weights_ahead_are_gathered_up_to_the_limit() -> None:
    """However few are asked for at a time; without asking, only those that are used again soon."""
    common = {"zero_stage__stage": 3, "zero_stage__param_persistence_threshold": 0}
    tensor = 4096 * 14_336
    for prefetch in (1_000_000, 50_000_000):
        (found,) = moments(zero_stage__prefetch_bucket_size=prefetch, **common)
        assert found["forward_end"].gathered_parameters == 2 * (10**9 + tensor)
    (few,) = moments(zero_stage__max_live_parameters=600_000_000, **common)
    assert few["forward_end"].gathered_parameters == 2 * (600_000_000 + tensor)
    (none,) = moments(zero_stage__prefetch_bucket_size=0, **common)
    assert none["forward_end"].gathered_parameters == 2 * 10**9
    (again,) = moments(
        zero_stage__prefetch_bucket_size=0, zero_stage__max_reuse_distance=400_000_000, **common
    )
    assert again["forward_end"].gathered_parameters == 2 * (200_000_000 + 218_112_000 + HEAD)


def test_an_average_of_the_weights_lies_where_the_master_weights_do() -> None:
    """Four bytes a parameter, partitioned with them, on device, host and disk."""
    parameters = 8_030_261_248
    for stage in (1, 3):
        settings: dict[str, Any] = {"devices": 8, "zero_stage__stage": stage}
        plain = budget(make_plan(LLAMA_3_8B, **settings))
        averaged = budget(make_plan(LLAMA_3_8B, training__ema_decay=0.99, **settings))
        extra = averaged.device_peak_bytes - plain.device_peak_bytes
        assert extra == averaged.components.weight_average == 4 * parameters // 8
        assert averaged.checkpoint_bytes - plain.checkpoint_bytes == 4 * parameters
        settings |= {"offload__optimizer": OffloadDevice.cpu}
        offloaded = budget(make_plan(LLAMA_3_8B, training__ema_decay=0.99, **settings))
        assert offloaded.components.weight_average == 0
        assert offloaded.host.components["weight_average"] == 4 * parameters
    (whole,) = moments(devices=2, training__ema_decay=0.99, zero_stage__stage=0)
    assert whole["step"].weight_average == 4 * parameters
