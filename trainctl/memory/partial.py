"""Pipeline stages of a partly frozen model: which tensors train, and how far gradients flow.

A frozen weight exists only in the compute type: it has no gradient, no master copy and no
optimizer state. An adapter's tensors are ordinary trained tensors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

from trainctl.config.schema import RunConfig
from trainctl.memory.activations import TrainableBlock, fully_trained_block
from trainctl.memory.stages import Piece, Stage, elements_per_rank
from trainctl.options.adapter import low_rank
from trainctl.options.adapter import spec_of as adapter_of
from trainctl.options.model import spec_of
from trainctl.plans import shapes
from trainctl.plans.shapes import TensorShape
from trainctl.plans.trainable import (
    Trainable,
    block_numbers,
    is_partial,
    packed_size,
    quantized_layers,
    tied_parameters,
    trainable,
)


def trained_stages(
    config: RunConfig, stages: tuple[Stage, ...], *, tensor: int = 1, keeps_inputs: bool = False
) -> tuple[Stage, ...]:
    """Return the stages as the run trains them: with its adapter, and with its frozen weights.

    `stages` describe the fully trained model. With `keeps_inputs`, linear layers keep their inputs
    even where nothing is trained.
    """
    if not is_partial(config):
        return stages
    key = _TrainableKey(config)
    return tuple(_trained_stage(key, stage, tensor, keeps_inputs) for stage in stages)


class _TrainableKey:
    """Configuration as a cache key: equal if the keys that decide what trains are equal.

    A search over plans asks hundreds of times while changing other keys.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self._text = repr((config.model, config.adapter, config.training.freeze))

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TrainableKey) and self._text == other._text


@lru_cache(maxsize=512)
def _trained_stage(key: _TrainableKey, stage: Stage, tensor: int, keeps_inputs: bool) -> Stage:
    """Return a stage as the run trains it."""
    found, blocks, trained = _trained_tensors(key)
    learning = _trainable_blocks(key, keeps_inputs)
    own = range(stage.first_block, stage.first_block + stage.blocks)
    prefix = f"{shapes.block_prefix(key.config.model)}."
    marked = (_mark_trained(piece, own, prefix, trained) for piece in stage.pieces)
    packed = _packed_matrix_bytes(key)
    pieces = [_quantized_piece(piece, own, prefix, packed) for pieces in marked for piece in pieces]
    pieces += _adapter_pieces(_adapter_tensors(found, blocks, own), own, prefix, tensor)
    live = Counter(learning[block] for block in own if block in learning)
    return replace(stage, pieces=tuple(pieces), learning=tuple(live.items()))


@lru_cache(maxsize=8)
def _trained_tensors(key: _TrainableKey) -> tuple[Trainable, dict[str, int], frozenset[str]]:
    """Return what trains, the block index of each parameter, and all names of trained
    parameters.
    """
    config = key.config
    found = trainable(config)
    trained = {item.name for item in found.trained}
    trained |= {alias for alias, name in tied_parameters(config.model) if name in trained}
    return found, block_numbers(config.model), frozenset(trained)


def _mark_trained(
    piece: Piece, own: range, prefix: str, trained: frozenset[str]
) -> Iterator[Piece]:
    """Yield the piece marked as trained or frozen; one piece per block if the blocks differ."""
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


def _quantized_piece(piece: Piece, own: range, prefix: str, packed: Mapping[str, int]) -> Piece:
    """Return the piece in bytes if its matrix is quantized to 8 or 4 bits, otherwise unchanged."""
    name = piece.name
    if piece.in_block and shapes.block_of(name) is None and own:
        name = f"{prefix}{own[0]}.{name}"  # the other blocks are alike
    if name not in packed:
        return piece
    return replace(piece, numel=packed[name], element_bytes=1, expanded=piece.numel)


@lru_cache(maxsize=8)
def _packed_matrix_bytes(key: _TrainableKey) -> dict[str, int]:
    """Return the size in bytes of each matrix quantized to 8 or 4 bits."""
    adapter = low_rank(key.config.adapter)
    return {
        name: packed_size(adapter.base_weights, layer.outputs, layer.inputs).total
        for name, layer in quantized_layers(key.config.model, adapter).items()
        if adapter is not None
    }


def _adapter_tensors(
    found: Trainable, blocks: Mapping[str, int], own: range
) -> Iterator[TensorShape]:
    """Return the adapter's tensors in the stage's own blocks."""
    adapted = {layer.name for layer in found.adapted if blocks[f"{layer.name}.weight"] in own}
    return (item for item in found.trained if item.name.rpartition(".")[0] in adapted)


def _adapter_pieces(
    added: Iterable[TensorShape], own: range, prefix: str, tensor: int
) -> Iterator[Piece]:
    """Yield the pieces of an adapter; tensors that all blocks have alike are one piece."""
    alike: dict[tuple[str, tuple[int, ...], bool], list[TensorShape]] = {}
    for item in added:
        inside = item.name.removeprefix(f"{prefix}{shapes.block_of(item.name)}.")
        alike.setdefault((inside, item.shape, item.sharded), []).append(item)
    for (inside, shape, sharded), items in alike.items():
        together = len(items) == len(own)
        for name in [inside] if together else [item.name for item in items]:
            yield Piece(
                numel=elements_per_rank(items[0].numel, tensor) if sharded else items[0].numel,
                count=len(items) if together else 1,
                is_matrix=len(shape) > 1,
                in_block=True,
                embedding=False,
                factors=sum(shape),
                name=name,
            )


@lru_cache(maxsize=16)
def _trainable_blocks(key: _TrainableKey, keeps_inputs: bool) -> dict[int, TrainableBlock]:
    """Return the trained parts of each block that gradients reach, by block index.

    Gradients reach every block from the first one with a trained tensor, or all blocks if the
    embedding is trained. If an adapter is on layers that the closed form does not know, all layers
    are assumed to keep their inputs.
    """
    config, (found, blocks, _) = key.config, _trained_tensors(key)
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
    whole = fully_trained_block(spec_of(config.model)).weights
    spec = adapter_of(config.adapter)
    adapted = {f"{name}.weight" for each in ranks.values() for name, _ in each}
    # A layer that expands a quantized matrix never keeps its input, at any ZeRO stage.
    keeps_inputs &= not _packed_matrix_bytes(key)
    keeps_inputs |= not adapted <= whole
    return {
        block: TrainableBlock(
            weights=frozenset(weights[block]) if block in frozen else whole,
            ranks=tuple(ranks[block]),
            dropout=adapter is not None and adapter.dropout > 0,
            magnitudes=adapter is not None and spec.has_magnitude,
            begins=block == first and not has_embedding,
            keeps_inputs=keeps_inputs,
        )
        for block in range(first, config.model.num_layers)
    }
