"""A model as its own code describes it, for budgets in place of what follows from its shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

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

    def to_json(self) -> dict[str, Any]:
        """As another process reads it."""
        return {
            "tensors": [[t.name, list(t.shape), t.embedding] for t in self.tensors],
            "in_blocks": sorted(self.in_blocks),
            "blocks": self.blocks,
            "block": asdict(self.block),
            "embedding": self.embedding,
            "head": self.head,
        }

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> TracedModel:
        """What `to_json` gave."""
        return cls(
            tensors=tuple(
                TensorShape(name=name, shape=tuple(shape), sharded=False, embedding=embedding)
                for name, shape, embedding in content["tensors"]
            ),
            in_blocks=frozenset(content["in_blocks"]),
            blocks=content["blocks"],
            block=BlockActivations(**content["block"]),
            embedding=content["embedding"],
            head=content["head"],
        )


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
