"""A model as its own code describes it, for budgets in place of what follows from its shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from trainctl.config.anatomy import Anatomy, anatomy_of
from trainctl.memory.activations import BlockActivations


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """What a trace of the model found (`trainctl.train.trace`), on one rank without sharding.

    Attributes:
        anatomy: What it is made of.
        block: What one of its blocks keeps, in bytes per token: the mean over the blocks.
    """

    anatomy: Anatomy
    block: BlockActivations

    def to_json(self) -> dict[str, Any]:
        """As another process reads it."""
        return {"anatomy": self.anatomy.to_table(), "block": asdict(self.block)}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> TracedModel:
        """What `to_json` gave."""
        return cls(
            anatomy=anatomy_of(content["anatomy"]), block=BlockActivations(**content["block"])
        )
