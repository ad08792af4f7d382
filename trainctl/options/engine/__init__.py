"""Specification of an engine, which runs a run's steps: its settings and its limits.

`build` makes the `trainctl.engines.protocol.EngineBackend`.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.registry import Spec, load_spec
from trainctl.config.schema import DataType, EngineConfig, RunConfig
from trainctl.options.limits import Limit as Limit
from trainctl.options.optimizer import Maker


@dataclass(frozen=True, kw_only=True)
class EngineSpec(Spec):
    """Specification of one engine."""

    keys: type = EngineConfig
    settings: str = ""
    """`module:function` that derives the engine's settings in a plan, like
    `trainctl.plans.deepspeed.derived_settings`; empty for none.
    """
    takes_json: bool = False
    """Whether the settings are DeepSpeed's JSON, so that the checks of that JSON apply."""
    phases: str = "trainctl.memory.phases:phases"
    """`module:function` that predicts a rank's device memory, like
    `trainctl.memory.phases.phases`.
    """
    offloaded: str = "trainctl.memory.host:offloaded_components"
    """`module:function` that predicts a rank's host memory.

    Its model is `trainctl.memory.host.offloaded_components`.
    """
    makers: tuple[Maker, ...] = (Maker.torch, Maker.trainctl)
    """Makers of the optimizers that the engine can step."""
    gradients: DataType | None = None
    """Format in which gradients are accumulated and reduced, whatever the weights' format; None if
    `precision` decides.
    """
    limits: tuple[Limit, ...] = ()
    """Settings that the engine does not support, alone or with others."""


def engine_of(config: RunConfig) -> EngineSpec:
    """Return the specification of the configured engine.

    Raises:
        TrainctlError: The package that provides it is not installed here.
    """
    spec = load_spec("engine", config.engine.kind)
    assert isinstance(spec, EngineSpec)
    return spec
