"""Rules about kernels, compilers and recomputation: hardware, and code that can be compiled."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.keys import as_written
from trainctl.config.schema import (
    Accelerator,
    CompileKind,
    CrossEntropyKind,
    ModelConfig,
    OffloadDevice,
    RunConfig,
)
from trainctl.models.anatomy import parse_anatomy
from trainctl.options.activation_checkpointing import checkpointing_of, recomputing_section
from trainctl.options.engine import engine_of
from trainctl.options.model import AXES, architecture, families
from trainctl.plans.settings import DETERMINISTIC_VARIABLES
from trainctl.plans.shapes import FEED_FORWARD
from trainctl.rules.plan.draft import Draft
from trainctl.rules.rule import WARNING, Problem, rule


@rule("TC085", "kernels.liger", "kernels.cross_entropy", example="recipe=tiny kernels.liger=true")
def liger_runs_here(draft: Draft) -> Iterator[Problem]:
    """Liger kernels run on a GPU, for an architecture that Liger supports.

    Liger's kernels are Triton code for GPUs, written for one architecture each, and replace modules
    that a pipeline cuts apart.

    Fix: Set kernels.liger=false; kernels.cross_entropy=chunked saves the memory of logits anywhere.
    """
    kernels, model = draft.config.kernels, draft.config.model
    on_cpu = draft.hardware.accelerator is Accelerator.cpu
    if kernels.liger and on_cpu:
        yield Problem(
            f"kernels.liger needs a GPU, and the hardware is {draft.hardware.name}",
            "kernels.liger=false, or kernels=default",
        )
    if kernels.cross_entropy is CrossEntropyKind.liger_fused and on_cpu:
        yield Problem(
            f"kernels.cross_entropy=liger_fused needs a GPU, and the hardware is "
            f"{draft.hardware.name}",
            "kernels.cross_entropy=chunked",
            key="kernels.cross_entropy",
        )
    known = architecture(model)
    if kernels.liger and (known is None or not known.has_liger):
        names = ", ".join(spec.name for spec in families() if spec.has_liger)
        yield Problem(
            f"kernels.liger is for {names}, and the model is {_architecture(model)}",
            "kernels.liger=false",
        )
    if kernels.liger and draft.config.parallelism.pipeline > 1:
        yield Problem(
            "kernels.liger with pipeline stages: Liger changes whole models only",
            "kernels.liger=false, or parallelism.pipeline=1",
        )


@rule(
    "TC086",
    "kernels.cross_entropy",
    example="recipe=tiny kernels.cross_entropy=chunked parallelism.pipeline=2 zero_stage=1",
)
def loss_sees_the_hidden_states(draft: Draft) -> Iterator[Problem]:
    """A chunked or fused loss has the last hidden states and the whole output head.

    A loss without all logits takes the last hidden states and the head itself. That needs a model
    that does nothing else in between, on a rank that has all of the head.

    Fix: Set kernels.cross_entropy=chunked, or plain.
    """
    config = draft.config
    kind, key = config.kernels.cross_entropy, "kernels.cross_entropy"
    value = f"{key}={as_written(kind)}"
    if config.kernels.has_all_logits:
        return
    known = architecture(config.model)
    is_fused = kind is CrossEntropyKind.liger_fused
    if is_fused and (known is None or not known.has_plain_head):
        yield Problem(
            f"{value} with the {_architecture(config.model)} architecture: what it does "
            "between its last hidden states and its logits is not known",
            f"{key}=chunked",
        )
    if config.parallelism.pipeline > 1:
        yield Problem(
            f"{value} with pipeline stages: DeepSpeed's pipeline computes the loss from logits",
            f"{key}=plain, or parallelism.pipeline=1",
        )
    if is_fused and config.parallelism.tensor > 1:
        yield Problem(
            f"{key}=liger_fused needs the whole vocabulary, and parallelism.tensor="
            f"{config.parallelism.tensor} splits it",
            f"{key}=chunked",
        )


@rule(
    "TC375",
    "kernels.mlp_tiles",
    example="recipe=tiny kernels.mlp_tiles=4 activation_checkpointing=selective",
)
def tiles_are_of_dense_layers(draft: Draft) -> Iterator[Problem]:
    """A tiled feed-forward layer treats each token separately.

    A feed-forward layer can be computed a piece of the tokens at a time, which saves memory at long
    sequences. It has to treat each token by itself, and what is kept of it must not undo the
    saving.

    Fix: Set kernels.mlp_tiles=1, or leave out what the message names.
    """
    config = draft.config
    tiles, key = config.kernels.mlp_tiles, "kernels.mlp_tiles"
    if tiles == 1 or not config.trains_itself:
        return
    for why in _why_not_tiled(config):
        yield Problem(f"{key}={tiles}: {why}", f"{key}=1")
    if draft.batch is not None:
        share = -(-draft.batch.sequence_length // config.parallelism.sequence_parts)
        tokens = draft.batch.micro_batch_size * share
        if tokens < tiles:
            yield Problem(f"{key}={tiles}: a rank's micro-batch has {tokens} tokens", f"{key}=1")


def _why_not_tiled(config: RunConfig) -> Iterator[str]:
    kernels, model = config.kernels, config.model
    anatomy = parse_anatomy(model.anatomy) if model.anatomy else None
    if (model.num_experts or 1) > 1 or (anatomy is not None and anatomy.has_experts):
        yield (
            "experts take each only the tokens that are sent to them, and what is counted of their "
            "load is counted for each call"
        )
    elif anatomy is not None and not any(_in_feed_forward(p.name) for p in anatomy.parameters):
        yield f"the {_architecture(model)} architecture has no module for its feed-forward layer"
    if kernels.is_compiled:
        yield f"kernels.compile={as_written(kernels.compile)} compiles whole blocks"
    if checkpointing_of(config.activation_checkpointing).keeps_products:
        yield (
            f"activation_checkpointing.mode={config.activation_checkpointing.mode} keeps what the "
            "products inside of the layer give, which is what tiles are to save"
        )
    if config.parallelism.sequence_sharded_norms:
        yield "parallelism.sequence_sharded_norms cuts the layer's output along the sequence"


def _in_feed_forward(tensor: str) -> bool:
    return any(f".{name}." in tensor for name in FEED_FORWARD)


@rule(
    "TC087",
    "kernels.compile",
    "activation_checkpointing.mode",
    example="recipe=tiny kernels.compile=blocks activation_checkpointing=selective zero_stage=3",
)
def compiler_sees_whole_blocks(draft: Draft) -> Iterator[Problem]:
    """torch.compile gets blocks that it can trace.

    torch.compile makes one graph of a block, and of its checkpoint if that keeps some results. The
    hooks of ZeRO stage 3 would cut such a checkpoint, and the exchanges of Ulysses and of ring
    attention cannot be traced.

    Fix: Use activation_checkpointing=full beside it, or kernels.compile=none.
    """
    config = draft.config
    if config.kernels.compile is not CompileKind.blocks:
        return
    key, axes = "kernels.compile", config.parallelism
    is_hooked = config.zero_stage.stage == 3 and engine_of(config).takes_json
    spec = checkpointing_of(config.activation_checkpointing)
    yield from _compiled_as_it_is_kept(config, f"activation_checkpointing=full, or {key}=none")
    if spec.keeps_products and is_hooked:
        yield Problem(
            f"activation_checkpointing.mode={spec.name} with {key}=blocks at ZeRO stage 3: "
            "DeepSpeed's hooks would cut the graph of a block and its checkpoint",
            f"activation_checkpointing=full, or {key}=none",
            key="activation_checkpointing.mode",
        )
    for axis in ("tensor", "sequence", "context"):
        if getattr(axes, axis) > 1:
            yield Problem(
                f"{key}=blocks with parallelism.{axis}={getattr(axes, axis)}: the blocks "
                "communicate inside, which is not compiled",
                f"{key}=none, or parallelism.{axis}=1",
            )


def _compiled_as_it_is_kept(config: RunConfig, hint: str) -> Iterator[Problem]:
    kind, spec = (
        as_written(config.kernels.compile),
        checkpointing_of(config.activation_checkpointing),
    )
    if kind in spec.why_not:
        yield Problem(
            f"activation_checkpointing.mode={spec.name} with kernels.compile={kind}: "
            f"{spec.why_not[kind]}",
            hint,
            key="activation_checkpointing.mode",
        )


@rule(
    "TC088",
    "kernels.compile",
    "activation_checkpointing.mode",
    example="recipe=tiny kernels.compile=deepcompile",
)
def deepcompile_runs_here(draft: Draft) -> Iterator[Problem]:
    """DeepCompile gets the graph of a whole model, on NVIDIA GPUs.

    DeepCompile rewrites the graph of the whole model and moves its own communication into it: data
    parallel on NVIDIA GPUs, without what cuts the graph.

    Fix: Set kernels.compile=none, or leave out the setting that the message names.
    """
    config = draft.config
    if config.kernels.compile is not CompileKind.deepcompile:
        return
    key, axes = "kernels.compile", config.parallelism
    if draft.hardware.accelerator is not Accelerator.cuda:
        yield Problem(
            f"{key}=deepcompile is for NVIDIA GPUs, and the hardware is {draft.hardware.name}",
            f"{key}=none",
        )
    if config.zero_stage.stage < 3:
        stage = config.zero_stage.stage
        falls_back = "DeepSpeed would fall back to torch.compile"
        aborts = "seen to abort in the second step's backward pass (DeepSpeed 0.19.8, torch 2.11)"
        yield Problem(
            f"{key}=deepcompile at ZeRO stage {stage}: {aborts if stage else falls_back}",
            f"zero_stage=3, or {key}=blocks",
        )
    for axis in AXES:
        if getattr(axes, axis) > 1:
            yield Problem(
                f"{key}=deepcompile knows data parallelism only, and parallelism.{axis}="
                f"{getattr(axes, axis)}",
                f"{key}=none, or parallelism.{axis}=1",
            )
    yield from _compiled_as_it_is_kept(config, f"activation_checkpointing=none, or {key}=blocks")
    if OffloadDevice.nvme in (config.offload.optimizer, config.offload.parameters):
        yield Problem(
            f"{key}=deepcompile with offload to NVMe: DeepCompile moves states to host memory only",
            f"offload=cpu-all, or {key}=blocks",
        )
    if not config.kernels.has_all_logits or config.kernels.liger:
        yield Problem(
            f"{key}=deepcompile compiles the model and its loss; other kernels would cut its graph",
            "kernels.cross_entropy=plain kernels.liger=false",
        )


def _architecture(model: ModelConfig) -> str:
    """Return transformers' `model_type`."""
    return model.model_type or "unknown" if model.is_directory else model.family


