"""Model FLOPs: what a token costs by the mathematics of the model, from its shape alone.

The formula is that of PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B), 6 N + 12 L H Q T
floating point operations per token of training:

- N: weights that a token is multiplied with: the matrices of every block, and the output projection
(even if tied). Embedding lookups, norms and biases do not count. Of the experts, only those that
the token is routed to count. Each weight takes a multiplication and an addition forward, and twice
that backward. - 12 L H Q T: attention scores and their weighted sum, with L blocks, H query heads
of width Q, and T keys for each query. As in the paper they are not halved for causal attention; a
sliding window bounds T. For a model read from its own code it is 6 H (Q + V) T for each attention
of each block, with its own heads, window, and widths of keys (Q) and values (V).

With frozen weights, operations that are not computed are not counted. A frozen weight has no
gradient, which saves 2 of its 6 operations. Before the first block with a trained weight there is
no backward pass at all, which saves 4; that block itself counts as if all of it had one. An
adapter's matrices count as weights.

Recomputed activations are not counted: they are no progress.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import ModelConfig, RunConfig
from trainctl.models.anatomy import Role
from trainctl.options.objective import HIDDEN_STATES, objective_of
from trainctl.plans.shapes import (
    all_tensors,
    anatomy,
    attention_window,
    block_tensors,
    future_tensors,
    head_dim,
    head_tensor,
)
from trainctl.plans.trainable import (
    block_numbers,
    head_name,
    is_partial,
    tied_parameters,
    trainable,
)

TERA = 1e12


def multiplied_weights(model: ModelConfig) -> int:
    """Return N: the number of matrix elements that every token is multiplied with."""
    read = anatomy(model)
    if read is not None:
        return read.multiplied
    block = sum(tensor.numel for tensor in block_tensors(model) if tensor.is_matrix)
    future = [tensor for tensor in future_tensors(model) if tensor.is_matrix]
    heads = (1 + (model.future_blocks or 0)) * head_tensor(model).numel
    return block * model.num_layers + sum(tensor.numel for tensor in future) + heads


def flops_per_token(model: ModelConfig, sequence_length: int) -> int:
    """Return the floating point operations of forward and backward pass per token.

    `sequence_length` is the number of tokens that attend to each other.
    """
    return 6 * (multiplied_weights(model) + attention_products(model, sequence_length))


def flops_of_run(config: RunConfig, sequence_length: int) -> int:
    """Return the floating point operations of a run per token, less those saved by frozen weights.

    An objective with two passes runs the forward pass twice, on any layout. One that reads hidden
    states runs no output projection.

    `sequence_length` is the number of tokens that attend to each other.
    """
    objective = objective_of(config.objective)
    forward = flops_per_token(config.model, sequence_length) // 3
    total = _trained_flops(config, sequence_length) + (objective.passes - 1) * forward
    if objective.reads != HIDDEN_STATES:
        return total
    read = anatomy(config.model)
    head = head_tensor(config.model).numel if read is None else read.head
    return total - head * ((4 if is_partial(config) else 6) + 2 * (objective.passes - 1))


def _trained_flops(config: RunConfig, sequence_length: int) -> int:
    """Return the floating point operations of forward and backward pass per token."""
    model = config.model
    if not is_partial(config):
        return flops_per_token(model, sequence_length)
    found, blocks, last = trainable(config), block_numbers(model), model.num_layers
    trained = {tensor.name for tensor in found.trained}
    own = {tensor.name for tensor in all_tensors(model)}
    places = [
        -1 if t.embedding else blocks.get(t.name, last) for t in found.trained if t.name in own
    ]
    adapted = [blocks[layer.weight] for layer in found.adapted]
    first = min(adapted + places)
    # A token meets the adapters of its experts alone.
    active = (model.experts_per_token or 1) / (model.num_experts or 1)
    added = (tensor for tensor in found.trained if tensor.name not in own)
    total = round(6 * sum(t.numel * (active if len(t.shape) == 3 else 1) for t in added))
    for name, elements in _multiplied_matrices(model):
        has_backward = blocks.get(name, last) >= first
        total += round(elements * (2 + 2 * has_backward + 2 * (name in trained)))
    share = (last - max(first, 0)) / last
    return total + round((2 + 4 * share) * attention_products(model, sequence_length))


def _multiplied_matrices(model: ModelConfig) -> Iterator[tuple[str, float]]:
    """Yield the canonical name and element count of each matrix that `multiplied_weights` counts.

    A tied head has the embedding's name. An expert counts with the fraction of tokens routed to it.
    """
    read = anatomy(model)
    tied = dict(tied_parameters(model))
    if read is None:
        blocks = block_numbers(model)
        for tensor in all_tensors(model):
            if tensor.is_matrix and tensor.name in blocks:
                yield tensor.name, tensor.numel
        head = head_tensor(model)
        yield tied.get(head.name, head.name), head.numel
        return
    for parameter in read.parameters:
        is_matrix = len(parameter.shape) > 1 and not parameter.is_bias
        if is_matrix and parameter.role is not Role.embedding:
            yield parameter.name, parameter.numel * read.active_share(parameter)
    if read.has_tied_head:
        yield tied.get(head_name(model), ""), read.head


def attention_products(model: ModelConfig, sequence_length: int) -> int:
    """Return attention's multiplications per token: scores and weighted sum, in all blocks."""
    read = anatomy(model)
    if read is not None:
        return read.attention_products(sequence_length)
    keys = min(sequence_length, attention_window(model) or sequence_length)
    blocks = model.num_layers + (model.future_blocks or 0)
    return 2 * blocks * model.num_attention_heads * head_dim(model) * keys


def utilisation(
    flops: float, seconds: float, *, devices: int, peak_tflops: float | None
) -> float | None:
    """Return the model FLOPs utilisation, between 0 and 1; None if the peak is unknown.

    `flops` is the work of all devices together. `peak_tflops` is the dense peak of one device in
    the format of the matrix products, in TFLOP/s.
    """
    if peak_tflops is None:
        return None
    return flops / (seconds * devices * peak_tflops * TERA)
