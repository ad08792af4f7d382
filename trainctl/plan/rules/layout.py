"""Rules about the mesh: devices, heads, layers, sequence shards, experts."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import Accelerator, AttentionKind, ModelFamily
from trainctl.errors import Finding
from trainctl.plan.rules.draft import (
    Draft,
    choices,
    error,
    nearest_divisors,
    nearest_multiples,
    warning,
)


def devices_fill_the_mesh(draft: Draft) -> Iterator[Finding]:
    """The devices divide into tensor x pipeline x sequence groups, data many."""
    if draft.mesh is not None:
        return
    axes, world = draft.config.parallelism, draft.hardware.world_size
    taken = axes.tensor * axes.pipeline * axes.sequence
    product = f"tensor {axes.tensor} x pipeline {axes.pipeline} x sequence {axes.sequence}"
    if world % taken:
        need = choices(nearest_multiples(world, taken))
        yield error(
            "parallelism",
            f"{product} = {taken} does not divide the {world} devices of {draft.hardware.name}",
            f"use {need} devices, or axes whose product divides {world}",
        )
    else:
        yield error(
            "parallelism.data",
            f"parallelism.data={axes.data} x {product} = {(axes.data or 1) * taken}, but "
            f"{draft.hardware.name} has {world} devices",
            f"parallelism.data={world // taken}, or leave it out: it is derived",
        )


def tensor_group_stays_in_a_node(draft: Draft) -> Iterator[Finding]:
    """A tensor-parallel group that crosses nodes talks over the slow network in every layer."""
    tensor, node = draft.config.parallelism.tensor, draft.hardware.devices_per_node
    if draft.mesh is not None and draft.hardware.nodes > 1 and node % tensor:
        yield warning(
            "parallelism.tensor",
            f"tensor groups of {tensor} do not fit evenly into nodes of {node} devices: "
            "every layer would communicate between nodes",
            choices(nearest_divisors(node, tensor), "parallelism.tensor"),
        )


def heads_split_over_tensor(draft: Draft) -> Iterator[Finding]:
    """Each tensor-parallel rank holds whole query and key-value heads, and feed-forward rows."""
    model, tensor = draft.config.model, draft.config.parallelism.tensor
    for key, size in (
        ("num_attention_heads", model.num_attention_heads),
        ("num_key_value_heads", model.num_key_value_heads or model.num_attention_heads),
        ("intermediate_size", model.intermediate_size),
    ):
        if size % tensor:
            yield error(
                "parallelism.tensor",
                f"parallelism.tensor={tensor} does not divide model.{key}={size}",
                choices(nearest_divisors(size, tensor), "parallelism.tensor"),
            )


def heads_split_over_sequence(draft: Draft) -> Iterator[Finding]:
    """Ulysses exchanges sequence shards for heads (runtime/sequence_parallel/ulysses_sp.py)."""
    model, shards = draft.config.model, draft.config.parallelism.sequence
    heads = model.num_attention_heads
    kv_heads = model.num_key_value_heads or heads
    if heads % shards:
        yield error(
            "parallelism.sequence",
            f"parallelism.sequence={shards} does not divide model.num_attention_heads={heads}",
            choices(nearest_divisors(heads, shards), "parallelism.sequence"),
        )
    elif kv_heads % shards and shards % kv_heads:
        yield error(
            "parallelism.sequence",
            f"parallelism.sequence={shards} and model.num_key_value_heads={kv_heads}: neither "
            "divides the other",
            choices(nearest_divisors(kv_heads, shards), "parallelism.sequence"),
        )


def sequence_splits_evenly(draft: Draft) -> Iterator[Finding]:
    """Every sequence rank holds as many tokens."""
    length = draft.config.training.sequence_length
    shards = draft.config.parallelism.sequence
    if length % shards:
        yield error(
            "training.sequence_length",
            f"training.sequence_length={length} is not a multiple of parallelism.sequence={shards}",
            choices(nearest_multiples(length, shards), "training.sequence_length"),
        )


def stages_have_layers(draft: Draft) -> Iterator[Finding]:
    """Every pipeline stage has at least one block."""
    layers, stages = draft.config.model.num_layers, draft.config.parallelism.pipeline
    if 0 < layers < stages:
        yield error(
            "parallelism.pipeline",
            f"parallelism.pipeline={stages} stages, but model.num_layers={layers}",
            f"parallelism.pipeline={layers} at most",
        )


def pipeline_is_filled(draft: Draft) -> Iterator[Finding]:
    """With m micro-batches and p stages, (p - 1) / (m + p - 1) of the time is idle."""
    stages = draft.config.parallelism.pipeline
    if draft.batch is None or stages == 1:
        return
    micro_batches = draft.batch.gradient_accumulation_steps
    if micro_batches < stages:
        idle = (stages - 1) / (micro_batches + stages - 1)
        yield warning(
            "training.gradient_accumulation_steps",
            f"{micro_batches} micro-batches in {stages} pipeline stages leave them idle "
            f"{idle:.0%} of the time",
            f"training.gradient_accumulation_steps={4 * stages} or more",
        )


def pipeline_without_sequence(draft: Draft) -> Iterator[Finding]:
    """DeepSpeed's pipeline grid has no sequence axis (runtime/pipe/topology.py)."""
    axes = draft.config.parallelism
    if axes.pipeline > 1 and axes.sequence > 1:
        yield error(
            "parallelism.sequence",
            f"parallelism.sequence={axes.sequence} with parallelism.pipeline={axes.pipeline}: "
            "DeepSpeed's pipeline has no sequence axis",
            "parallelism.sequence=1 or parallelism.pipeline=1",
        )


def experts_exist(draft: Draft) -> Iterator[Finding]:
    """The families that can be described have no expert layers."""
    model, expert = draft.config.model, draft.config.parallelism.expert
    if expert > 1 and model.family is not ModelFamily.hf:
        yield error(
            "parallelism.expert",
            f"parallelism.expert={expert}, but the {model.family.value} family has no experts",
            "parallelism.expert=1",
        )
    elif draft.mesh is not None and draft.mesh.data % expert:
        yield error(
            "parallelism.expert",
            f"parallelism.expert={expert} does not divide the data-parallel size {draft.mesh.data}",
            choices(nearest_divisors(draft.mesh.data, expert), "parallelism.expert"),
        )


def attention_kernel_runs_here(draft: Draft) -> Iterator[Finding]:
    """FlashAttention 2 is a GPU kernel for 16-bit types."""
    attention = draft.config.model.attention
    on_cpu = draft.hardware.accelerator is Accelerator.cpu
    if attention is AttentionKind.flash_attention_2 and on_cpu:
        yield error(
            "model.attention",
            "model.attention=flash_attention_2 needs a GPU, and the hardware is cpu",
            "model.attention=sdpa",
        )
