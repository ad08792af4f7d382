"""Small changes to a configuration: the keys they set, their reach, and their combinations."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import log2

from trainctl.config.schema import (
    Accelerator,
    CompileKind,
    CrossEntropyKind,
    OffloadDevice,
    RunConfig,
)
from trainctl.hardware import Hardware
from trainctl.options.activation_checkpointing import checkpointing_of, kinds_by_saved_activations
from trainctl.options.adapter import BaseWeights, low_rank
from trainctl.options.engine import engine_of
from trainctl.options.launcher import launcher_for
from trainctl.plans.derive import divisors
from trainctl.plans.trainable import is_partial
from trainctl.plans.types import Batch
from trainctl.tuning.speed import Values

FULL_NODE = 8
"""Devices per machine up to which more devices are suggested before more machines."""
MOST_DOUBLINGS = 3
"""Limit for doubling the devices, and for doubling the micro-batch."""

MOST_SIZES = 12
"""Limit of the micro-batch sizes to try; a billion has a hundred divisors."""


LONG_SEQUENCE = 65536
"""Tokens of a sequence on one rank above which tiled feed-forward layers are suggested."""

TILES = 16
"""Number of tiles suggested."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyChange:
    """Changed keys with their new values."""

    values: Values
    kinds: tuple[tuple[str, float], ...]
    """Changed dimensions with their reach. A change that reaches at least as far in all dimensions
    of another change only adds to it.
    """

    def only_adds_to(self, other: KeyChange) -> bool:
        """Return True if this change reaches at least as far in every dimension of `other`."""
        own = dict(self.kinds)
        return all(own.get(kind, 0) >= reach for kind, reach in other.kinds)

    @property
    def doublings(self) -> float:
        """Number of times that the devices are doubled."""
        return dict(self.kinds).get("devices", 0)


def _single_change(kind: str, reach: float, values: Values) -> KeyChange:
    return KeyChange(values=values, kinds=((kind, reach),))


NO_CHANGE = KeyChange(values={}, kinds=())


def _change_combinations(*dimensions: list[KeyChange]) -> Iterator[KeyChange]:
    """Yield every combination of at most one change per dimension, and at least one in all."""
    for parts in product(*([NO_CHANGE, *dimension] for dimension in dimensions)):
        kinds = tuple(kind for part in parts for kind in part.kinds)
        if kinds:
            yield KeyChange(
                values={k: v for part in parts for k, v in part.values.items()}, kinds=kinds
            )


def memory_saving_changes(
    config: RunConfig, hardware: Hardware, batch: Batch
) -> Iterator[KeyChange]:
    """Yield every combination of memory-saving changes with the same global batch.

    The dimensions are smaller micro-batches, recomputation, a chunked loss, tiled layers, higher
    ZeRO stages, offload, and more devices.
    """
    on_cpu = hardware.accelerator is Accelerator.cpu
    for doublings in range(1 if on_cpu else MOST_DOUBLINGS + 1):
        devices = _more_devices(config, hardware, doublings)
        batches = _smaller_batches(config, batch, doublings)
        if doublings and not batches:
            continue
        for change in _change_combinations(
            batches,
            _more_recomputation(config),
            _loss_in_chunks(config),
            _layers_in_tiles(config, batch),
            _higher_stages(config),
            [] if on_cpu else _more_offload(config),
        ):
            if not doublings:
                yield change
            elif "micro_batch" in dict(change.kinds) or "accumulation" in dict(change.kinds):
                yield KeyChange(
                    values={**devices.values, **change.values},
                    kinds=(*devices.kinds, *change.kinds),
                )


def adapter_changes(config: RunConfig, batch: Batch) -> Iterator[KeyChange]:
    """Yield LoRA on the initial weights, alone and with memory-saving changes on the same devices.

    An adapter learns something else than full training, so `memory_saving_changes` has none.
    Yields nothing without initial weights.
    """
    if config.model.initial_weights is None or is_partial(config) or not config.trains_itself:
        return
    yield from _with_memory_savings(
        _single_change("adapter", 1, {"adapter.kind": "lora"}), config, batch
    )


