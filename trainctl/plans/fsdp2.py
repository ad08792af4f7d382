"""Settings of torch's `fully_shard`, as a flat list with their reasons.

`optimizer.params` holds the arguments of torch's optimizer class, which have the same names as in
DeepSpeed's JSON; trainctl's own optimizers are not listed.
"""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.derived import DerivedValue
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
    settings = (*_sharding_settings(config), *_optimizer_settings(config, hardware, batch))
    return tuple(
        DerivedValue(
            key=f"{PREFIX}.{item.key}", value=item.value, reason=item.reason, sources=item.sources
        )
        for item in settings
    )


def _sharding_settings(config: RunConfig) -> Iterator[DerivedValue]:
    stage, compute = config.zero_stage.stage, number_formats(config.precision).weights
    gradients = engine_of(config).gradients
    assert gradients is not None
    why = "gathered again for the backward pass" if stage == 3 else "kept until the backward pass"
    yield DerivedValue(
        key="reshard_after_forward",
        value=stage == 3,
        reason=f"zero_stage.stage={stage}: weights are {why}",
        sources=("zero_stage.stage",),
    )
    yield DerivedValue(
        key="param_dtype",
        value=compute.value,
        reason=f"precision.compute={config.precision.compute}: fp32 shards are cast when gathered",
        sources=("precision.compute",),
    )
    yield DerivedValue(
        key="reduce_dtype", value=gradients.value, reason="whatever the weights are computed in"
    )
    yield DerivedValue(
        key="offload",
        value=config.offload.parameters is not OffloadDevice.none,
        reason="offload.parameters, with gradients and states",
        sources=("offload.parameters",),
    )
    yield DerivedValue(
        key="pin_memory",
        value=config.offload.pin_memory,
        reason="offload.pin_memory",
        sources=("offload.pin_memory",),
    )
    yield DerivedValue(
        key="reduce_every_micro_batch",
        value=config.engine.reduce_every_micro_batch,  # type: ignore[attr-defined]
        reason="engine.reduce_every_micro_batch",
        sources=("engine.reduce_every_micro_batch",),
    )


def _optimizer_settings(
    config: RunConfig, hardware: Hardware, batch: Batch | None
) -> Iterator[DerivedValue]:
    """Yield torch's optimizer class and its arguments."""
    spec = spec_of(config.optimizer)
    if optimizer_maker(config, hardware) is not Maker.torch or spec.deepspeed is None:
        return
    scale = 1.0 if batch is None else lr_scale(config.optimizer, batch)
    yield DerivedValue(
        key="optimizer.type",
        value=spec.deepspeed.type,
        reason=f"optimizer.kind={config.optimizer.kind}: torch's",
        sources=("optimizer.kind",),
    )
    for parameter in spec.deepspeed.parameters:
        yield optimizer_parameter(config, parameter, scale)
    yield DerivedValue(
        key="optimizer.params.fused",
        value=is_fused(config, hardware),
        reason="one kernel updates all, on accelerators",
        sources=("optimizer.fused",),
    )
