"""Rules about trained weights: adapters, frozen and quantized weights."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.keys import as_written
from trainctl.config.schema import CompileKind, CrossEntropyKind, DataType, OffloadDevice, RunConfig
from trainctl.config.suggest import did_you_mean, nearest_names
from trainctl.options.adapter import BaseWeights, low_rank
from trainctl.options.adapter import spec_of as adapter_of
from trainctl.options.limits import Limit, never_value, only_value
from trainctl.options.optimizer import spec_of
from trainctl.plans.derive import derive_stages
from trainctl.plans.settings import number_formats
from trainctl.plans.shapes import anatomy
from trainctl.plans.trainable import (
    BLOCK,
    adapted_layers,
    frozen_ties,
    idle_stages,
    is_partial,
    is_target,
    linear_layers,
    matching_parameters,
    quantized_layers,
    stacked_experts,
    tied_parameters,
    trainable,
)
from trainctl.rules.plan.draft import Draft, limit_problems
from trainctl.rules.rule import WARNING, Problem, rule

FREEZE, TARGETS, ALSO = "training.freeze", "adapter.targets", "adapter.also_train"


def _is_asked(config: RunConfig) -> bool:
    """Return True if some weights are frozen and the model's tensors are known."""
    return is_partial(config) and not config.model.is_unread


@rule(
    "TC376",
    "adapter.kind",
    "adapter.targets",
    example="recipe=tiny adapter=lora adapter.targets=[q_prj,v_proj]",
)
def targets_meet_layers(draft: Draft) -> Iterator[Problem]:
    """Each entry of adapter.targets ends the name of some linear layer.

    Adapters are put beside linear layers that are chosen by the end of their name; a name that no
    layer has would leave it without one.

    Fix: Use names of the model's own layers: the message lists them.
    """
    adapter = low_rank(draft.config.adapter)
    if adapter is None or not _is_asked(draft.config):
        return
    model = draft.config.model
    layers = (*linear_layers(model), *stacked_experts(model))
    parts = (layer.name.split(".")[-2 if layer.experts else -1 :] for layer in layers)
    known = list(dict.fromkeys(map(".".join, parts)))
    if not layers:
        yield Problem("no block of the model has a linear layer", "adapter=none")
        return
    for target in adapter.targets:
        if not any(is_target(layer, target) for layer in layers):
            yield Problem(
                f"no linear layer of the blocks is called {target!r}",
                f"{did_you_mean(nearest_names(target, known))} they are {', '.join(known)}".strip(),
                key=TARGETS,
            )


@rule("TC377", "training.freeze", example="recipe=tiny training.freeze=[embed_tokns]")
def frozen_names_meet_parameters(draft: Draft) -> Iterator[Problem]:
    """Each entry of training.freeze matches some parameter.

    An entry of training.freeze that meets no parameter freezes nothing, mostly for a typing
    mistake.

    Fix: Write a part of a parameter's name, a word such as embeddings, or all_but_last_blocks:N.
    """
    model = draft.config.model
    if not draft.config.training.freeze or not _is_asked(draft.config):
        return
    for entry in draft.config.training.freeze:
        try:
            met = matching_parameters(model, entry)
        except ValueError as problem:
            yield Problem(f"{entry!r} {problem}", f"{FREEZE}=[embeddings]")
            continue
        if not met:
            names = list(dict.fromkeys(_words(draft.config)))
            yield Problem(
                f"{entry!r} is found in no parameter's name",
                did_you_mean(nearest_names(entry, names))
                or f"names are such as {next(iter(matching_parameters(model, '.')))}",
            )


@rule(
    "TC384",
    "adapter.also_train",
    example="recipe=tiny adapter=lora adapter.also_train=[embed_tokns]",
)
def also_trained_meet_parameters(draft: Draft) -> Iterator[Problem]:
    """Each entry of adapter.also_train matches a parameter without an adapter.

    What trains beside an adapter is named by patterns. One that meets nothing is a typing error,
    and a weight that an adapter is beside stays frozen.

    Fix: Name parameters without an adapter: embeddings, head, or norms.
    """
    config, adapter = draft.config, low_rank(draft.config.adapter)
    if adapter is None or not adapter.also_train or not _is_asked(config):
        return
    layers = adapted_layers(config.model, adapter)
    beside = {layer.weight for layer in layers}
    beside |= quantized_layers(config.model, adapter).keys()
    for entry in adapter.also_train:
        try:
            met = matching_parameters(config.model, entry)
        except ValueError as problem:
            yield Problem(f"{entry!r} {problem}", f"{ALSO}=[embeddings,head]")
            continue
        if not met:
            words = list(dict.fromkeys(_words(config)))
            yield Problem(
                f"{entry!r} is found in no parameter's name",
                did_you_mean(nearest_names(entry, words)) or f"{ALSO}=[embeddings,head]",
            )
        both = [name for name in met if name in beside]
        if both:
            yield Problem(
                f"{entry!r} meets {both[0]}, which is frozen beside its adapter, or in fewer bits",
                f"{ALSO}=[embeddings,head], or adapter.targets without it",
            )


