"""Blocks of the pipeline stages: the chain of embedding, blocks and head, cut in pieces."""

from __future__ import annotations

from collections.abc import Sequence

from trainctl.config.schema import ModelConfig, ParallelismConfig, PipelinePartition
from trainctl.plan import shapes


def blocks_of_stages(
    model: ModelConfig, parallelism: ParallelismConfig, *, sequence_length: int
) -> tuple[int, ...]:
    """Return the number of blocks of each pipeline stage, at least one each.

    `parallelism.stage_blocks` is used if it is set. Otherwise the heaviest stage is made as light
    as possible, as in `partition_balanced` of deepspeed/runtime/utils.py; among equal cuts, the one
    with most blocks on the early stages. With fewer blocks than stages, which a rule refuses, some
    stages have none. The time of attention depends on `sequence_length`.
    """
    if parallelism.stage_blocks:
        return tuple(parallelism.stage_blocks)
    layers, stages = model.num_layers, parallelism.pipeline
    uniform = parallelism.pipeline_partition is PipelinePartition.uniform
    if uniform or stages == 1 or layers < stages:
        return tuple((layers + stages - 1 - stage) // stages for stage in range(stages))
    if parallelism.pipeline_partition is PipelinePartition.parameters:
        first, block, last = _parameters(model)
    else:
        first, block, last = _time(model, sequence_length)
    fixed = [0] * stages
    fixed[0] += first
    fixed[-1] += last
    return balanced(layers, fixed, max(1, block))


def balanced(layers: int, fixed: Sequence[int], block: int) -> tuple[int, ...]:
    """Return the number of blocks of each stage, at least one, so that the heaviest is lightest.

    `layers` is the total number of blocks, at least the number of stages. `fixed` is the weight of
    each stage without blocks. `block` is the weight of a block, above 0.
    """
    low = max(max(fixed) + block, -(-(sum(fixed) + layers * block) // len(fixed)))
    high = max(fixed) + layers * block
    while low < high:
        limit = (low + high) // 2
        if sum((limit - load) // block for load in fixed) >= layers:
            high = limit
        else:
            low = limit + 1
    counts: list[int] = []
    for stage, load in enumerate(fixed):
        later = len(fixed) - stage - 1  # each later stage needs at least one block
        counts.append(min((low - load) // block, layers - sum(counts) - later))
    return tuple(counts)


def _parameters(model: ModelConfig) -> tuple[int, int, int]:
    """Return the parameters before the blocks, of one block, and after the blocks."""
    count, read = shapes.count_parameters(model), shapes.anatomy(model)
    head = shapes.head_tensor(model).numel if read is None else read.head
    return count.embeddings, count.block, count.final_norm + head


def _time(model: ModelConfig, sequence_length: int) -> tuple[int, int, int]:
    """Return the multiply-adds per token before the blocks, in one block, and after the blocks.

    A matrix takes one per element. Attention takes two per element of a query and each earlier key,
    on average half the sequence (arXiv:2001.08361, section 2.1).
    """
    read = shapes.anatomy(model)
    if read is not None:
        inside = read.multiplied - read.head + read.attention_products(sequence_length) // 2
        return 0, inside // len(read.blocks), read.head
    matrices = sum(t.numel for t in shapes.block_tensors(model) if t.is_matrix)
    attention = model.num_attention_heads * shapes.head_dim(model) * sequence_length
    return 0, matrices + attention, shapes.head_tensor(model).numel
