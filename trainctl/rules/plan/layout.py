"""Rules about the mesh: devices, heads, layers, sequence shards."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import Accelerator, AttentionKind, ModelConfig
from trainctl.options import architectures
from trainctl.options.model import AXES, architecture
from trainctl.plans import shapes
from trainctl.plans.derive import choices, nearest_divisors, nearest_multiples
from trainctl.rules.deepspeed import engine as json_engine
from trainctl.rules.plan.draft import Draft, on_json
from trainctl.rules.rule import WARNING, Problem, rule


@rule("TC001", "parallelism.data", "parallelism.*", example="recipe=tiny parallelism.tensor=4")
def devices_fill_the_mesh(draft: Draft) -> Iterator[Problem]:
    """The device count is a multiple of tensor x pipeline x sequence, times the data-parallel size.

    Every device has one place in the mesh; what the three axes leave over is data parallel. Devices
    that do not divide would idle, or be missing.

    Fix: Choose axes whose product divides the devices, or other hardware.
    """
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
        yield Problem(
            f"{product} = {taken} does not divide the {world} devices of {draft.hardware.name}",
            f"use {need} devices, or axes whose product divides {world}",
            key=f"parallelism.{axis}",
        )
    else:
        yield Problem(
            f"parallelism.data={axes.data} x {product} = {(axes.data or 1) * taken}, but "
            f"{draft.hardware.name} has {world} devices",
            f"parallelism.data={world // taken}, or leave it out: it is derived",
        )


@rule(
    "TC002",
    "parallelism.tensor",
    severity=WARNING,
    example="recipe=tiny hardware=2x6xh100-80g launcher=slurm parallelism.tensor=4",
)
def tensor_group_stays_in_a_node(draft: Draft) -> Iterator[Problem]:
    """A tensor-parallel group does not cross nodes.

    Tensor parallelism communicates twice in every block, forward and backward, and waits for it.
    Inside a machine that is NVLink; between machines it is ten times slower and more.

    Fix: Choose a tensor size that divides the devices of a node; put pipeline stages between nodes.
    """
    tensor, node = draft.config.parallelism.tensor, draft.hardware.devices_per_node
    if draft.mesh is not None and draft.hardware.nodes > 1 and node % tensor:
        yield Problem(
            f"tensor groups of {tensor} do not fit evenly into nodes of {node} devices: "
            "every layer would communicate between nodes",
            choices(nearest_divisors(node, tensor), "parallelism.tensor"),
        )


@rule("TC003", "parallelism.tensor", example="recipe=tiny parallelism.tensor=8")
def heads_split_over_tensor(draft: Draft) -> Iterator[Problem]:
    """Each tensor-parallel rank holds whole query and key-value heads, and feed-forward rows.

    Attention is split by heads and the feed-forward layer by rows: a rank cannot have half a head.

    Fix: Choose a tensor size that divides the heads, also the key-value heads of grouped-query
    attention.
    """
    model, tensor = draft.config.model, draft.config.parallelism.tensor
    for key, size in shapes.tensor_units(model).items():
        if size % tensor:
            yield Problem(
                f"parallelism.tensor={tensor} does not divide {key}={size}",
                choices(nearest_divisors(size, tensor), "parallelism.tensor"),
            )


@rule(
    "TC011",
    "parallelism.tensor",
    example="recipe=tiny parallelism.tensor=4 model.vocab_size=5 model.num_key_value_heads=4",
)
def vocabulary_splits_over_tensor(draft: Draft) -> Iterator[Problem]:
    """Every tensor-parallel rank holds a part of the vocabulary.

    The embedding and the head are split by tokens of the vocabulary.

    Fix: Use a smaller tensor axis; a real vocabulary is never this small.
    """
    size, tensor = draft.config.model.vocab_size, draft.config.parallelism.tensor
    share = -(-size // tensor)
    if share * (tensor - 1) >= size:
        yield Problem(
            f"parallelism.tensor={tensor} leaves a rank without a token of model.vocab_size={size}",
            f"parallelism.tensor={-(-size // share)}",
        )


@rule("TC004", "parallelism.sequence", example="recipe=tiny parallelism.sequence=8")
def heads_split_over_sequence(draft: Draft) -> Iterator[Problem]:
    """The sequence-parallel size divides the attention heads of a rank (Ulysses).

    Ulysses gives each rank all tokens of some heads while attention is computed, so there are no
    more ranks than heads.

    Fix: Choose a sequence size that divides the heads; beyond that use tensor parallelism or
    recomputation.
    """
    model, axes = draft.config.model, draft.config.parallelism
    shards, tensor = axes.sequence, axes.tensor
    heads = model.num_attention_heads
    kv_heads = model.num_key_value_heads or heads
    if shards == 1 or heads % tensor or kv_heads % tensor:  # tensor has its own rule
        return
    share = "=" if tensor == 1 else f" / parallelism.tensor={tensor} = "
    heads, kv_heads = heads // tensor, kv_heads // tensor
    if heads % shards:
        yield Problem(
            f"parallelism.sequence={shards} does not divide model.num_attention_heads{share}"
            f"{heads}",
            choices(nearest_divisors(heads, shards), "parallelism.sequence"),
        )
    elif kv_heads % shards and shards % kv_heads:
        yield Problem(
            f"parallelism.sequence={shards} and model.num_key_value_heads{share}{kv_heads}: "
            "neither divides the other",
            choices(nearest_divisors(kv_heads, shards), "parallelism.sequence"),
        )


@rule(
    "TC012",
    "parallelism.sequence",
    example="recipe=tiny parallelism.sequence=2 model.attention=eager",
)
def attention_sees_the_whole_sequence(draft: Draft) -> Iterator[Problem]:
    """Under sequence parallelism the attention kernel needs no mask of the whole sequence.

    A rank of the sequence axis has a part of the text, so a mask made there describes that part
    only. The kernel must know by itself what a token may see: sdpa knows plain causal attention,
    FlashAttention also documents and windows.

    Fix: Use model.attention=sdpa, or flash_attention_2 where documents are masked.
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
        yield Problem(
            f"{key}={config.parallelism.sequence}: the rotary embeddings of {model.model_type} "
            "depend on the largest position, which ranks with a part of a sequence do not see",
            f"{key}=1",
        )
    if model.attention is AttentionKind.flash_attention_2:
        return
    what = f"{key}={config.parallelism.sequence} with model.attention={model.attention.value}"
    if model.attention is AttentionKind.eager:
        yield Problem(f"{what}: it needs a mask of the whole sequence", "model.attention=sdpa")
        return
    if config.data.mask_documents:
        yield Problem(
            f"{what} and data.mask_documents=true: documents would attend to each other",
            "data.mask_documents=false, or on a GPU model.attention=flash_attention_2",
        )
    if model.sliding_window is not None and model.sliding_window < length:
        yield Problem(
            f"{what} and model.sliding_window={model.sliding_window}: sequences of {length} would "
            "be attended to as a whole",
            f"training.sequence_length={model.sliding_window}, or on a GPU "
            "model.attention=flash_attention_2",
        )