def _words(config: RunConfig) -> Iterator[str]:
    """Yield keywords, parts of parameter names and whole names, to match a mistyped entry."""
    names = [
        *matching_parameters(config.model, "."),
        *(alias for alias, _ in tied_parameters(config.model)),
    ]
    yield from ("embeddings", "head", "all_but_last_blocks:1")
    for name in names:
        yield from (word for word in name.split(".") if not word.isdecimal())
    yield from names


@rule("TC378", "training.freeze", example="recipe=tiny 'training.freeze=[.]'")
def something_trains(draft: Draft) -> Iterator[Problem]:
    """Some weight is trained.

    With everything frozen there is no gradient and nothing to update; an adapter freezes the rest
    by itself.

    Fix: Leave something out of training.freeze.
    """
    config = draft.config
    if not config.training.freeze or not _is_asked(config):
        return
    if low_rank(config.adapter) is not None:
        yield Problem(
            f"{FREEZE}={as_written(config.training.freeze)}: adapter.kind={config.adapter.kind} "
            "freezes all weights of the model already",
            "leave it out, or adapter=none",
        )
    elif not trainable(config).trained:
        yield Problem("nothing is left to train", f"{FREEZE}=[embeddings]")


@rule(
    "TC381",
    "training.freeze",
    severity=WARNING,
    example="recipe=tiny training.freeze=[lm_head] model.tie_word_embeddings=true",
)
def tied_weights_freeze_together(draft: Draft) -> Iterator[Problem]:
    """Tied embedding and head are frozen together.

    With tied embeddings the embedding and the head are one tensor: to freeze one is to freeze both.

    Fix: Set model.tie_word_embeddings=false, if they are to differ.
    """
    config = draft.config
    if not config.training.freeze or not _is_asked(config):
        return
    for alias, name in frozen_ties(config):
        yield Problem(f"{name} and {alias} are one tensor (tied weights), which is frozen as both")


def _is_recurrent(config: RunConfig) -> bool:
    read = None if config.model.is_unread else anatomy(config.model)
    return read is not None and read.is_recurrent


_UNSHOWN = "it has not been shown to train as one process does beside frozen weights"

LIMITS = (
    only_value("engine.kind", "deepspeed", _UNSHOWN, "engine=deepspeed"),
    only_value("model.factory", None, _UNSHOWN),
    only_value("model.mup", False, _UNSHOWN),
    Limit(
        key="model.model_type",
        holds=lambda c: not _is_recurrent(c),
        why="it carries a state from token to token, by code that reads weights past their layers",
        nearest="another model",
    ),
    Limit(
        key="optimizer.kind",
        holds=lambda c: spec_of(c.optimizer).is_elementwise,
        why=_UNSHOWN,
        nearest="optimizer=adamw",
    ),
    Limit(
        key="precision.compute",
        holds=lambda c: c.precision.compute in ("fp32", "bf16"),
        why=_UNSHOWN,
        nearest="precision=bf16",
    ),
    only_value("precision.autocast", False, _UNSHOWN),
    only_value("gradients.centralize", False, _UNSHOWN),
    only_value("kernels.compile", CompileKind.none, _UNSHOWN),
    only_value("kernels.liger", False, _UNSHOWN),
    never_value(
        "kernels.cross_entropy",
        CrossEntropyKind.liger_fused,
        _UNSHOWN,
        "kernels.cross_entropy=chunked",
    ),
    only_value("offload.parameters", OffloadDevice.none, _UNSHOWN),
    never_value("offload.optimizer", OffloadDevice.nvme, _UNSHOWN, "offload.optimizer=cpu"),
    only_value("offload.ratio", 1, _UNSHOWN),
    only_value("offload.zenflow", False, _UNSHOWN),
    only_value("offload.super_offload", False, _UNSHOWN),
    only_value("zero_stage.hpz_partition_size", 1, _UNSHOWN),
    only_value("zero_stage.quantized_weights", False, _UNSHOWN),
    only_value("zero_stage.quantized_gradients", False, _UNSHOWN),
    only_value("script", None, "it trains by itself", "leave it out"),
    only_value("trainer", None, "it trains by itself"),
)
"""Settings that frozen weights and adapters have been verified with."""


