"""Which engine makes a run's steps."""

from __future__ import annotations

from trainctl.engines.protocol import Room


def engine_room() -> Room:
    """The only one that there is; its package is loaded now."""
    from trainctl.engines.deepspeed.room import DeepSpeedRoom

    return DeepSpeedRoom()
