"""Rules about kernels and compilers: the hardware they need, and the code they can compile."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import (
    Accelerator,
    CompileKind,
    CrossEntropyKind,
    ModelConfig,
    OffloadDevice,
    RunConfig,
)
from trainctl.errors import Finding
from trainctl.models.anatomy import anatomy_of
from trainctl.options.activation_checkpointing import checkpointing_of
from trainctl.options.model import architecture, families
from trainctl.plan.shapes import FEED_FORWARD
from trainctl.rules.plan.draft import Draft, error


def liger_runs_here(draft: Draft) -> Iterator[Finding]:
    """Liger is written in Triton, for GPUs, one architecture at a time."""
    kernels, model = draft.config.kernels, draft.config.model
    on_cpu = draft.hardware.accelerator is Accelerator.cpu
    if kernels.liger and on_cpu:
        yield error(
            "kernels.liger",
            f"kernels.liger needs a GPU, and the hardware is {draft.hardware.name}",
            "kernels.liger=false",
        )
    if kernels.cross_entropy is CrossEntropyKind.liger_fused and on_cpu:
        yield error(
            "kernels.cross_entropy",
            f"kernels.cross_entropy=liger_fused needs a GPU, and the hardware is "
            f"{draft.hardware.name}",
            "kernels.cross_entropy=chunked",
        )
    known = architecture(model)
    if kernels.liger and (known is None or not known.has_liger):
        names = ", ".join(spec.name for spec in families() if spec.has_liger)
        yield error(
            "kernels.liger",
            f"kernels.liger is for {names}, and the model is {_architecture(model)}",
            "kernels.liger=false",
        )
    if kernels.liger and draft.config.parallelism.pipeline > 1:
        yield error(
            "kernels.liger",
            "kernels.liger with pipeline stages: Liger changes whole models only",
            "kernels.liger=false, or parallelism.pipeline=1",
        )


def loss_sees_the_hidden_states(draft: Draft) -> Iterator[Finding]:
    """A loss without all logits goes from the last hidden states through the head by itself."""
    config = draft.config
    kind, key = config.kernels.cross_entropy, "kernels.cross_entropy"
    if kind is CrossEntropyKind.plain:
        return
    known = architecture(config.model)
    is_fused = kind is CrossEntropyKind.liger_fused
    if is_fused and (known is None or not known.has_plain_head):
        yield error(
            key,
            f"{key}={kind.value} with the {_architecture(config.model)} architecture: what it does "
            "between its last hidden states and its logits is not known",
            f"{key}=chunked",
        )
    if config.parallelism.pipeline > 1:
        yield error(
            key,
            f"{key}={kind.value} with pipeline stages: DeepSpeed's pipeline computes the loss from "
            "logits",
            f"{key}=plain, or parallelism.pipeline=1",
        )
    if is_fused and config.parallelism.tensor > 1:
        yield error(
            key,
            f"{key}=liger_fused needs the whole vocabulary, and parallelism.tensor="
            f"{config.parallelism.tensor} splits it",
            f"{key}=chunked",
        )


def tiles_are_of_dense_layers(draft: Draft) -> Iterator[Finding]:
    """A feed-forward layer goes in tiles where it treats each token by itself, whatever is kept."""
    config = draft.config
    tiles, key = config.kernels.mlp_tiles, "kernels.mlp_tiles"
    if tiles == 1 or not config.trains_itself:
        return
    for why in _why_not_tiled(config):
        yield error(key, f"{key}={tiles}: {why}", f"{key}=1")
    if draft.batch is not None:
        share = -(-draft.batch.sequence_length // max(config.parallelism.sequence, 1))
        tokens = draft.batch.micro_batch_size * share
        if tokens < tiles:
            yield error(key, f"{key}={tiles}: a rank's micro-batch has {tokens} tokens", f"{key}=1")


def _why_not_tiled(config: RunConfig) -> Iterator[str]:
    kernels, model = config.kernels, config.model
    anatomy = anatomy_of(model.anatomy) if model.anatomy else None
    if (model.num_experts or 1) > 1 or (anatomy is not None and anatomy.has_experts):
        yield (
            "experts take each only the tokens that are sent to them, and what is counted of their "
            "load is counted for each call"
        )
    elif anatomy is not None and not any(_in_feed_forward(p.name) for p in anatomy.parameters):
        yield f"the {_architecture(model)} architecture has no module for its feed-forward layer"
    if kernels.compile is not CompileKind.none:
        yield f"kernels.compile={kernels.compile.value} compiles whole blocks"
    if checkpointing_of(config.activation_checkpointing).keeps_products:
        yield (
            f"activation_checkpointing.mode={config.activation_checkpointing.mode} keeps what the "
            "products inside of the layer give, which is what tiles are to save"
        )
    if config.parallelism.sequence_sharded_norms:
        yield "parallelism.sequence_sharded_norms cuts the layer's output along the sequence"


def _in_feed_forward(tensor: str) -> bool:
    return any(f".{name}." in tensor for name in FEED_FORWARD)


def compiler_sees_whole_blocks(draft: Draft) -> Iterator[Finding]:
    """What torch.compile cannot take into a block's graph."""
    config = draft.config
    if config.kernels.compile is not CompileKind.blocks:
        return
    key, axes = "kernels.compile", config.parallelism
    yield from _compiled_as_it_is_kept(config, f"activation_checkpointing=full, or {key}=none")
    for axis in ("tensor", "sequence"):
        if getattr(axes, axis) > 1:
            yield error(
                key,
                f"{key}=blocks with parallelism.{axis}={getattr(axes, axis)}: the blocks "
                "communicate inside, which is not compiled",
                f"{key}=none, or parallelism.{axis}=1",
            )


