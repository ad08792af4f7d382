"""What a config asks for that training does not do yet, although it plans and budgets it."""

from __future__ import annotations

from collections.abc import Iterator

from trainctl.config.schema import (
    OnBadLoss,
    OptimizerKind,
    RunConfig,
    ScheduleKind,
)

TRAINABLE_OPTIMIZERS = (OptimizerKind.adamw,)
TRAINABLE_SCHEDULES = (ScheduleKind.constant, ScheduleKind.linear, ScheduleKind.cosine)


def not_yet(config: RunConfig) -> tuple[str, ...]:
    """One sentence for each technique that `launch` has to refuse today; it names the key."""
    return tuple(
        f"{key}={value}: training with {technique} is not there yet"
        for key, value, technique in _wanted(config)
    )


def _wanted(config: RunConfig) -> Iterator[tuple[str, object, str]]:
    """Key, value and name of each technique that the config uses and training lacks."""
    if not config.trains_itself:
        return
    yield from _model_and_optimizer(config)
    yield from _layout(config)
    yield from _run(config)


def _model_and_optimizer(config: RunConfig) -> Iterator[tuple[str, object, str]]:
    if config.model.mup:
        yield "model.mup", "true", "maximal-update parametrisation"
    if config.model.trust_remote_code:
        yield "model.trust_remote_code", "true", "a model's own code"
    if config.optimizer.kind not in TRAINABLE_OPTIMIZERS:
        name = config.optimizer.kind.value
        yield "optimizer.kind", name, f"the {name} optimizer"
    if config.schedule.kind not in TRAINABLE_SCHEDULES:
        name = config.schedule.kind.value
        yield "schedule.kind", name, f"the {name} schedule"


def _layout(config: RunConfig) -> Iterator[tuple[str, object, str]]:
    parallelism = config.parallelism
    for axis in ("expert",):
        size = getattr(parallelism, axis)
        if size > 1:
            yield f"parallelism.{axis}", size, f"{axis} parallelism"


def _run(config: RunConfig) -> Iterator[tuple[str, object, str]]:
    stability = config.stability
    if stability.on_bad_loss is not OnBadLoss.stop:
        name = stability.on_bad_loss.value
        yield "stability.on_bad_loss", name, f"{name} after a bad loss"
    if stability.spike_factor is not None:
        yield "stability.spike_factor", stability.spike_factor, "detection of loss spikes"
    if stability.z_loss > 0:
        yield "stability.z_loss", stability.z_loss, "z-loss"
