"""Rules about the expert axis: its size, and the settings it has been verified with."""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from trainctl.config.schema import CompileKind, OffloadDevice, RunConfig
from trainctl.errors import Finding
from trainctl.options.optimizer import ELEMENT, spec_of
from trainctl.plan.experts import auxiliary_loss
from trainctl.plan.shapes import anatomy
from trainctl.rules.plan.draft import Draft, choices, error, nearest_divisors, warning

KEY = "parallelism.expert"

FORMATS = ("fp32", "bf16")
"""Compute formats in which loss curves of the expert axis have been compared."""


def experts_are_shared_out(draft: Draft) -> Iterator[Finding]:
    """Each rank of the expert axis has as many whole experts, and they are data-parallel ranks."""
    model, expert = draft.config.model, draft.config.parallelism.expert
    if expert == 1 or not draft.config.trains_itself:
        return
    if not _has_experts(draft.config):
        what = f"the model of {model.path}" if model.is_directory else f"the {model.family} family"
        yield error(KEY, f"{KEY}={expert}, but {what} has no experts", f"{KEY}=1")
        return
    read = None if model.is_unread else anatomy(model)
    if read is not None and read.has_custom_expert_forward:
        yield error(
            KEY,
            f"{KEY}={expert}: the experts of {model.model_type} are multiplied by its own code, "
            "which keeps all of them on a rank",
            f"{KEY}=1",
        )
        return
    data, count = draft.mesh.data if draft.mesh is not None else 0, model.num_experts or 1
    for whole, what in (
        (data, f"the data-parallel size {data}"),
        (count, f"the model's {count} experts"),
    ):
        if whole % expert:
            nearest = nearest_divisors(gcd(data, count), expert)
            yield error(KEY, f"{KEY}={expert} does not divide {what}", choices(nearest, KEY))


def expert_axis_goes_with_the_rest(draft: Draft) -> Iterator[Finding]:
    """What is beside the expert axis has been shown to give the curve of one process."""
    config = draft.config
    expert = config.parallelism.expert
    if expert == 1 or not config.trains_itself:
        return
    for key, value, why, nearest in _not_beside(config):
        yield error(key, f"{key}={value} with {KEY}={expert}: {why}", f"{nearest}, or {KEY}=1")


def experts_are_kept_busy(draft: Draft) -> Iterator[Finding]:
    """Without a balancing loss or bias all tokens may end up with the same experts."""
    config = draft.config
    if not config.trains_itself or not _has_experts(config):
        return
    if auxiliary_loss(config) == 0 and config.experts.bias_update_rate == 0:
        yield warning(
            "experts.auxiliary_loss",
            f"nothing keeps the {config.model.num_experts} experts equally busy: the loss is the "
            "cross entropy alone (router_aux_loss_coef of config.json counts where its "
            "output_router_logits is true, as in transformers)",
            "experts.auxiliary_loss=0.001, or experts.bias_update_rate=0.001 where the routers "
            "have a bias; for short fine-tuning it matters little",
        )


def balance_is_that_of_whole_sequences(draft: Draft) -> Iterator[Finding]:
    """What is added to the loss is of sequences that one rank sees whole, and all blocks of."""
    config = draft.config
    losses = {"auxiliary_loss": auxiliary_loss(config), "z_loss": config.experts.z_loss}
    if not config.trains_itself or not _has_experts(config):
        return
    axes = ("tensor", "sequence", "pipeline")
    beside = next((axis for axis in axes if getattr(config.parallelism, axis) > 1), None)
    for name, weight in losses.items():
        if weight > 0 and beside is not None:
            size = getattr(config.parallelism, beside)
            yield error(
                f"experts.{name}",
                f"experts.{name}={weight:g} with parallelism.{beside}={size}: a rank does not see "
                "all that the routers make of a sequence",
                f"experts.{name}=0, or parallelism.{beside}=1",
            )


def balance_can_be_kept(draft: Draft) -> Iterator[Finding]:
    """What keeps experts equally busy sees their routers, and moves a bias that these have."""
    config, model = draft.config, draft.config.model
    read = None if model.is_unread else anatomy(model)
    if read is None or not _has_experts(config) or not config.trains_itself:
        return
    settings = {
        "auxiliary_loss": auxiliary_loss(config),
        "z_loss": config.experts.z_loss,
        "bias_update_rate": config.experts.bias_update_rate,
    }
    for name, value in settings.items():
        key = f"experts.{name}"
        if value > 0 and (read.has_custom_expert_forward or read.has_unknown_routers):
            yield error(
                key,
                f"{key}={value:g}: the routers of {model.model_type} are a part of code of its "
                "own, which does not show what they choose",
                f"{key}=0",
            )
        elif value > 0 and name == "bias_update_rate" and not read.has_biased_routers:
            yield error(
                key,
                f"{key}={value:g}: the routers of {model.model_type} have no bias that experts are "
                "chosen by",
                f"{key}=0, and experts.auxiliary_loss=0.001 in its place",
            )


def _has_experts(config: RunConfig) -> bool:
    return config.model.is_directory and (config.model.num_experts or 1) > 1


def _not_beside(config: RunConfig) -> Iterator[tuple[str, object, str, str]]:
    """Yield key, value, reason and nearest legal setting of what the expert axis excludes."""
    axes, zero, offload = config.parallelism, config.zero_stage, config.offload
    for name, why in (
        (
            "tensor",
            "a shard of a parameter is cut along one dimension, and experts are along theirs",
        ),
        ("sequence", "it has not been compared with one process"),
    ):
        if getattr(axes, name) > 1:
            yield f"parallelism.{name}", getattr(axes, name), why, f"parallelism.{name}=1"
    optimizer = spec_of(config.optimizer)
    if optimizer.needs != ELEMENT:
        why = f"one element's update needs {optimizer.needs}, and looks for it on all replicas"
        yield "optimizer.kind", optimizer.name, why, "optimizer=adamw"
    if config.precision.compute not in FORMATS or config.precision.autocast:
        name = "autocast" if config.precision.autocast else "compute"
        value = str(getattr(config.precision, name)).lower()
        yield (
            f"precision.{name}",
            value,
            "it has not been compared with one process",
            ("precision=bf16"),
        )
    for name in ("optimizer", "parameters"):
        place = getattr(offload, name)
        if place is not OffloadDevice.none:
            why = "DeepSpeed takes the norms of what it offloads itself, over all replicas"
            yield f"offload.{name}", place.value, why, "offload=none"
    if zero.hpz_partition_size > 1:
        why = "the copy within a node is of parameters that all its devices share"
        yield (
            "zero_stage.hpz_partition_size",
            zero.hpz_partition_size,
            why,
            ("zero_stage.hpz_partition_size=1"),
        )
    for name in ("quantized_weights", "quantized_gradients"):
        if getattr(zero, name):
            why = "its groups are made for parameters that all replicas have"
            yield f"zero_stage.{name}", "true", why, f"zero_stage.{name}=false"
    for name in ("contiguous_gradients", "reduce_scatter"):
        if zero.stage in (1, 2) and not getattr(zero, name):
            why = "DeepSpeed averages the gradients of experts with it alone"
            yield f"zero_stage.{name}", "false", why, f"zero_stage.{name}=true"
    if config.kernels.compile is not CompileKind.none:
        why = "how many tokens travel is known on the host only, in each layer"
        yield "kernels.compile", config.kernels.compile.value, why, "kernels.compile=none"
    if config.gradients.centralize:
        why = "it has not been compared with one process"
        yield "gradients.centralize", "true", why, "gradients.centralize=false"
