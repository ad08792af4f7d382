"""Memory of a rank outside tensors: driver, communication, and allocator fragmentation."""

from __future__ import annotations

from dataclasses import replace

from trainctl.config.schema import Accelerator
from trainctl.memory import constants
from trainctl.memory.activations import compute_bytes, tokens_per_rank
from trainctl.memory.components import Components
from trainctl.memory.constants import Fragmentation, Range
from trainctl.plan.types import LayoutPlan, Mesh


def runtime_of(plan: LayoutPlan) -> Range:
    """Return a rank's memory outside tensors: measured on this machine, otherwise usual values."""
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
    """Return the number of process groups on a device: the world, each mesh axis smaller than the
    world, and with a pipeline its neighbours and the holders of tied weights.
    """
    if mesh.world_size == 1:
        return 0
    axes = (mesh.data, mesh.tensor, mesh.sequence)
    within = sum(1 < size < mesh.world_size for size in axes)
    return 1 + within + (2 if mesh.pipeline > 1 else 0)


def fragmentation_of(plan: LayoutPlan) -> Fragmentation:
    """Return the allocator's fragmentation as a fraction of the allocated memory: measured on this
    machine, otherwise by the size of the largest common tensor.
    """
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
    """Return the bytes that torch's allocator reserves when tensors take `tensors` at their peak.

    Fragmentation alone is no out-of-memory error: when the device refuses a block, the allocator
    releases unused blocks and tries again (`release_cached_blocks`, CUDACachingAllocator.cpp). So
    it reserves no more than fits on the device, unless the tensors themselves need more.
    """
    held = int(tensors * (1 + fragmentation.usual))
    if capacity is None:
        return held
    outside = runtime.usual - constants.LIBRARY_WORKSPACE.usual
    return max(tensors, min(held, capacity - outside))


def workspace_bytes(plan: LayoutPlan) -> int:
    """Return the bytes of library workspaces that torch's allocator counts as allocated."""
    on_cpu = plan.hardware.accelerator is Accelerator.cpu
    return 0 if on_cpu else constants.LIBRARY_WORKSPACE.usual


def band(peak: Components, runtime: Range, fragmentation: Fragmentation) -> tuple[int, int]:
    """Return the lower and upper bound of a peak, in bytes.

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
