"""Rules about the mesh: devices, heads, layers, sequence shards."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import (
    Accelerator,
    AttentionKind,
    DataType,
    ModelConfig,
    ParallelismConfig,
)
from trainctl.options import architectures
from trainctl.options.model import AXES, architecture
from trainctl.options.optimizer import spec_of
from trainctl.plans import shapes
from trainctl.plans.derive import bubble_share, choices, nearest_divisors, nearest_multiples
from trainctl.plans.settings import number_formats, uses_ring
from trainctl.rules.deepspeed import engine as json_engine
from trainctl.rules.plan.draft import Draft, on_json
from trainctl.rules.rule import WARNING, Problem, rule


@rule("TC001", "parallelism.data", "parallelism.*", example="recipe=tiny parallelism.tensor=4")
def devices_fill_the_mesh(draft: Draft) -> Iterator[Problem]:
    """The device count is a multiple of tensor x pipeline x sequence x context, times the
    data-parallel size.

    Every device has one place in the mesh; what these axes leave over is data parallel. Devices
    that do not divide would idle, or be missing.

    Fix: Choose axes whose product divides the devices, or other hardware.
    """
    if draft.mesh is not None:
        return
    axes, world = draft.config.parallelism, draft.hardware.world_size
    taken = axes.tensor * axes.pipeline * axes.sequence_parts
    product = f"tensor {axes.tensor} x pipeline {axes.pipeline} x sequence {axes.sequence}"
    product += f" x context {axes.context}" if axes.context > 1 else ""
    if world % taken:
        need = choices(nearest_multiples(world, taken))
        # Blame the axis that alone does not divide the devices, otherwise the largest.
        sizes = {name: getattr(axes, name) for name in AXES}
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
    Key-value heads may be fewer than the ranks if they divide them: several ranks then have the
    same head. Programs of your own cannot do that.

    Fix: Choose a tensor size that divides the heads, and that divides the key-value heads of
    grouped-query attention or is a multiple of them.
    """
    model, tensor = draft.config.model, draft.config.parallelism.tensor
    repeats = draft.config.trains_itself
    for key, size in shapes.undivided_units(model, tensor, repeats=repeats).items():
        yield Problem(
            f"parallelism.tensor={tensor} does not divide {key}={size}",
            choices(nearest_divisors(size, tensor), "parallelism.tensor"),
        )