@rule("TC379", "*", example="recipe=tiny adapter=lora model.mup=true model.mup_base_width=64")
def frozen_weights_go_with_the_rest(draft: Draft) -> Iterator[Problem]:
    """Frozen weights and adapters are combined only with settings they were verified with.

    Frozen weights and adapters were shown to train as one process does with most of the rest, and
    with some it was not, or cannot be.

    Fix: Use the value that the message names.
    """
    config = draft.config
    if not is_partial(config):
        return
    adapter = low_rank(config.adapter)
    asked = f"adapter={adapter.kind}" if adapter is not None else FREEZE
    without = "adapter=none" if adapter is not None else "no training.freeze"
    yield from limit_problems(config, LIMITS, asked, without)


@rule(
    "TC380",
    "parallelism.pipeline",
    example="recipe=tiny zero_stage=1 parallelism.pipeline=2 "
    "'training.freeze=[\"all_but_last_blocks:1\"]'",
)
def stages_have_something_to_train(draft: Draft) -> Iterator[Problem]:
    """Every pipeline stage has a weight to train.

    Each pipeline stage has an optimizer of its own, and DeepSpeed fails on one without a parameter.

    Fix: Use fewer stages, parallelism.stage_blocks that give each stage such a block, or freeze
    something else.
    """
    config = draft.config
    stages = config.parallelism.stages
    if stages == 1 or not _is_asked(config) or config.model.num_layers < stages:
        return
    sizes, _ = derive_stages(config)
    if len(sizes) != stages or sum(sizes) != config.model.num_layers:
        return  # another rule reports it
    if not trainable(config).trained:
        return
    axes = config.parallelism
    why = "DeepSpeed has no optimizer without a parameter"
    if axes.is_folded:
        why = "DualPipeV runs a backward pass on each of its stages"
    for stage in idle_stages(config, sizes):
        yield Problem(
            f"parallelism.pipeline={axes.pipeline}: stage {stage} (of {sizes[stage]} blocks) has "
            f"nothing to train, and {why}",
            "parallelism.pipeline=1, or parallelism.stage_blocks that give it such a block",
        )


KEY = "adapter.base_weights"


@rule(
    "TC540",
    "adapter.*",
    situation="A model with 8 experts, `adapter=dora adapter.targets=[experts.down_proj]`",
    message="adapter.kind=dora with an adapter of model.layers.0.mlp.experts.down_proj: PEFT has "
    "no trained lengths for the rows of stacked experts",
)
def adapters_of_experts_are_plain(draft: Draft) -> Iterator[Problem]:
    """Adapters of stacked experts are LoRA or rsLoRA without dropout, on a base in compute type.

    The matrices of all experts of a layer are one parameter. PEFT's adapters of such a parameter
    have no dropout and no trained lengths. A quantized base would keep its experts, most of its
    weights, in the compute type.

    Fix: Set adapter=lora, adapter.dropout=0 and adapter.base_weights=compute, or leave the experts
    out of adapter.targets.
    """
    config, adapter = draft.config, low_rank(draft.config.adapter)
    if adapter is None or not _is_asked(config):
        return
    if adapter.is_quantized and any(stacked_experts(config.model)):
        yield Problem(
            f"{KEY}={adapter.base_weights.value} with a mixture of experts: the experts would stay "
            "in the compute type",
            f"{KEY}=compute",
            key=KEY,
        )
    layers = adapted_layers(config.model, adapter)
    stack = next((layer for layer in layers if layer.experts), None)
    if stack is None:
        return
    beside = f"with an adapter of {stack.name}: PEFT has no"
    if adapter_of(adapter).has_magnitude:
        yield Problem(
            f"adapter.kind={adapter.kind} {beside} trained lengths for the rows of stacked experts",
            "adapter=lora, or adapter.targets without the experts",
            key="adapter.kind",
        )
    if adapter.dropout > 0:
        yield Problem(
            f"adapter.dropout={adapter.dropout:g} {beside} dropout for stacked experts",
            "adapter.dropout=0, or adapter.targets without the experts",
            key="adapter.dropout",
        )