@rule(
    "TC081",
    "activation_checkpointing.mode",
    "activation_checkpointing.every_kth_block",
    example="recipe=tiny activation_checkpointing=full activation_checkpointing.every_kth_block=5",
)
def some_block_is_recomputed(draft: Draft) -> Iterator[Problem]:
    """Activation checkpointing recomputes at least one block.

    Recomputation works on whole blocks, every k-th of them. One that reaches none saves nothing.

    Fix: Set every_kth_block to at most the number of blocks.
    """
    config = draft.config
    settings, layers = recomputing_section(config), config.model.num_layers
    if settings is None:
        return
    if layers == 0:
        yield Problem(
            f"activation_checkpointing.mode={settings.mode} recomputes 0 blocks: "
            "model.num_layers=0",
            "activation_checkpointing=none, or model.num_layers=1 or more",
        )
    elif settings.every_kth_block > layers:
        yield Problem(
            f"activation_checkpointing.every_kth_block={settings.every_kth_block}, but the model "
            f"has {layers} blocks",
            f"activation_checkpointing.every_kth_block={layers} or less",
            key="activation_checkpointing.every_kth_block",
        )


@rule(
    "TC083",
    "activation_checkpointing.partition_across_tensor_ranks",
    example="recipe=tiny activation_checkpointing=full "
    "activation_checkpointing.partition_across_tensor_ranks=true",
)
def partitioned_inputs_are_copies(draft: Draft) -> Iterator[Problem]:
    """Checkpointed inputs are partitioned only where tensor-parallel ranks hold copies of them.

    With tensor parallelism all ranks of a group keep the same input of a block; a slice on each
    suffices. Alone, or with norms that are sharded already, there is nothing to slice.

    Fix: Use parallelism.tensor above 1, or leave it out.
    """
    settings, axes = recomputing_section(draft.config), draft.config.parallelism
    key = "activation_checkpointing.partition_across_tensor_ranks"
    if settings is None or not settings.partition_across_tensor_ranks:
        return
    if axes.tensor == 1:
        yield Problem(
            f"{key} has nothing to partition over: parallelism.tensor=1",
            f"parallelism.tensor=2 or more, or {key}=false",
        )
    elif axes.sequence_sharded_norms:
        yield Problem(
            f"{key} with parallelism.sequence_sharded_norms: a rank's input is a slice already",
            f"{key}=false",
        )


