"""Choice of the engine that runs the steps."""

from __future__ import annotations

from trainctl.config.registry import function_of
from trainctl.engines.protocol import EngineBackend
from trainctl.plan.types import RunPlan


def engine_backend(plan: RunPlan) -> EngineBackend:
    """Return the entry point of the engine that a plan names, importing its package.

    Raises:
        TrainctlError: The package of the engine, or one that it needs, is not installed here.
    """
    room: EngineBackend = function_of("engine", plan.engine)()
    return room
