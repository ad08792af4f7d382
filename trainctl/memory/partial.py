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
from trainctl.memory.stages import Piece, Stage, elements_per_rank, tensor_parts
from trainctl.memory.traced import ConfigKey
from trainctl.options.adapter import low_rank
from trainctl.options.adapter import spec_of as adapter_of
from trainctl.options.model import spec_of
from trainctl.plans import shapes
from trainctl.plans.shapes import TensorShape
from trainctl.plans.trainable import (
    LORA_A,
    LORA_B,
    MAGNITUDE,
    Trainable,
    block_numbers,
    is_partial,
    packed_size,
    quantized_layers,
    tied_parameters,
    trainable,
)


def trained_stages(
    config: RunConfig,
    stages: tuple[Stage, ...],
    *,
    tensor: int = 1,
    expert: int = 1,
    keeps_inputs: bool = False,
) -> tuple[Stage, ...]:
    """Return the stages as the run trains them: with its adapter, and with its frozen weights.

    `stages` describe the fully trained model. With `keeps_inputs`, linear layers keep their inputs
    even where nothing is trained.
    """
    if not is_partial(config):
        return stages
    # A search over plans asks hundreds of times while changing other keys.
    key = ConfigKey(config, repr((config.model, config.adapter, config.training.freeze)))
    return tuple(_trained_stage(key, stage, tensor, expert, keeps_inputs) for stage in stages)


@lru_cache(maxsize=512)
def _trained_stage(
    key: ConfigKey, stage: Stage, tensor: int, expert: int, keeps_inputs: bool
) -> Stage:
    found, blocks, trained = _trained_tensors(key)
    learning = _trainable_blocks(key, keeps_inputs)
    own = range(stage.first_block, stage.first_block + stage.blocks)
    prefix = f"{shapes.block_prefix(key.config.model)}."
    marked = (_mark_trained(piece, own, prefix, trained) for piece in stage.pieces)
    packed = _packed_matrix_bytes(key)
    pieces = [_quantized_piece(piece, own, prefix, packed) for pieces in marked for piece in pieces]
    added = _adapter_tensors(found, blocks, own)
    pieces += _adapter_pieces(added, own, prefix, tensor=tensor, expert=expert)
    live = Counter(learning[block] for block in own if block in learning)
    return replace(stage, pieces=tuple(pieces), learning=tuple(live.items()))


@lru_cache(maxsize=8)
def _trained_tensors(key: ConfigKey) -> tuple[Trainable, dict[str, int], frozenset[str]]:
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
def _packed_matrix_bytes(key: ConfigKey) -> dict[str, int]:
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
    names = {
        layer.added_name(name)
        for layer in found.adapted
        if blocks[layer.weight] in own
        for name in (LORA_A, LORA_B, MAGNITUDE)
    }
    return (item for item in found.trained if item.name in names)


def _adapter_pieces(
    added: Iterable[TensorShape], own: range, prefix: str, *, tensor: int, expert: int
) -> Iterator[Piece]:
    """Yield the pieces of an adapter; tensors that all blocks have alike are one piece."""
    alike: dict[tuple[str, tuple[int, ...], int], list[TensorShape]] = {}
    for item in added:
        inside = item.name.removeprefix(f"{prefix}{shapes.block_of(item.name)}.")
        alike.setdefault((inside, item.shape, item.shares), []).append(item)
    for (inside, shape, shares), items in alike.items():
        together = len(items) == len(own)
        is_expert = len(shape) == 3
        spread = expert if is_expert else 1
        divides = tensor * spread if spread > 1 else tensor_parts(shares, tensor)
        for name in [inside] if together else [item.name for item in items]:
            yield Piece(
                numel=elements_per_rank(items[0].numel, divides),
                count=len(items) if together else 1,
                is_matrix=len(shape) > 1,
                in_block=True,
                embedding=False,
                factors=sum(shape),
                name=name,
                is_expert=is_expert,
                spread=spread,
            )


@lru_cache(maxsize=16)
def _trainable_blocks(key: ConfigKey, keeps_inputs: bool) -> dict[int, TrainableBlock]:
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
        block = blocks[layer.weight]
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
