"""Parameter groups of the optimizer on one rank of a pipeline stage: `plan.groups`, by elements.

DeepSpeed keeps a buffer and makes an update for each group, so the peak depends on their number.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from trainctl.config.schema import RunConfig
from trainctl.memory.stages import Piece, Stage
from trainctl.plan import groups, shapes


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Parameter group of a pipeline stage, unpartitioned."""

    elements: int
    """Elements of all tensors on this rank after tensor parallelism; with ZeRO, on all ZeRO
    ranks.
    """
    largest: int
    """Elements of the largest tensor."""
    uses_muon: bool = False
    """Whether Muon updates the group."""


def groups_of(config: RunConfig, stage: Stage) -> tuple[Group, ...]:
    """Return the parameter groups of a stage, in the order of its tensors."""
    found: dict[tuple[groups.GroupKey, int], Group] = {}
    for piece, count, key in _keys(config, stage):
        # Experts sharded over the expert axis are separate groups.
        before = found.get((key, piece.spread), Group(elements=0, largest=0))
        numel = piece.numel * (piece.spread if config.zero_stage.stage else 1)
        found[key, piece.spread] = Group(
            elements=before.elements + count * numel,
            largest=max(before.largest, piece.numel),
            uses_muon=key.uses_muon,
        )
    return tuple(found.values())


def _keys(config: RunConfig, stage: Stage) -> Iterator[tuple[Piece, int, groups.GroupKey]]:
    """Yield each piece with its number of tensors in a group and the key of the group."""
    optimizer = config.optimizer
    blocks = range(stage.first_block, stage.first_block + max(stage.blocks, 1))
    if not optimizer.groups and optimizer.layer_lr_decay == 1:
        blocks = blocks[:1]  # all blocks have the same groups
    prefix = shapes.block_prefix(config.model)
    known: dict[tuple[int | str, bool], groups.GroupKey] = {}
    for piece in stage.pieces:
        shape = (1, 1) if piece.is_matrix else (1,)  # only the number of dimensions matters
        names: dict[int | str, str] = {piece.name: piece.name}
        is_of_each_block = piece.in_block and piece.count == stage.blocks
        if is_of_each_block and shapes.block_of(piece.name) is None:
            names = {block: f"{prefix}.{block}.{piece.name}" for block in blocks}
        for block, name in names.items():
            # Without patterns on names, tensors of a block differ by their kind alone.
            told_by = (name if optimizer.groups else block, piece.is_matrix)
            if told_by not in known:
                known[told_by] = groups.group_of(config, name, shape, embedding=piece.embedding)
            yield piece, piece.count // len(names), known[told_by]
