"""Rules about a frozen base in 8 or 4 bits; those about trained weights apply as well."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.options.adapter import BaseWeights, low_rank
from trainctl.plan.quantized import BLOCK, quantized_layers
from trainctl.rules.plan.draft import Draft
from trainctl.rules.rule import Problem, rule

KEY = "adapter.base_weights"


def _quantized_weights(draft: Draft) -> BaseWeights | None:
    """Return the format of the quantized base; None if the base is in the compute type."""
    adapter = low_rank(draft.config.adapter)
    return adapter.base_weights if adapter is not None and adapter.is_quantized else None


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
