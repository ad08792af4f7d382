"""A model as its own code describes it, for budgets in place of what follows from its shape."""

from __future__ import annotations

from dataclasses import dataclass, fields

from trainctl.memory.activations import BlockActivations
from trainctl.plan.shapes import TensorShape


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """What a trace of the model found (`trainctl.train.trace`), on one rank without sharding.

    Attributes:
        tensors: Every parameter, tied ones once, by its canonical name.
        in_blocks: Names of those that belong to a decoder block.
        blocks: Number of decoder blocks.
        block: What one of them keeps, in bytes per token: the mean over the blocks.
        embedding: Elements of the token embedding.
        head: Elements of the output projection, tied or not.
    """

    tensors: tuple[TensorShape, ...]
    in_blocks: frozenset[str]
    blocks: int
    block: BlockActivations
    embedding: int
    head: int

    @property
    def parameters(self) -> int:
        return sum(tensor.numel for tensor in self.tensors)


def shared_over_tensor_ranks(
    block: BlockActivations, *, whole: BlockActivations, shard: BlockActivations
) -> BlockActivations:
    """A traced block on one of several tensor ranks: each part shrinks as its closed form does.

    Args:
        block: Traced, whole.
        whole: The closed form of a whole block.
        shard: The closed form of a tensor rank's share.
    """
    shares = {}
    for item in fields(BlockActivations):
        before, after = getattr(whole, item.name), getattr(shard, item.name)
        share = after / before if before else 1.0
        shares[item.name] = round(getattr(block, item.name) * share)
    return BlockActivations(**shares)
