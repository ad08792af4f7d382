"""Variants of a configuration: some keys changed, timed before anything is checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from trainctl.config.keys import as_written
from trainctl.config.registry import changed_section
from trainctl.config.schema import RunConfig
from trainctl.hardware import Hardware
from trainctl.plan.derive import derive_batch, derive_mesh
from trainctl.plan.stages import blocks_of_stages
from trainctl.plan.types import LayoutPlan
from trainctl.search.speed import StepTime, step_time

Values = Mapping[str, Any]
"""Dotted keys and their new values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedVariant:
    """Variant with its speed; neither its legality nor its memory is checked yet."""

    sketch: LayoutPlan
    """Input of the step-time model and the device budget."""
    time: StepTime
    """Predicted time of an optimizer step."""

    @property
    def seconds_per_token(self) -> float:
        """Seconds per token of all devices together; comparable between different batch sizes."""
        return self.time.seconds / self.sketch.batch.tokens_per_step


def with_values(config: RunConfig, values: Values) -> RunConfig:
    """Return the configuration with some keys changed; unchanged sections are shared."""
    by_section: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        section, name = key.split(".")
        by_section.setdefault(section, {})[name] = value
    changed = {
        name: changed_section(getattr(config, name), **new) for name, new in by_section.items()
    }
    return replace(config, **changed)


def timed(
    config: RunConfig, hardware: Hardware, stage_blocks: tuple[int, ...] = ()
) -> TimedVariant | None:
    """Return the timed configuration; None if its mesh or batch is impossible.

    `stage_blocks` is the number of blocks of each pipeline stage, if known already.
    """
    mesh, _ = derive_mesh(config.parallelism, hardware)
    batch, _ = derive_batch(config.training, mesh.data) if mesh else (None, ())
    if mesh is None or batch is None:
        return None
    if batch.micro_batch_size < 1 or batch.gradient_accumulation_steps < 1:
        return None
    blocks = stage_blocks or blocks_of_stages(
        config.model, config.parallelism, sequence_length=batch.sequence_length
    )
    sketch = LayoutPlan(
        config=config, hardware=hardware, mesh=mesh, batch=batch, stage_blocks=blocks
    )
    return TimedVariant(sketch=sketch, time=step_time(sketch))


def overrides(values: Values) -> tuple[str, ...]:
    """Return the values as command-line overrides."""
    return tuple(f"{key}={as_written(value)}" for key, value in values.items())