def quantized_base_changes(config: RunConfig, batch: Batch) -> Iterator[KeyChange]:
    """Yield an adapter with its base in 4 bits (QLoRA), alone and with memory-saving changes. A
    configured adapter is kept.
    """
    adapter = low_rank(config.adapter)
    if adapter is None:
        if config.model.initial_weights is None or is_partial(config):
            return
    elif adapter.is_quantized:
        return
    if not config.trains_itself:
        return
    values: dict[str, object] = {"adapter.base_weights": BaseWeights.nf4_double}
    if adapter is None:
        values = {"adapter.kind": "lora", **values}
    yield from _with_memory_savings(_single_change("base_weights", 1, values), config, batch)


def _with_memory_savings(first: KeyChange, config: RunConfig, batch: Batch) -> Iterator[KeyChange]:
    """Yield a change, alone and combined with memory-saving changes on the same devices."""
    yield first
    for change in _change_combinations(
        _smaller_batches(config, batch, 0),
        _more_recomputation(config),
        _loss_in_chunks(config),
        _higher_stages(config),
    ):
        yield KeyChange(
            values={**first.values, **change.values}, kinds=(*first.kinds, *change.kinds)
        )


def memory_using_changes(config: RunConfig, batch: Batch) -> Iterator[KeyChange]:
    """Yield every combination of memory-using changes with the same global batch.

    The dimensions are larger micro-batches, less recomputation, a plain loss, lower ZeRO stages,
    and less offload.
    """
    yield from _change_combinations(
        _larger_batches(config, batch),
        _less_recomputation(config),
        _plain_loss(config),
        _lower_stages(config),
        _less_offload(config),
    )


def _batch_values(config: RunConfig, micro: int, accumulation: int) -> Values:
    """Return the batch keys of a change; a global batch in tokens derives the accumulation."""
    values: dict[str, object] = {"training.micro_batch_size": micro}
    if config.training.global_batch_tokens is None:
        values["training.gradient_accumulation_steps"] = accumulation
    return values