def _quantized_weights(draft: Draft) -> BaseWeights | None:
    """Return the format of the quantized base; None if the base is in the compute type."""
    adapter = low_rank(draft.config.adapter)
    return adapter.base_weights if adapter is not None and adapter.is_quantized else None


@rule(
    "TC541",
    "adapter.rank",
    situation="A model with 8 experts in bf16, `adapter=lora adapter.rank=4 "
    "adapter.targets=[experts.down_proj]`",
    message="adapter.rank=4 with an adapter of model.layers.0.mlp.experts.down_proj in bf16: "
    "grouped products take rows of a multiple of 16 bytes, 8 elements",
)
def ranks_of_experts_fill_rows(draft: Draft) -> Iterator[Problem]:
    """The rank of an adapter of stacked experts is a multiple of 8 in bf16, and of 4 in fp32.

    Experts are multiplied by torch's grouped products, whose operands have rows of a multiple of 16
    bytes.

    Fix: Use the rank that the message names.
    """
    config, adapter = draft.config, low_rank(draft.config.adapter)
    if adapter is None or not _is_asked(config):
        return
    layers = adapted_layers(config.model, adapter)
    stack = next((layer for layer in layers if layer.experts), None)
    weights = number_formats(config.precision).weights
    elements = 4 if weights is DataType.fp32 else 8
    if stack is not None and adapter.rank % elements:
        yield Problem(
            f"adapter.rank={adapter.rank} with an adapter of {stack.name} in {weights.value}: "
            f"grouped products take rows of a multiple of 16 bytes, {elements} elements",
            f"adapter.rank={-(-adapter.rank // elements) * elements}",
        )


@rule(
    "TC382",
    "parallelism.tensor",
    "adapter.base_weights",
    example="recipe=tiny adapter=lora adapter.base_weights=nf4 parallelism.tensor=2",
)
def quantized_base_goes_with_the_rest(draft: Draft) -> Iterator[Problem]:
    """A base in 8 or 4 bits has whole matrices, with one row per output.

    Weights in 8 or 4 bits carry scales along a row for each output. A shard of a matrix, or one
    that is stored the other way round, would be read with the wrong ones.

    Fix: Use data parallelism, or adapter.base_weights=compute.
    """
    config, kind = draft.config, _quantized_weights(draft)
    if kind is None:
        return
    tensor = config.parallelism.tensor
    if tensor > 1:
        yield Problem(
            f"parallelism.tensor={tensor} with {KEY}={kind.value}: a tensor rank has a part of "
            "each matrix, and matrices are quantized whole",
            "parallelism.tensor=1 with zero_stage.stage=3, which shares them out, or "
            f"{KEY}=compute",
        )
    if config.model.is_unread:
        return
    layers = quantized_layers(config.model, low_rank(config.adapter)).values()
    if any(layer.inputs_first for layer in layers):
        yield Problem(
            f"{KEY}={kind.value}: the matrices of {config.model.family} have a row for each input, "
            "and are expanded by nothing here",
            f"{KEY}=compute, or another model",
            key=KEY,
        )


@rule(
    "TC383",
    "adapter.base_weights",
    example="recipe=tiny adapter=lora adapter.base_weights=nf4 model.hidden_size=32 "
    "model.intermediate_size=99",
)
def blocks_divide_the_base(draft: Draft) -> Iterator[Problem]:
    """Blocks of 4-bit weights divide every matrix of the base.

    In 4 bits a block of weights shares one scale, and a matrix that is not a whole number of blocks
    has a rest without one.

    Fix: Use adapter.base_weights=int8, which has one scale per row.
    """
    config, kind = draft.config, _quantized_weights(draft)
    if kind in (None, BaseWeights.int8) or config.model.is_unread:
        return
    for name, layer in quantized_layers(config.model, low_rank(config.adapter)).items():
        if layer.inputs * layer.outputs % BLOCK:
            yield Problem(
                f"{KEY}={kind.value}: blocks of {BLOCK} weights do not divide {name}, of "
                f"{layer.outputs} x {layer.inputs}",
                f"{KEY}=int8, which has a scale for each row",
            )
            return
