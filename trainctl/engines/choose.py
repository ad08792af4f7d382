"""Which engine makes a run's steps."""

from __future__ import annotations

from trainctl.config.registry import function_of
from trainctl.engines.protocol import Room
from trainctl.plan.types import RunPlan


def engine_room(plan: RunPlan) -> Room:
    """Return the engine that a plan names; its package is loaded now.

    Raises:
        TrainctlError: The package that brings it, or one that it needs, is not installed here.
    """
    room: Room = function_of("engine", plan.engine)()
    return room