def _smaller_batches(config: RunConfig, batch: Batch, doublings: int) -> list[KeyChange]:
    """Return changes to smaller micro-batches on 2**`doublings` times as many devices. With more
    devices, the present micro-batch is included.
    """
    micro, accumulation = batch.micro_batch_size, batch.gradient_accumulation_steps
    changes = []
    for smaller in _select_sizes(divisors(micro)):
        steps, rest = divmod(accumulation * (micro // smaller), 2**doublings)
        if rest or not steps or (smaller == micro and not doublings):
            continue
        kind, reach = ("micro_batch", log2(micro // smaller))
        if smaller == micro:
            kind, reach = "accumulation", 0.0
        changes.append(_single_change(kind, reach, _batch_values(config, smaller, steps)))
    return changes


def _select_sizes(sizes: list[int]) -> list[int]:
    """Return at most `MOST_SIZES` of ascending sizes, the largest first, always with both ends."""
    if len(sizes) > MOST_SIZES:
        last = len(sizes) - 1
        sizes = [sizes[round(k * last / (MOST_SIZES - 1))] for k in range(MOST_SIZES)]
    return sizes[::-1]


def _larger_batches(config: RunConfig, batch: Batch) -> list[KeyChange]:
    micro, accumulation = batch.micro_batch_size, batch.gradient_accumulation_steps
    return [
        _single_change("micro_batch", n, _batch_values(config, micro * 2**n, accumulation // 2**n))
        for n in range(1, MOST_DOUBLINGS + 1)
        if accumulation % 2**n == 0
    ]


def _more_devices(config: RunConfig, hardware: Hardware, doublings: int) -> KeyChange:
    """Return a change to more devices per machine up to `FULL_NODE`, then to more machines."""
    if not doublings:
        return NO_CHANGE
    nodes, devices = hardware.nodes, hardware.devices_per_node
    values: dict[str, object] = {}
    for _ in range(doublings):
        if nodes == 1 and devices * 2 <= FULL_NODE:
            devices *= 2
        else:
            nodes *= 2
    if devices != hardware.devices_per_node:
        values["hardware.devices_per_node"] = devices
    if nodes != hardware.nodes:
        values["hardware.nodes"] = nodes
        values |= launcher_for(config.launcher, nodes)
    return _single_change("devices", doublings, values)


def _more_recomputation(config: RunConfig) -> list[KeyChange]:
    kinds = kinds_by_saved_activations()
    least = kinds[: kinds.index(checkpointing_of(config.activation_checkpointing))]
    furthest = sum(kind.recomputes for kind in kinds)
    return [
        _single_change(
            "recomputation", furthest - place, {"activation_checkpointing.mode": kind.name}
        )
        for place, kind in reversed([*enumerate(least)])
    ]


def _less_recomputation(config: RunConfig) -> list[KeyChange]:
    kinds = kinds_by_saved_activations()
    more = kinds[kinds.index(checkpointing_of(config.activation_checkpointing)) + 1 :]
    return [
        _single_change("recomputation", reach, {"activation_checkpointing.mode": kind.name})
        for reach, kind in enumerate(more, 1)
    ]


def _loss_in_chunks(config: RunConfig) -> list[KeyChange]:
    kernels = config.kernels
    if not kernels.has_all_logits or config.parallelism.pipeline > 1 or not config.trains_itself:
        return []
    if kernels.compile is CompileKind.deepcompile:
        return []
    return [_single_change("loss", 1, {"kernels.cross_entropy": CrossEntropyKind.chunked})]


def _layers_in_tiles(config: RunConfig, batch: Batch) -> list[KeyChange]:
    """Return the change to tiled feed-forward layers for long sequences, where a single sequence
    may be too large a micro-batch. For shorter sequences, smaller micro-batches do the same.
    """
    tokens = batch.sequence_length // config.parallelism.sequence_parts
    if config.kernels.mlp_tiles > 1 or tokens < LONG_SEQUENCE or not config.trains_itself:
        return []
    return [_single_change("tiles", 1, {"kernels.mlp_tiles": TILES})]


def _plain_loss(config: RunConfig) -> list[KeyChange]:
    if config.kernels.cross_entropy is not CrossEntropyKind.chunked:
        return []
    return [_single_change("loss", 1, {"kernels.cross_entropy": CrossEntropyKind.plain})]


def _higher_stages(config: RunConfig) -> list[KeyChange]:
    """Return changes to higher ZeRO stages; stage 3 overlaps reduction at no cost in memory."""
    stage = config.zero_stage.stage
    changes = []
    for higher in range(stage + 1, 4):
        values: dict[str, object] = {"zero_stage.stage": higher}
        may_overlap = config.parallelism.pipeline == 1 and engine_of(config).takes_json
        if higher == 3 and may_overlap and not config.zero_stage.overlap_comm:
            values["zero_stage.overlap_comm"] = True
        changes.append(_single_change("stage", higher - stage, values))
    return changes


def _lower_stages(config: RunConfig) -> list[KeyChange]:
    stage = config.zero_stage.stage
    return [
        _single_change("stage", stage - lower, {"zero_stage.stage": lower})
        for lower in range(stage - 1, -1, -1)
    ]


def _more_offload(config: RunConfig) -> list[KeyChange]:
    """Return changes that offload the optimizer, and then also the parameters, to host memory."""
    values: dict[str, object] = {}
    changes = []
    for reach, name in enumerate(("optimizer", "parameters"), 1):
        if getattr(config.offload, name) is OffloadDevice.none:
            values[f"offload.{name}"] = OffloadDevice.cpu
            changes.append(_single_change("offload", reach, dict(values)))
    return changes


def _less_offload(config: RunConfig) -> list[KeyChange]:
    """Return changes that keep the parameters, and then also the optimizer, on the device."""
    values: dict[str, object] = {}
    changes = []
    for reach, name in enumerate(("parameters", "optimizer"), 1):
        if getattr(config.offload, name) is not OffloadDevice.none:
            values[f"offload.{name}"] = OffloadDevice.none
            changes.append(_single_change("offload", reach, dict(values)))
    return changes
