"""Time of routed experts: their grouped products, routing, and the exchange of tokens.

Every rank of the expert axis holds a part of each layer's experts and gets the tokens that all
ranks route to them (arXiv:2006.16668). A layer ends with its busiest rank.
"""

from __future__ import annotations

from functools import lru_cache
from math import log, sqrt

from trainctl.config.schema import ModelConfig, RunConfig
from trainctl.memory.constants import BYTES
from trainctl.models.anatomy import Anatomy, Role
from trainctl.options.precision import precision_of
from trainctl.plans import shapes
from trainctl.plans.types import Mesh
from trainctl.tuning.rates import GROUPED_ROWS, GROUPED_SHARE, Rates

BALANCED_BY_BIAS, BALANCED_BY_LOSS = 1.04, 1.62
"""Load of the busiest expert over the mean, under a bias that is moved and under a balancing loss:
the means of two sizes of model (`MaxVio`, arXiv:2408.15664, table 2). What nothing balances is
taken for balanced by a loss, which flatters it.
"""

# Elements moved per routed row and width, counted in the operations of transformers'
# `grouped_mm_experts_forward` and of train/parallel/experts.py: rows are gathered, weighted,
# scattered and summed, with an expert axis before and after their exchange.
ROUTED_ELEMENTS, EXCHANGED_ELEMENTS = 7, 17
COMPILED_ELEMENTS = 4
"""Elements moved where a compiler fuses them: one pass before the products, one after."""


def sparse_share(model: ModelConfig) -> float:
    """Return the fraction of the blocks that have routed experts."""
    read = shapes.anatomy(model)
    return (
        0.0 if read is None else sum(block.experts > 0 for block in read.blocks) / len(read.blocks)
    )


def tensor_sums(model: ModelConfig, expert: int) -> float:
    """Return the all-reduces over tensor ranks in the forward pass of a block, a mean over the
    blocks: one after attention, the feed-forward layer, and shared experts beside the routed ones.
    With an expert axis the results of routed experts are gathered, which is half an all-reduce.
    """
    read = shapes.anatomy(model)
    if read is None:
        return 2.0
    shared = {p.block for p in read.parameters if p.role is Role.shared}
    gathered = sparse_share(model) if expert > 1 else 0.0
    return 2 + len(shared) / len(read.blocks) - gathered / 2


def expert_weights(model: ModelConfig) -> int:
    """Return the parameters of all routed experts of the model."""
    read = shapes.anatomy(model)
    return 0 if read is None else read.expert_parameters


def rank_load(config: RunConfig, ranks: int) -> float:
    """Return the tokens of the busiest of the `ranks` that share out experts over their mean.

    The load of the busiest expert is known. If the loads of experts are independent, the mean of n
    experts deviates less by the square root of n, and the largest deviation of N draws grows with
    the square root of log N.
    """
    experts = config.model.num_experts or 1
    if ranks == 1 or experts == 1:
        return 1.0
    settings = config.experts
    balanced = BALANCED_BY_BIAS if settings.bias_update_rate > 0 else BALANCED_BY_LOSS
    load = settings.expected_load or balanced
    return 1 + (load - 1) * sqrt(log(ranks) / log(experts) * ranks / experts)


def expert_time(
    config: RunConfig, speed: Rates, tokens: int, tensor: int, expert: int
) -> tuple[float, float]:
    """Return the seconds of a forward pass's grouped products, and of routing, on the busiest rank;
    averages over the blocks.

    `tokens` are a rank's own tokens of a micro-batch. `tensor` ranks share each expert; with an
    expert axis, both axes share out whole experts, and each tensor rank routes its part of the
    tokens. An expert's rows are multiplied in tiles of `GROUPED_ROWS`, of which the last is half
    empty on average.
    """
    model, share = config.model, sparse_share(config.model)
    read = shapes.anatomy(model)
    if read is None or not share:
        return 0.0, 0.0
    element = BYTES[precision_of(config.precision).format]
    multiplied, moved, weights = _expert_products(read)
    experts, top = model.num_experts or 1, model.experts_per_token or 1
    load = rank_load(config, expert * tensor if expert > 1 else 1)
    rows_per_expert = max(1.0, tokens * top * expert / experts)
    tiled = 1 + GROUPED_ROWS / 2 / rows_per_expert
    flops = 2 * tokens * load * multiplied / tensor
    streams = element * (tokens * load * moved + weights / expert) / tensor
    products = flops * tiled / (speed.products * GROUPED_SHARE) + streams / speed.memory
    elements = EXCHANGED_ELEMENTS if expert > 1 else ROUTED_ELEMENTS
    if config.kernels.is_compiled:
        elements = COMPILED_ELEMENTS
    rows = share * tokens * top * load / (tensor if expert > 1 else 1)
    return products, element * elements * rows * model.hidden_size / speed.memory


def exchanged_bytes(config: RunConfig, tokens: int, mesh: Mesh) -> float:
    """Return the bytes that one sparse block sends to experts, or back, for the busiest rank.
    Tensor ranks have the same `tokens`, and each sends its part.
    """
    rows = tokens / mesh.tensor * (config.model.experts_per_token or 1)
    rows *= rank_load(config, mesh.expert_ranks)
    return rows * config.model.hidden_size * BYTES[precision_of(config.precision).format]


@lru_cache(maxsize=8)
def _expert_products(read: Anatomy) -> tuple[float, float, float]:
    """Return averages over the blocks: the weights of experts multiplied per token, the elements
    that these products read and write per token, and the weights of all experts.
    """
    matrices = [p for p in read.parameters if p.role is Role.expert and not p.is_bias]
    routed = {p.name: read.active_share(p) for p in matrices}
    count = len(read.blocks)
    return (
        sum(p.numel * routed[p.name] for p in matrices) / count,
        sum(sum(p.shape[-2:]) * p.shape[0] * routed[p.name] for p in matrices) / count,
        read.expert_parameters / count,
    )
