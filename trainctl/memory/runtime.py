"""Memory of a rank that is in no tensor: driver, communication, and what the allocator wastes."""

from __future__ import annotations

from dataclasses import replace

from trainctl.config.schema import Accelerator
from trainctl.memory import constants
from trainctl.memory.activations import compute_bytes, tokens_per_rank
from trainctl.memory.components import Components
from trainctl.memory.constants import Fragmentation, Range
from trainctl.plan.types import Mesh, Sketch


def runtime_of(plan: Sketch) -> Range:
    """Memory of a rank that is in no tensor: as measured on this machine, else usual values."""
    measured = plan.hardware.runtime_bytes
    if measured is not None:
        doubt = int(constants.CALIBRATION_UNCERTAINTY * measured)
        return Range(low=measured - doubt, usual=measured, high=measured + doubt)
    accelerator = plan.hardware.accelerator
    parts = [constants.CONTEXT[accelerator]]
    if accelerator is not Accelerator.cpu:
        parts.append(constants.LIBRARY_WORKSPACE)
        parts += [constants.COMMUNICATOR] * communicators(plan.mesh)
    return Range(
        low=sum(part.low for part in parts),
        usual=sum(part.usual for part in parts),
        high=sum(part.high for part in parts),
    )


def communicators(mesh: Mesh) -> int:
    """Groups of ranks that talk to each other on a device: everyone, each axis of the mesh that is
    not everyone, and a pipeline's neighbours and holders of tied weights."""
    if mesh.world_size == 1:
        return 0
    axes = (mesh.data, mesh.tensor, mesh.sequence)
    within = sum(1 < size < mesh.world_size for size in axes)
    return 1 + within + (2 if mesh.pipeline > 1 else 0)


def fragmentation_of(plan: Sketch) -> Fragmentation:
    """What the allocator cannot use, as a share of what is allocated: as measured on this machine,
    else by the size of the largest common tensor."""
    measured = plan.hardware.fragmentation
    hidden = tokens_per_rank(plan) * plan.config.model.hidden_size * compute_bytes(plan)
    large = hidden >= constants.LARGE_TENSOR_BYTES
    if large or plan.hardware.accelerator is Accelerator.cpu:
        usual = constants.FRAGMENTATION_LARGE
    else:
        usual = constants.FRAGMENTATION
    if measured is None:
        return usual
    return replace(usual, usual=measured, high=max(measured, usual.high))


def reserved_bytes(
    tensors: int, fragmentation: Fragmentation, runtime: Range, capacity: int | None
) -> int:
    """Return bytes that torch's allocator holds where tensors take `tensors` at their peak.

    What it cannot use is no reason to run out: when the device refuses a block, it gives back the
    unused ones and asks again (`release_cached_blocks`, CUDACachingAllocator.cpp). So it holds no
    more than the device has room for, unless the tensors themselves do.
    """
    held = int(tensors * (1 + fragmentation.usual))
    if capacity is None:
        return held
    outside = runtime.usual - constants.LIBRARY_WORKSPACE.usual
    return max(tensors, min(held, capacity - outside))


def workspace_bytes(plan: Sketch) -> int:
    """Return bytes of libraries' workspaces that torch's allocator counts as allocated."""
    on_cpu = plan.hardware.accelerator is Accelerator.cpu
    return 0 if on_cpu else constants.LIBRARY_WORKSPACE.usual


def band(peak: Components, runtime: Range, fragmentation: Fragmentation) -> tuple[int, int]:
    """Return the least and most that a peak may be.

    States are known almost exactly, activations less so; the allocator adds fragmentation.
    """
    exact = peak.allocated - peak.estimated
    doubt = constants.STATE_UNCERTAINTY * exact + constants.ACTIVATION_UNCERTAINTY * peak.estimated
    low = (peak.allocated - doubt) * (1 + fragmentation.low)
    high = (peak.allocated + doubt) * (1 + fragmentation.high)
    return int(low) + runtime.low, int(high) + runtime.high


def fits(capacity: int | None, low: int, high: int) -> bool | None:
    if capacity is None:
        return None
    if high <= capacity:
        return True
    return False if low > capacity else None