def _compiled_as_it_is_kept(config: RunConfig, hint: str) -> Iterator[Finding]:
    kind, spec = config.kernels.compile.value, checkpointing_of(config.activation_checkpointing)
    if kind in spec.why_not:
        yield error(
            "activation_checkpointing.mode",
            f"activation_checkpointing.mode={spec.name} with kernels.compile={kind}: "
            f"{spec.why_not[kind]}",
            hint,
        )


def deepcompile_runs_here(draft: Draft) -> Iterator[Finding]:
    """DeepCompile works on the graph of the whole model (compile/ of DeepSpeed)."""
    config = draft.config
    if config.kernels.compile is not CompileKind.deepcompile:
        return
    key, axes = "kernels.compile", config.parallelism
    if draft.hardware.accelerator is not Accelerator.cuda:
        yield error(
            key,
            f"{key}=deepcompile is for NVIDIA GPUs, and the hardware is {draft.hardware.name}",
            f"{key}=none",
        )
    if config.zero_stage.stage == 0:
        yield error(
            key,
            f"{key}=deepcompile at ZeRO stage 0: DeepSpeed would fall back to torch.compile",
            f"zero_stage=1, or {key}=blocks",
        )
    for axis in ("tensor", "pipeline", "sequence"):
        if getattr(axes, axis) > 1:
            yield error(
                key,
                f"{key}=deepcompile knows data parallelism only, and parallelism.{axis}="
                f"{getattr(axes, axis)}",
                f"{key}=none, or parallelism.{axis}=1",
            )
    yield from _compiled_as_it_is_kept(config, f"activation_checkpointing=none, or {key}=blocks")
    if OffloadDevice.nvme in (config.offload.optimizer, config.offload.parameters):
        yield error(
            key,
            f"{key}=deepcompile with offload to NVMe: DeepCompile moves states to host memory only",
            f"offload=cpu-all, or {key}=blocks",
        )
    if config.kernels.cross_entropy is not CrossEntropyKind.plain or config.kernels.liger:
        yield error(
            key,
            f"{key}=deepcompile compiles the model and its loss; other kernels would cut its graph",
            "kernels.cross_entropy=plain kernels.liger=false",
        )


def _architecture(model: ModelConfig) -> str:
    """Return transformers' `model_type`."""
    return model.model_type or "unknown" if model.is_directory else model.family