@rule(
    "TC005",
    "training.sequence_length",
    example="recipe=tiny parallelism.sequence=4 training.sequence_length=1022",
)
def sequence_splits_evenly(draft: Draft) -> Iterator[Problem]:
    """The sequence length is a multiple of the ranks that share a sequence.

    A sequence is cut into equal parts, one for each rank.

    Fix: Use the next multiple of the axis as the length.
    """
    length, axes = draft.config.training.sequence_length, draft.config.parallelism
    shards, what = axes.sequence, f"parallelism.sequence={axes.sequence}"
    if axes.sequence_sharded_norms and axes.tensor > 1:
        shards *= axes.tensor
        what += f" x parallelism.tensor={axes.tensor} (parallelism.sequence_sharded_norms)"
    if length % shards:
        yield Problem(
            f"training.sequence_length={length} is not a multiple of {what}",
            choices(nearest_multiples(length, shards), "training.sequence_length"),
        )


@rule("TC006", "parallelism.pipeline", example="recipe=tiny parallelism.pipeline=8")
def stages_have_layers(draft: Draft) -> Iterator[Problem]:
    """Every pipeline stage has at least one block.

    A stage is a row of whole blocks; one without a block would only pass tensors on.

    Fix: Use fewer stages, or a deeper model.
    """
    layers, stages = draft.config.model.num_layers, draft.config.parallelism.pipeline
    if 0 < layers < stages:
        yield Problem(
            f"parallelism.pipeline={stages} stages, but model.num_layers={layers}",
            f"parallelism.pipeline={layers} at most",
        )


@rule(
    "TC013",
    "parallelism.stage_blocks",
    example="recipe=tiny parallelism.pipeline=2 parallelism.stage_blocks=[1,1,2]",
)
def listed_stages_fit(draft: Draft) -> Iterator[Problem]:
    """parallelism.stage_blocks has one number per pipeline stage, and they sum to the model's
    blocks.

    parallelism.stage_blocks says how many blocks each stage has, and stages that do not add up to
    the model leave some out or ask for more than there are.

    Fix: Give one number per stage, with the number of blocks as their sum; or leave it out.
    """
    axes, layers = draft.config.parallelism, draft.config.model.num_layers
    listed = axes.stage_blocks
    if not listed:
        return
    if len(listed) != axes.pipeline:
        yield Problem(
            f"parallelism.stage_blocks={listed} has {len(listed)} stages, parallelism.pipeline="
            f"{axes.pipeline}",
            f"parallelism.pipeline={len(listed)}",
        )
    if min(listed) < 1 or sum(listed) != layers:
        yield Problem(
            f"parallelism.stage_blocks={listed} has {sum(listed)} blocks in stages of at least "
            f"{min(listed)}; they have to be model.num_layers={layers}, in stages of at least 1",
            "leave it out: the stages are balanced",
        )


_MODULE_LACKS = {
    "sequence": ": its forward pass needs whole sequences",
    "norms": ": nothing says which of its norms may see a part of a sequence",
}
"""Reasons, by axis, why no module of the user's is split."""


