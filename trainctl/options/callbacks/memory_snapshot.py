"""Snapshot of torch's allocator at the peak, for docs.pytorch.org/memory_viz."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema.option import option
from trainctl.options.callbacks import CallbackConfig, CallbackSpec
from trainctl.options.limits import only_value


@dataclass
class MemorySnapshotConfig(CallbackConfig):
    """Keys of the callback `memory_snapshot`."""

    at_step: int | None = option(
        None, "Step to take the snapshot of; null takes one at each new peak.", minimum=1
    )
    margin: float = option(
        0.05,
        "Share by which a new peak exceeds that of the last snapshot; unused with at_step.",
        minimum=0.0,
    )
    ranks: list[int] = option([0], "Ranks that write one.", example="[0, 8]")
    max_entries: int = option(
        100_000,
        "Allocations and frees of a step that are kept, the last ones. Each takes some KB of host "
        "memory, and of the file.",
        minimum=1,
    )


SPEC = CallbackSpec(
    name="memory_snapshot",
    keys=MemorySnapshotConfig,
    build="trainctl.train.callbacks.memory_snapshot:MemorySnapshot",
    needs_gpu=True,
    limits=(
        only_value(
            "logging.memory_phases", False, "reads torch's peak, which then restarts in each phase"
        ),
    ),
)
