"""Rules about the mesh: devices, heads, layers, sequence shards."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import Accelerator, AttentionKind
from trainctl.errors import Finding
from trainctl.options import architectures
from trainctl.options.model import AXES, architecture
from trainctl.plan import shapes
from trainctl.rules.plan.draft import (
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
        # Blame the axis that alone does not divide the devices, otherwise the largest.
        sizes = {name: getattr(axes, name) for name in ("tensor", "pipeline", "sequence")}
        axis = max(sizes, key=lambda name: (world % sizes[name] > 0, sizes[name]))
        yield error(
            f"parallelism.{axis}",
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
    for key, size in shapes.tensor_units(model).items():
        if size % tensor:
            yield error(
                "parallelism.tensor",
                f"parallelism.tensor={tensor} does not divide {key}={size}",
                choices(nearest_divisors(size, tensor), "parallelism.tensor"),
            )


def vocabulary_splits_over_tensor(draft: Draft) -> Iterator[Finding]:
    """Embedding and output projection are split by tokens, of which every rank has some."""
    size, tensor = draft.config.model.vocab_size, draft.config.parallelism.tensor
    share = -(-size // tensor)
    if share * (tensor - 1) >= size:
        yield error(
            "parallelism.tensor",
            f"parallelism.tensor={tensor} leaves a rank without a token of model.vocab_size={size}",
            f"parallelism.tensor={-(-size // share)}",
        )


def heads_split_over_sequence(draft: Draft) -> Iterator[Finding]:
    """Ulysses exchanges sequence shards for heads (runtime/sequence_parallel/ulysses_sp.py)."""
    model, axes = draft.config.model, draft.config.parallelism
    shards, tensor = axes.sequence, axes.tensor
    heads = model.num_attention_heads
    kv_heads = model.num_key_value_heads or heads
    if shards == 1 or heads % tensor or kv_heads % tensor:  # tensor has its own rule
        return
    share = "=" if tensor == 1 else f" / parallelism.tensor={tensor} = "
    heads, kv_heads = heads // tensor, kv_heads // tensor
    if heads % shards:
        yield error(
            "parallelism.sequence",
            f"parallelism.sequence={shards} does not divide model.num_attention_heads{share}"
            f"{heads}",
            choices(nearest_divisors(heads, shards), "parallelism.sequence"),
        )
    elif kv_heads % shards and shards % kv_heads:
        yield error(
            "parallelism.sequence",
            f"parallelism.sequence={shards} and model.num_key_value_heads{share}{kv_heads}: "
            "neither divides the other",
            choices(nearest_divisors(kv_heads, shards), "parallelism.sequence"),
        )


def attention_sees_the_whole_sequence(draft: Draft) -> Iterator[Finding]:
    """Ulysses drops the mask, which says of a rank's part only: the kernel has to know better.

    Plain causal attention is all that sdpa does by itself; FlashAttention also keeps to documents
    and windows, from the positions.
    """
    config = draft.config
    model = config.model
    stages = (stage.sequence_length or 0 for stage in config.data.stages)
    length = max([config.training.sequence_length, *stages])
    key = "parallelism.sequence"
    if config.parallelism.sequence == 1:
        return
    read = None if model.is_unread else shapes.anatomy(model)
    if read is not None and read.has_length_dependent_rope:
        yield error(
            key,
            f"{key}={config.parallelism.sequence}: the rotary embeddings of {model.model_type} "
            "depend on the largest position, which ranks with a part of a sequence do not see",
            f"{key}=1",
        )
    if model.attention is AttentionKind.flash_attention_2:
        return
    what = f"{key}={config.parallelism.sequence} with model.attention={model.attention.value}"
    if model.attention is AttentionKind.eager:
        yield error(key, f"{what}: it needs a mask of the whole sequence", "model.attention=sdpa")
        return
    if config.data.mask_documents:
        yield error(
            key,
            f"{what} and data.mask_documents=true: documents would attend to each other",
            "data.mask_documents=false, or on a GPU model.attention=flash_attention_2",
        )
    if model.sliding_window is not None and model.sliding_window < length:
        yield error(
            key,
            f"{what} and model.sliding_window={model.sliding_window}: sequences of {length} would "
            "be attended to as a whole",
            f"training.sequence_length={model.sliding_window}, or on a GPU "
            "model.attention=flash_attention_2",
        )


def sequence_splits_evenly(draft: Draft) -> Iterator[Finding]:
    """Every sequence rank holds as many tokens; with sharded norms every tensor rank too."""
    length, axes = draft.config.training.sequence_length, draft.config.parallelism
    shards, what = axes.sequence, f"parallelism.sequence={axes.sequence}"
    if axes.sequence_sharded_norms and axes.tensor > 1:
        shards *= axes.tensor
        what += f" x parallelism.tensor={axes.tensor} (parallelism.sequence_sharded_norms)"
    if length % shards:
        yield error(
            "training.sequence_length",
            f"training.sequence_length={length} is not a multiple of {what}",
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


def listed_stages_fit(draft: Draft) -> Iterator[Finding]:
    """Stages that the config lists are as many as there are, and hold all blocks."""
    axes, layers = draft.config.parallelism, draft.config.model.num_layers
    listed = axes.stage_blocks
    if not listed:
        return
    if len(listed) != axes.pipeline:
        yield error(
            "parallelism.stage_blocks",
            f"parallelism.stage_blocks={listed} has {len(listed)} stages, parallelism.pipeline="
            f"{axes.pipeline}",
            f"parallelism.pipeline={len(listed)}",
        )
    if min(listed) < 1 or sum(listed) != layers:
        yield error(
            "parallelism.stage_blocks",
            f"parallelism.stage_blocks={listed} has {sum(listed)} blocks in stages of at least "
            f"{min(listed)}; they have to be model.num_layers={layers}, in stages of at least 1",
            "leave it out: the stages are balanced",
        )


def parallelism_knows_the_architecture(draft: Draft) -> Iterator[Finding]:
    """Where to cut is known of the families (options/model), and was shown of others."""
    model, axes = draft.config.model, draft.config.parallelism
    if not draft.config.trains_itself:
        return
    known = None
    if model.factory is not None:
        what = f"the model of model.factory={model.factory}"
    else:
        known = architecture(model)
        what = f"the {known.name if known else model.model_type} architecture"

    def why_not(axis: str) -> str | None:
        if known is not None:
            return None if axis in known.axes else f": {known.why_not[axis]}"
        if model.trust_remote_code:
            return ": code of the directory's own (model.trust_remote_code) was not tried"
        return architectures.why_not(None if model.factory else model.model_type, axis)

    for name in AXES:
        why = why_not(name) if getattr(axes, name) > 1 else None
        if why is not None:
            yield error(
                f"parallelism.{name}",
                f"parallelism.{name}={getattr(axes, name)} with {what}{why}",
                f"parallelism.{name}=1",
            )
    if known is None and axes.tensor > 1 and axes.sequence_sharded_norms and not why_not("tensor"):
        why = why_not("norms")
        if why is not None:
            yield error(
                "parallelism.sequence_sharded_norms",
                f"parallelism.sequence_sharded_norms=true with {what}{why}",
                "parallelism.sequence_sharded_norms=false",
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