@rule(
    "TC084",
    "activation_checkpointing.offload_to_cpu",
    severity=WARNING,
    example="recipe=tiny activation_checkpointing=full "
    "activation_checkpointing.offload_to_cpu=true",
)
def offloaded_inputs_leave_the_device(draft: Draft) -> Iterator[Problem]:
    """Checkpointed inputs are offloaded from a device with memory of its own.

    Inputs of blocks are copied from the device to the host and back. On a CPU both are the same
    memory.

    Fix: Leave it out on CPUs.
    """
    settings = recomputing_section(draft.config)
    on_cpu = draft.hardware.accelerator is Accelerator.cpu
    if settings is not None and settings.offload_to_cpu and on_cpu:
        key = "activation_checkpointing.offload_to_cpu"
        yield Problem(
            f"{key}=true has no effect: on cpu the inputs are in host memory already",
            f"leave {key} out",
        )


@rule(
    "TC027",
    "kernels.compile",
    "launcher.environment",
    example="recipe=tiny training.deterministic=true "
    "launcher.environment.CUBLAS_WORKSPACE_CONFIG=':0:0'",
)
def sums_keep_their_order(draft: Draft) -> Iterator[Problem]:
    """Nothing overrides what training.deterministic sets.

    training.deterministic sets variables that make sums keep their order, before torch is loaded.
    Another value of the same variable would undo it in silence.

    Fix: Leave the variable to trainctl; deepcompile cannot be combined with it.
    """
    config = draft.config
    if not config.training.deterministic:
        return
    for name, value in DETERMINISTIC_VARIABLES.items():
        if name in config.launcher.environment:  # may hold a secret: never print the value
            yield Problem(
                f"launcher.environment sets {name}, which training.deterministic=true sets to "
                f"{value}",
                f"leave {name} out",
                key="launcher.environment",
            )
    if config.kernels.compile is CompileKind.deepcompile:
        yield Problem(
            "kernels.compile=deepcompile with training.deterministic=true: its graph, and what it "
            "reduces together, follows times and memory that it measures",
            "kernels.compile=blocks, or training.deterministic=false",
        )