@rule(
    "TC014",
    "parallelism.sequence_sharded_norms",
    "parallelism.*",
    situation="A directory with code of its own (`model.trust_remote_code=true`) and "
    "`parallelism.sequence=2`",
    message="parallelism.sequence=2 with the phi3 architecture: code of the directory's own "
    "(model.trust_remote_code) was not tried",
)
def parallelism_knows_the_architecture(draft: Draft) -> Iterator[Problem]:
    """A model is split only along axes that were verified for its architecture.

    How to split a model is known of the families that trainctl has, and of architectures of
    transformers for which every axis was tried against one process. On another, a split may train
    without an error and be wrong. A module of your own (`model=module`) says by `tensor_plan()` and
    `pipeline_plan()` how it is split; both are tried on tensors without values, and the message
    says what is missing.

    Fix: Use data parallelism with ZeRO, which works for every model; the table of families says
    which axes were verified. Complete the plans of a module of your own.
    """
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
        if model.is_module:
            return _why_not_module(model, axis)
        if model.trust_remote_code:
            return ": code of the directory's own (model.trust_remote_code) was not tried"
        if shapes.is_encoder(model):
            return ": an encoder's tokens attend to both sides, which was tried data parallel alone"
        return architectures.why_not(None if model.factory else model.model_type, axis)

    for name in AXES:
        why = why_not(name) if getattr(axes, name) > 1 else None
        if why is not None:
            yield Problem(
                f"parallelism.{name}={getattr(axes, name)} with {what}{why}",
                f"parallelism.{name}=1",
                key=f"parallelism.{name}",
            )
    if known is None and axes.tensor > 1 and axes.sequence_sharded_norms and not why_not("tensor"):
        why = why_not("norms")
        if why is not None:
            yield Problem(
                f"parallelism.sequence_sharded_norms=true with {what}{why}",
                "parallelism.sequence_sharded_norms=false",
            )


def _why_not_module(model: ModelConfig, axis: str) -> str | None:
    """Return why an axis cannot split a module of the user's; None if its own plans say how."""
    if axis in _MODULE_LACKS:
        return _MODULE_LACKS[axis]
    read = None if model.is_unread else shapes.anatomy(model)
    why = dict(read.unsplit).get(axis) if read is not None else None
    return f": {why}" if why else None


@rule(
    "TC007",
    "training.gradient_accumulation_steps",
    severity=WARNING,
    example="recipe=tiny hardware=8xh100-80g parallelism.pipeline=4",
)
def pipeline_is_filled(draft: Draft) -> Iterator[Problem]:
    """A step has at least as many micro-batches as the pipeline has stages.

    A pipeline fills and drains at every step. With few micro-batches most of the step is that, and
    devices wait.

    Fix: Give a step more micro-batches: a smaller training.micro_batch_size or a larger global
    batch. Four times the stages leave about a fifth idle.
    """
    stages = draft.config.parallelism.pipeline
    if draft.batch is None or stages == 1:
        return
    micro_batches = draft.batch.gradient_accumulation_steps
    if micro_batches < stages:
        idle = (stages - 1) / (micro_batches + stages - 1)
        yield Problem(
            f"{micro_batches} micro-batches in {stages} pipeline stages leave them idle "
            f"{idle:.0%} of the time",
            f"training.gradient_accumulation_steps={4 * stages} or more",
        )


@rule(
    "TC008",
    "parallelism.sequence",
    example="recipe=tiny parallelism.pipeline=2 parallelism.sequence=2",
)
def pipeline_without_sequence(draft: Draft) -> Iterator[Problem]:
    """Pipeline stages and sequence parallelism are not combined.

    DeepSpeed's pipeline builds its groups from pipeline, data and tensor axes only.

    Fix: Keep one of the two: stages for a deep model, the sequence axis for long text.
    """
    axes = draft.config.parallelism
    if axes.pipeline > 1 and axes.sequence > 1:
        yield Problem(
            f"parallelism.sequence={axes.sequence} with parallelism.pipeline={axes.pipeline}: "
            "DeepSpeed's pipeline has no sequence axis",
            "parallelism.sequence=1 or parallelism.pipeline=1",
        )


@rule("TC010", "model.attention", example="recipe=tiny model.attention=flash_attention_2")
def attention_kernel_runs_here(draft: Draft) -> Iterator[Problem]:
    """FlashAttention 2 runs on a GPU.

    The kernel is CUDA code for fp16 and bf16; on another device, or in fp32, it would fail in the
    first forward pass.

    Fix: Use model.attention=sdpa, which picks the fastest kernel of the device.
    """
    attention = draft.config.model.attention
    on_cpu = draft.hardware.accelerator is Accelerator.cpu
    if attention is AttentionKind.flash_attention_2 and on_cpu:
        yield Problem(
            "model.attention=flash_attention_2 needs a GPU, and the hardware is cpu",
            "model.attention=sdpa",
        )


on_json(
    "TC030",
    json_engine.pipelines_keep_their_gradients,
    arguments="recipe=tiny zero_stage=2 parallelism.pipeline=2",
)
