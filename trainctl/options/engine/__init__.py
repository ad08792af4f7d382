"""What an engine says of itself: what makes the steps of a run, with what settings, within what.

`build` gives the `trainctl.engines.protocol.Room`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from trainctl.config.registry import Spec, load
from trainctl.config.schema import DataType, EngineConfig, RunConfig
from trainctl.options.optimizer import Maker


@dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A key that an engine has for some values only."""

    key: str
    holds: Callable[[RunConfig], bool]
    """Whether a configuration keeps within."""
    why: str
    """Why not otherwise: a sentence without its subject, the engine."""
    nearest: str
    """What to type instead."""


@dataclass(frozen=True, kw_only=True)
class EngineSpec(Spec):
    """What makes the steps of a run."""

    keys: type = EngineConfig
    settings: str = ""
    """`module:function` of the settings that a plan has for it, as
    `trainctl.plan.deepspeed.derived_settings`; empty for none."""
    takes_json: bool = False
    """Whether these are DeepSpeed's JSON, and what is known of that holds for it."""
    phases: str = "trainctl.memory.phases:phases"
    """`module:function` of the memory of a rank, as `trainctl.memory.phases.phases`."""
    offloaded: str = "trainctl.memory.host:offloaded"
    """The same of what a rank has in host memory, as `trainctl.memory.host.offloaded`."""
    makers: tuple[Maker, ...] = (Maker.torch, Maker.trainctl)
    """Whose optimizers it can step."""
    gradients: DataType | None = None
    """Format in which gradients are added up and sent, whatever the weights' is; None is what
    `precision` says."""
    limits: tuple[Limit, ...] = ()
    """What it does not have, or not with everything."""


def engine_of(config: RunConfig) -> EngineSpec:
    """Of the kind that a configuration has.

    Raises:
        TrainctlError: A package that brings it is not installed here.
    """
    spec = load("engine", config.engine.kind)
    assert isinstance(spec, EngineSpec)
    return spec
