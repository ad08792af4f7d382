"""Choice of the engine that runs the steps."""

from __future__ import annotations

from trainctl.config.registry import function_of
from trainctl.engines.protocol import Room
from trainctl.plan.types import RunPlan


def engine_room(plan: RunPlan) -> Room:
    """Return the entry point of the engine that a plan names, importing its package.

    Raises:
        TrainctlError: The package of the engine, or one that it needs, is not installed here.
    """
    room: Room = function_of("engine", plan.engine)()
    return room
