"""A stage of which not all trains: which of its tensors do, and how far gradients flow.

Frozen weights are there in the type that the model computes with, and nothing else is there for
them: no gradient, no copy that the optimizer updates, no state of its. An adapter's tensors are as
any that train.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from trainctl.config.schema import RunConfig
from trainctl.memory.stages import Piece, Stage, share
from trainctl.memory.trainable import Learning, everything
from trainctl.options.adapter import low_rank
from trainctl.options.adapter import spec_of as adapter_of
from trainctl.options.model import spec_of
from trainctl.plan import shapes
from trainctl.plan.quantized import packed_size, quantized_layers
from trainctl.plan.shapes import TensorShape
from trainctl.plan.trainable import Trainable, block_numbers, is_partial, ties, trainable


def of_run(
    config: RunConfig, stages: tuple[Stage, ...], *, tensor: int = 1, keeps_inputs: bool = False
) -> tuple[Stage, ...]:
    """Stages of the model as a run trains them: with its adapter, and with what it freezes.

    Args:
        stages: As all of the model trains.
        keeps_inputs: Whether linear layers keep their inputs whatever learns.
    """
    if not is_partial(config):
        return stages
    key = _ByText(config)
    return tuple(_stage(key, stage, tensor, keeps_inputs) for stage in stages)


class _ByText:
    """A configuration as a key of a cache: two are equal where what decides what trains is.

    A search for what would fit asks hundreds of times, and has changed other keys.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._text = repr((config.model, config.adapter, config.training.freeze))

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ByText) and self._text == other._text


@lru_cache(maxsize=512)
def _stage(key: _ByText, stage: Stage, tensor: int, keeps_inputs: bool) -> Stage:
    """Return a stage as a run trains it."""
    found, blocks, trained = _tensors(key)
    learning = _learning(key, keeps_inputs)
    own = range(stage.first_block, stage.first_block + stage.blocks)
    prefix = f"{shapes.block_prefix(key.config.model)}."
    marked = (_marked(piece, own, prefix, trained) for piece in stage.pieces)
    packed = _packed(key)
    pieces = [_in_bytes(piece, own, prefix, packed) for pieces in marked for piece in pieces]
    pieces += _adapters(_added(found, blocks, own), own, prefix, tensor)
    live = Counter(learning[block] for block in own if block in learning)
    return replace(stage, pieces=tuple(pieces), learning=tuple(live.items()))


@lru_cache(maxsize=8)
def _tensors(key: _ByText) -> tuple[Trainable, dict[str, int], frozenset[str]]:
    """What trains, the block of each parameter, and all names of those that train."""
    config = key.config
    found = trainable(config)
    trained = {item.name for item in found.trained}
    trained |= {alias for alias, name in ties(config.model) if name in trained}
    return found, block_numbers(config.model), frozenset(trained)


def _marked(piece: Piece, own: range, prefix: str, trained: frozenset[str]) -> Iterator[Piece]:
    """Yield a piece as it trains or does not; one that does in some blocks alone, block by
    block."""
    if not piece.in_block or shapes.block_of(piece.name) is not None or piece.count != len(own):
        yield replace(piece, trains=piece.name in trained)
        return
    names = [f"{prefix}{block}.{piece.name}" for block in own]
    trains = [name in trained for name in names]
    if len(set(trains)) == 1:
        yield replace(piece, trains=trains[0])
        return
    for name, does in zip(names, trains, strict=True):
        yield replace(piece, name=name, count=1, trains=does)


def _in_bytes(piece: Piece, own: range, prefix: str, packed: Mapping[str, int]) -> Piece:
    """Return a piece as it is where its matrices are in 8 or 4 bits: of bytes."""
    name = piece.name
    if piece.in_block and shapes.block_of(name) is None and own:
        name = f"{prefix}{own[0]}.{name}"  # as in the other blocks
    if name not in packed:
        return piece
    return replace(piece, numel=packed[name], element_bytes=1, expanded=piece.numel)


@lru_cache(maxsize=8)
def _packed(key: _ByText) -> dict[str, int]:
    """Return bytes of each matrix that is in 8 or 4 bits."""
    adapter = low_rank(key.config.adapter)
    return {
        name: packed_size(adapter.base_weights, layer.outputs, layer.inputs).total
        for name, layer in quantized_layers(key.config.model, adapter).items()
        if adapter is not None
    }


def _added(found: Trainable, blocks: Mapping[str, int], own: range) -> Iterator[TensorShape]:
    """Return an adapter's tensors in a stage's blocks."""
    adapted = {layer.name for layer in found.adapted if blocks[f"{layer.name}.weight"] in own}
    return (item for item in found.trained if item.name.rpartition(".")[0] in adapted)


def _adapters(
    added: Iterable[TensorShape], own: range, prefix: str, tensor: int
) -> Iterator[Piece]:
    """Pieces of an adapter: those that all blocks have alike together, as a model's own."""
    alike: dict[tuple[str, tuple[int, ...], bool], list[TensorShape]] = {}
    for item in added:
        inside = item.name.removeprefix(f"{prefix}{shapes.block_of(item.name)}.")
        alike.setdefault((inside, item.shape, item.sharded), []).append(item)
    for (inside, shape, sharded), items in alike.items():
        together = len(items) == len(own)
        for name in [inside] if together else [item.name for item in items]:
            yield Piece(
                numel=share(items[0].numel, tensor) if sharded else items[0].numel,
                count=len(items) if together else 1,
                is_matrix=len(shape) > 1,
                in_block=True,
                embedding=False,
                factors=sum(shape),
                name=name,
            )


@lru_cache(maxsize=16)
def _learning(key: _ByText, keeps_inputs: bool) -> dict[int, Learning]:
    """What learns in each block that gradients reach: from the first with something that trains, or
    from the embedding if that does.

    Where layers are not called as in the closed form, all are taken to keep their inputs.
    """
    config, (found, blocks, _) = key.config, _tensors(key)
    adapter, prefix = low_rank(config.adapter), shapes.block_prefix(config.model)
    weights: dict[int, set[str]] = {block: set() for block in range(config.model.num_layers)}
    ranks: dict[int, list[tuple[str, int]]] = {block: [] for block in weights}
    for item in found.trained:
        if item.name in blocks:
            block = blocks[item.name]
            weights[block].add(item.name.removeprefix(f"{prefix}.{block}."))
    for layer in found.adapted:
        block = blocks[f"{layer.name}.weight"]
        name = layer.name.removeprefix(f"{prefix}.{block}.")
        ranks[block].append((name, adapter.rank if adapter is not None else 0))
    frozen = {blocks[item.name] for item in found.frozen if item.name in blocks}
    busy = [block for block in weights if weights[block] or ranks[block]]
    has_embedding = any(item.embedding for item in found.trained)
    first = 0 if has_embedding else min(busy, default=config.model.num_layers)
    whole = everything(spec_of(config.model)).weights
    spec = adapter_of(config.adapter)
    adapted = {f"{name}.weight" for each in ranks.values() for name, _ in each}
    # A layer that expands its matrix keeps none of its inputs, at any stage.
    keeps_inputs &= not _packed(key)
    keeps_inputs |= not adapted <= whole
    return {
        block: Learning(
            weights=frozenset(weights[block]) if block in frozen else whole,
            ranks=tuple(ranks[block]),
            dropout=adapter is not None and adapter.dropout > 0,
            magnitudes=adapter is not None and spec.has_magnitude,
            begins=block == first and not has_embedding,
            keeps_inputs=keeps_inputs,
        )
        for block in range(first, config.model.num_layers)
    }