@rule(
    "TC532",
    "optimizer.kind",
    example="recipe=tiny hardware=4xh100-80g parallelism.tensor=4 optimizer=muon",
)
def heads_on_several_ranks_are_updated_alone(draft: Draft) -> Iterator[Problem]:
    """Optimizers that see whole tensors have each key-value head on one tensor rank.

    With more tensor ranks than key-value heads, several ranks have the same head. Optimizers that
    look at whole tensors put them together from one part a rank.

    Fix: Use as many tensor ranks as key-value heads, or optimizer=adamw.
    """
    config, tensor = draft.config, draft.config.parallelism.tensor
    model = config.model
    if model.is_module or tensor == 1 or spec_of(config.optimizer).is_elementwise:
        return
    if shapes.repeated_heads(model, tensor) > 1:
        heads = shapes.key_value_heads(model)
        yield Problem(
            f"optimizer.kind={config.optimizer.kind} with parallelism.tensor={tensor} and {heads} "
            "key-value heads: several ranks have the same head",
            f"parallelism.tensor={heads}, or optimizer=adamw",
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

    Fix: Choose a sequence size that divides the heads; beyond that use parallelism.context, which
    needs no heads, or both axes together.
    """
    model, axes = draft.config.model, draft.config.parallelism
    shards, tensor = axes.sequence, axes.tensor
    heads = model.num_attention_heads
    if shards == 1 or shapes.undivided_units(model, tensor):  # tensor has its own rule
        return
    share = "=" if tensor == 1 else f" / parallelism.tensor={tensor} = "
    heads, kv_heads = heads // tensor, int(shapes.own_key_value_heads(model, tensor))
    if heads % shards:
        yield Problem(
            f"parallelism.sequence={shards} does not divide model.num_attention_heads{share}"
            f"{heads}",
            f"{choices(nearest_divisors(heads, shards), 'parallelism.sequence')}, or "
            f"parallelism.context={shards} parallelism.sequence=1",
        )
    elif kv_heads % shards and shards % kv_heads:
        yield Problem(
            f"parallelism.sequence={shards} and model.num_key_value_heads{share}{kv_heads}: "
            "neither divides the other",
            choices(nearest_divisors(kv_heads, shards), "parallelism.sequence"),
        )


@rule("TC012", "parallelism.*", example="recipe=tiny parallelism.sequence=2 model.attention=eager")
def attention_sees_the_whole_sequence(draft: Draft) -> Iterator[Problem]:
    """Under sequence and context parallelism the attention kernel needs no mask of the whole
    sequence.

    A rank of these axes has a part of the text, so a mask made there describes that part only. What
    a token may see must be known without one: causal attention and documents are, and of the
    kernels for the sequence axis FlashAttention knows windows. Ring attention knows none.

    Fix: Use model.attention=sdpa, and a length that no window cuts.
    """
    config = draft.config
    model = config.model
    stages = (stage.sequence_length or 0 for stage in config.data.stages)
    length = max([config.training.sequence_length, *stages])
    axes = config.parallelism
    if axes.sequence_parts == 1:
        return
    name = "context" if axes.context > 1 else "sequence"
    key, size = f"parallelism.{name}", getattr(axes, name)
    read = None if model.is_unread else shapes.anatomy(model)
    if read is not None and read.has_length_dependent_rope:
        yield Problem(
            f"{key}={size}: the rotary embeddings of {model.model_type} "
            "depend on the largest position, which ranks with a part of a sequence do not see",
            f"{key}=1",
            key=key,
        )
    what = f"{key}={size} with model.attention={model.attention.value}"
    if model.attention is AttentionKind.eager:
        hint = "model.attention=sdpa"
        yield Problem(f"{what}: it needs a mask of the whole sequence", hint, key=key)
        return
    reads_windows = model.attention is AttentionKind.flash_attention_2 and axes.context == 1
    if reads_windows or model.sliding_window is None or model.sliding_window >= length:
        return
    instead = "parallelism.sequence, " if axes.context > 1 else ""
    yield Problem(
        f"{what} and model.sliding_window={model.sliding_window}: sequences of {length} would "
        "be attended to as a whole",
        f"training.sequence_length={model.sliding_window}, or on a GPU {instead}"
        "model.attention=flash_attention_2",
        key=key,
    )


RING_WIDTH = 256
"""Largest head width of torch's FlashAttention (aten/src/ATen/native/transformers/cuda)."""


def _ring_setting(axes: ParallelismConfig) -> tuple[str, str, str]:
    """Return the key that makes attention ring attention, its setting, and one without a ring."""
    if axes.context > 1:
        key = "parallelism.context"
        return key, f"{key}={axes.context}", "parallelism.context=1 and parallelism.sequence"
    what = f"parallelism.sequence={axes.sequence} and data.mask_documents=true"
    return "parallelism.sequence", what, "data.mask_documents=false"


@rule(
    "TC520",
    "parallelism.*",
    example="recipe=tiny hardware=8xh100-80g parallelism.context=2 precision=fp32",
)
def ring_has_a_kernel(draft: Draft) -> Iterator[Problem]:
    """Ring attention on GPUs has the number format and the head width of FlashAttention's kernel.

    Blocks of keys are merged by the log-sum-exp that torch's fused kernel returns. On GPUs it takes
    fp16 and bf16, and heads of at most 256 numbers, a multiple of 8. Masked documents under
    parallelism.sequence with sdpa are computed in the same way.

    Fix: Use precision=bf16, or the sequence axis without masked documents.
    """
    config = draft.config
    on_cpu = draft.hardware.accelerator is Accelerator.cpu
    if not uses_ring(config) or on_cpu or not config.trains_itself:
        return
    key, what, instead = _ring_setting(config.parallelism)
    is_fp32 = number_formats(config.precision).weights is DataType.fp32
    if is_fp32 and not config.precision.autocast:
        why = "the fused kernel takes fp16 and bf16"
        yield Problem(f"{what} in fp32: {why}", "precision=bf16", key=key)
    width = 0 if config.model.is_unread else shapes.attended_width(config.model)
    if width % 8 or width > RING_WIDTH:
        yield Problem(
            f"{what} with heads of {width} numbers: the fused kernel takes multiples of 8 up to "
            f"{RING_WIDTH}",
            instead,
            key=key,
        )


@rule(
    "TC522",
    "parallelism.*",
    situation="A directory with `attention_dropout` above 0 in its config.json, and "
    "`parallelism.context=2`",
    message="parallelism.context=2: the model's code drops a part of its attention",
)
def ring_drops_nothing(draft: Draft) -> Iterator[Problem]:
    """Ring attention has no dropout.

    Blocks of keys are merged by the log-sum-exp of whole attention. A directory's own code drops a
    part of it while training if attention_dropout (or attn_pdrop) of its config.json is above 0.
    Masked documents under parallelism.sequence with sdpa are computed by the ring too.

    Fix: Set attention_dropout to 0 in config.json, as most published models have it; or leave out
    the context axis or the masks.
    """
    config = draft.config
    if not uses_ring(config) or not config.trains_itself or config.model.is_unread:
        return
    read = shapes.anatomy(config.model)
    if read is not None and read.drops_attention:
        key, what, instead = _ring_setting(config.parallelism)
        why = "the model's code drops a part of its attention, which ring attention does not"
        hint = f"attention_dropout=0 in config.json, or {instead}"
        yield Problem(f"{what}: {why}", hint, key=key)


@rule(
    "TC521",
    "parallelism.context",
    example="recipe=tiny parallelism.context=2 script=train.py",
    files={"train.py": ""},
)
def context_ranks_run_our_trainer(draft: Draft) -> Iterator[Problem]:
    """The context axis belongs to trainctl's trainer: DeepSpeed has no such axis.

    A program of your own gets DeepSpeed's JSON, which can say a sequence-parallel size but no
    context-parallel one.

    Fix: Use parallelism.sequence, or trainctl's trainer.
    """
    config = draft.config
    if config.parallelism.context > 1 and not config.trains_itself:
        yield Problem(
            f"parallelism.context={config.parallelism.context} for a program of your own: "
            "DeepSpeed's JSON has no context axis",
            "parallelism.context=1, or parallelism.sequence",
        )


@rule(
    "TC005",
    "training.sequence_length",
    example="recipe=tiny parallelism.sequence=4 training.sequence_length=1022",
)
def sequence_splits_evenly(draft: Draft) -> Iterator[Problem]:
    """The sequence length is a multiple of the ranks that share a sequence.

    A sequence is cut into equal parts, one for each rank; context ranks have two chunks each, the
    one from the beginning and the other from the end.

    Fix: Use the next multiple of the axis as the length.
    """
    length, axes = draft.config.training.sequence_length, draft.config.parallelism
    shards, what = axes.sequence_multiple, f"parallelism.sequence={axes.sequence}"
    if axes.context > 1:
        what += f" x parallelism.context={axes.context}, of two chunks each"
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
    layers, axes = draft.config.model.num_layers, draft.config.parallelism
    if 0 < layers < axes.stages:
        each = axes.stages // axes.pipeline
        two = " ranks of two" if each == 2 else ""
        yield Problem(
            f"parallelism.pipeline={axes.pipeline}{two} stages, but model.num_layers={layers}",
            f"parallelism.pipeline={max(1, layers // each)} at most",
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
    if len(listed) != axes.stages:
        each = axes.stages // axes.pipeline
        two = " with two on each rank" if each == 2 else ""
        need = f"parallelism.pipeline={len(listed) // each}"
        yield Problem(
            f"parallelism.stage_blocks={listed} has {len(listed)} stages, parallelism.pipeline="
            f"{axes.pipeline}{two}",
            "an even number of stages" if len(listed) % each else need,
        )
    if min(listed) < 1 or sum(listed) != layers:
        yield Problem(
            f"parallelism.stage_blocks={listed} has {sum(listed)} blocks in stages of at least "
            f"{min(listed)}; they have to be model.num_layers={layers}, in stages of at least 1",
            "leave it out: the stages are balanced",
        )


_MODULE_LACKS = {
    "sequence": ": its forward pass needs whole sequences",
    "context": ": its forward pass needs whole sequences",
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
    axes = draft.config.parallelism
    if draft.batch is None or axes.is_folded:  # TC533 is stricter
        return
    stages, micro_batches = axes.pipeline, draft.batch.gradient_accumulation_steps
    if micro_batches < stages:
        yield Problem(
            f"{micro_batches} micro-batches in {stages} pipeline stages leave them idle "
            f"{bubble_share(axes, micro_batches):.0%} of the time",
            f"training.gradient_accumulation_steps={4 * stages} or more",
        )


@rule(
    "TC533",
    "parallelism.pipeline_schedule",
    "training.*",
    example="recipe=tiny zero_stage=1 parallelism.pipeline=2 "
    "parallelism.pipeline_schedule=dualpipev training.micro_batch_size=8 "
    "training.gradient_accumulation_steps=2",
)
def folded_pipelines_are_filled(draft: Draft) -> Iterator[Problem]:
    """A step under DualPipeV has at least two micro-batches for each pipeline rank.

    Each micro-batch goes along the ranks and back. DeepSpeed's schedule begins with as many of them
    on the way as there are stages, two on a rank, and has no order for fewer. A program of your own
    makes the stages itself.

    Fix: Give a step more micro-batches: a smaller training.micro_batch_size or a larger global
    batch, in each phase of a batch ramp. Or use parallelism.pipeline_schedule=1f1b.
    """
    config, axes = draft.config, draft.config.parallelism
    if not axes.is_folded:
        return
    asked, other = "parallelism.pipeline_schedule=dualpipev", "parallelism.pipeline_schedule=1f1b"
    if not config.trains_itself:
        yield Problem(f"{asked} is of trainctl's own trainer", other)
        return
    if draft.batch is None:
        return
    batches = [phase.batch for phase in draft.batches.phases] if draft.batches else [draft.batch]
    fewest = min(batch.gradient_accumulation_steps for batch in batches)
    if fewest < axes.stages:
        yield Problem(
            f"{asked} with parallelism.pipeline={axes.pipeline} needs {axes.stages} micro-batches "
            f"in a step, and there are {fewest}",
            f"training.gradient_accumulation_steps={axes.stages} or more, or {other}",
            key="training.gradient_accumulation_steps",
        )


@rule("TC008", "parallelism.*", example="recipe=tiny parallelism.pipeline=2 parallelism.sequence=2")
def pipeline_without_sequence(draft: Draft) -> Iterator[Problem]:
    """Pipeline stages are not combined with sequence or context parallelism.

    DeepSpeed's pipeline builds its groups from pipeline, data and tensor axes only.

    Fix: Keep one of them: stages for a deep model, sequence or context axis for long text.
    """
    axes = draft.config.parallelism
    for name in ("sequence", "context"):
        size = getattr(axes, name)
        if axes.pipeline > 1 and size > 1:
            yield Problem(
                f"parallelism.{name}={size} with parallelism.pipeline={axes.pipeline}: "
                f"DeepSpeed's pipeline has no {name} axis",
                f"parallelism.{name}=1 or parallelism.pipeline=1",
                key=f"parallelism.{name}",
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
