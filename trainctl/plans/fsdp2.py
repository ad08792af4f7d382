"""Settings of torch's `fully_shard`, as a flat list with their reasons.

`optimizer.params` holds the arguments of torch's optimizer class, which have the same names as in
DeepSpeed's JSON; trainctl's own optimizers are not listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from trainctl.config.derived import DerivedValue, derived
from trainctl.config.schema import OffloadDevice, RunConfig
from trainctl.hardware import Hardware
from trainctl.options.engine import engine_of
from trainctl.options.optimizer import Maker, spec_of
from trainctl.plans.deepspeed import optimizer_parameter
from trainctl.plans.optimizers import is_fused, lr_scale, optimizer_maker
from trainctl.plans.settings import number_formats
from trainctl.plans.types import Batch, Mesh

PREFIX = "fsdp2"


def derived_settings(
    config: RunConfig, hardware: Hardware, mesh: Mesh | None, batch: Batch | None
) -> tuple[DerivedValue, ...]:
    """Return every setting of the engine, like `trainctl.plans.deepspeed.derived_settings`."""
    settings = (*_sharding_settings(config, mesh), *_optimizer_settings(config, hardware, batch))
    return tuple(replace(item, key=f"{PREFIX}.{item.key}") for item in settings)


def _sharding_settings(config: RunConfig, mesh: Mesh | None) -> Iterator[DerivedValue]:
    stage, compute = config.zero_stage.stage, number_formats(config.precision).weights
    gradients = engine_of(config).gradients
    assert gradients is not None
    why = "gathered again for the backward pass" if stage == 3 else "kept until the backward pass"
    why = f"zero_stage.stage={stage}: weights are {why}"
    yield derived("reshard_after_forward", stage == 3, "zero_stage.stage", why=why)
    size = config.zero_stage.shard_group_size
    if size is not None and mesh is not None:
        why = f"{mesh.data // size} groups of neighbours, each with all shards (HSDP)"
        yield derived("shard_group_size", size, "zero_stage.shard_group_size", why=why)
    why = f"precision.compute={config.precision.compute}: fp32 shards are cast when gathered"
    yield derived("param_dtype", compute.value, "precision.compute", why=why)
    yield derived("reduce_dtype", gradients.value, why="whatever the weights are computed in")
    is_away = config.offload.parameters is not OffloadDevice.none
    why = "offload.parameters, with gradients and states"
    yield derived("offload", is_away, "offload.parameters", why=why)
    yield derived("pin_memory", config.offload.pin_memory, "offload.pin_memory")
    each_time = config.engine.reduce_every_micro_batch  # type: ignore[attr-defined]
    yield derived("reduce_every_micro_batch", each_time, "engine.reduce_every_micro_batch")


def _optimizer_settings(
    config: RunConfig, hardware: Hardware, batch: Batch | None
) -> Iterator[DerivedValue]:
    """Yield torch's optimizer class and its arguments."""
    spec = spec_of(config.optimizer)
    if optimizer_maker(config, hardware) is not Maker.torch or spec.deepspeed is None:
        return
    scale = 1.0 if batch is None else lr_scale(config.optimizer, batch)
    why = f"optimizer.kind={config.optimizer.kind}: torch's"
    yield derived("optimizer.type", spec.deepspeed.type, "optimizer.kind", why=why)
    for parameter in spec.deepspeed.parameters:
        yield optimizer_parameter(config, parameter, scale)
    why = "one kernel updates all, on accelerators"
    yield derived("optimizer.params.fused", is_fused(config, hardware), "optimizer.fused", why=why)
