"""Host memory, NVMe and disk space of one machine for offloading, loading and saving."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from itertools import accumulate

from trainctl.config.registry import function_of, load_spec
from trainctl.config.schema import Accelerator, OffloadDevice
from trainctl.config.sections import callbacks_of
from trainctl.memory.constants import (
    CHECKPOINT_MANIFEST_BYTES,
    FP32,
    HOST_RUNTIME,
    MIRROR_BYTES,
    NVME_OPTIMIZER_BUFFERS,
)
from trainctl.memory.engine import EngineMemory, tensors_by_group
from trainctl.memory.partial import trained_stages
from trainctl.memory.rank import activations_of_rank
from trainctl.memory.stages import Stage, pipeline_stages
from trainctl.options.activation_checkpointing import recomputing_section
from trainctl.plans.schedule import Curve
from trainctl.plans.types import LayoutPlan, RunPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBudget:
    """Host memory of one machine."""

    bytes_per_node: int
    """Sum of `components`."""
    components: dict[str, int]
    """Bytes by component, all ranks of the machine together."""


def host_budget(
    plan: LayoutPlan, engine: EngineMemory, stage: Stage, device_peak: int
) -> HostBudget:
    """Return the host memory of a machine whose ranks all hold `stage`.

    `device_peak` is the peak of one rank in bytes. If the accelerator is the CPU, it is host memory
    and the first component here, so the total is not to be added to the device's.
    """
    on_cpu = plan.hardware.accelerator is Accelerator.cpu
    per_rank = {"processes": device_peak if on_cpu else HOST_RUNTIME.usual}
    per_rank |= function_of("engine", plan.config.engine.kind, "offloaded")(engine, stage)
    per_rank |= _checkpoint_copy(plan, engine) or _checkpoint_tensor(engine, stage)
    # Each trained weight is counted on one of the ranks that hold it, at any ZeRO stage.
    counted = engine.share(stage.trained.partitioned)
    specs = (load_spec("callbacks", name) for name in callbacks_of(plan.config))
    per_rank["callbacks"] = counted * sum(spec.host_bytes for spec in specs)
    settings = recomputing_section(plan.config)
    if settings is not None and settings.offload_to_cpu:
        per_rank["activations"] = activations_of_rank(plan, engine, stage).offloaded
    ranks = plan.hardware.devices_per_node
    components = {name: size * ranks for name, size in per_rank.items() if size}
    if plan.config.checkpoint.mirror is not None:
        components["mirror"] = MIRROR_BYTES
    return HostBudget(bytes_per_node=sum(components.values()), components=components)


def offloaded_components(engine: EngineMemory, stage: Stage) -> dict[str, int]:
    """Return the host bytes per rank of DeepSpeed's offload, NVMe staging buffers included."""
    return _offloaded_optimizer(engine, stage) | _offloaded_parameters(engine, stage)


def _offloaded_optimizer(engine: EngineMemory, stage: Stage) -> dict[str, int]:
    """Return the host bytes per rank of an optimizer offloaded to the host or through it to NVMe.

    Adam in mixed precision takes 18 bytes per parameter: master 4, fp32 gradients 4, moments 8, and
    2 of 16-bit staging (stages 1 and 2) or gradients (stage 3).
    """
    if not engine.offloads_optimizer:
        return {}
    groups, trained = engine.groups(stage), stage.trained
    own = engine.share(trained.partitioned)
    staging = {"optimizer_staging": pinned_bytes(engine, engine.weight_bytes * own)}
    if engine.stage == 3:
        staging = {"gradients": pinned_bytes(engine, engine.gradient_bytes * own)}
    elif engine.accumulates and engine.stage == 2:
        # Reduced after each micro-batch (stage 1 leaves them on the device until the last).
        staging["gradients"] = engine.weight_bytes * _accumulated_elements(engine, trained)
    if engine.offload.optimizer is OffloadDevice.nvme:
        largest = max((engine.sub_group(group) for group in groups), default=0)
        pool = NVME_OPTIMIZER_BUFFERS * FP32 * largest
        return {"nvme_buffers": pinned_bytes(engine, pool)} | staging
    offloaded = 1 - engine.device_share_of_offload(groups)
    shares = [int(engine.share(group.elements) * offloaded) for group in groups]
    master = sum(engine.master_bytes * share for share in shares)
    if engine.stage < 3:
        master = sum(pinned_bytes(engine, engine.master_bytes * share) for share in shares)
        staging["optimizer_staging"] += pinned_bytes(engine, engine.weight_bytes * trained.largest)
    return {
        "master_weights": master,
        "optimizer_states": int(engine.share(engine.moments(stage)) * offloaded),
        "weight_average": engine.average_bytes * sum(shares),
        "master_gradients": sum(
            pinned_bytes(engine, engine.master_bytes * share) for share in shares
        ),
    } | staging


def _accumulated_elements(engine: EngineMemory, trained: Stage) -> int:
    """Return the elements of the gradients that the fullest rank accumulates on the host.

    They are whole tensors, also of those that partitions share
    (`async_accumulate_grad_in_cpu_via_gpu`, zero/stage_1_and_2.py).
    """
    held = [0] * engine.ranks
    for spread, sizes in tensors_by_group(engine.config, trained):
        ends = [0, *accumulate(sizes)]
        share = -(-ends[-1] * spread // engine.ranks)
        for rank in range(engine.ranks):
            start = min(rank // spread * share, ends[-1])
            last = min(bisect_left(ends, start + share), len(sizes))
            held[rank] += ends[last] - ends[bisect_right(ends, start) - 1]
    return max(held)


def _offloaded_parameters(engine: EngineMemory, stage: Stage) -> dict[str, int]:
    """Return the host bytes per rank of an offloaded ZeRO-3 shard, or of its NVMe buffers."""
    if not engine.offloads_parameters:
        return {}
    own = engine.share(stage.partitioned)
    if engine.offload.parameters is OffloadDevice.cpu:
        return {"parameters": pinned_bytes(engine, engine.weight_bytes * own)}
    kept = min(own, engine.offload.max_in_cpu)
    pool = engine.offload.buffer_count * engine.offload.buffer_size
    return {
        "parameters": pinned_bytes(engine, engine.weight_bytes * kept),
        "nvme_parameter_buffers": pinned_bytes(engine, engine.weight_bytes * pool),
    }


def _checkpoint_copy(plan: LayoutPlan, engine: EngineMemory) -> dict[str, int]:
    """Return the host bytes per rank of an asynchronous checkpoint: a copy of all states, divided
    among the ranks.
    """
    nvme = engine.offload.optimizer is OffloadDevice.nvme
    if not plan.config.checkpoint.asynchronous or nvme:
        return {}
    whole = checkpoint_bytes(plan, engine) + weights_only_bytes(plan, engine)
    share = whole // plan.mesh.world_size
    on_host = engine.offloads_optimizer or engine.on_cpu
    return {"checkpoint_copy": share if on_host else pinned_bytes(engine, share)}


def _checkpoint_tensor(engine: EngineMemory, stage: Stage) -> dict[str, int]:
    """Return the host bytes per rank of the tensor being written or read: this rank's part of the
    largest one, in the master's type. States on the host are written in place.
    """
    if engine.offloads_optimizer or engine.on_cpu:
        return {}
    trained = stage.trained
    largest = min(trained.largest, engine.optimized(trained.parameters))
    return {"checkpoint_tensor": engine.master_bytes * largest}


def pinned_bytes(engine: EngineMemory, size: int) -> int:
    """Return the allocated size of a buffer that may be pinned. torch's host allocator rounds up to
    a power of two (CachingHostAllocator.cpp). Without an accelerator nothing is pinned.
    """
    if not engine.offload.pin_memory or engine.on_cpu or size == 0:
        return size
    return int(1 << (size - 1).bit_length())


def nvme_bytes(plan: LayoutPlan, engine: EngineMemory, stage: Stage) -> int:
    """Return the bytes of a machine's swap files: shard, masters, moments, swapped gradients."""
    own, trained = engine.share(stage.partitioned), engine.share(stage.trained.partitioned)
    size = 0
    if engine.offloads_optimizer and engine.offload.optimizer is OffloadDevice.nvme:
        size += engine.master_bytes * trained + engine.share(engine.moments(stage))
        size += engine.master_bytes * trained if engine.accumulates else 0
    if engine.offloads_parameters and engine.offload.parameters is OffloadDevice.nvme:
        size += engine.weight_bytes * max(own - engine.offload.max_in_cpu, 0)
    return size * plan.hardware.devices_per_node


def checkpoint_bytes(plan: LayoutPlan, engine: EngineMemory) -> int:
    """Return the bytes of one checkpoint: master weights, moments and average of each trained
    parameter, and the manifest. Frozen weights are not saved.
    """
    (whole,) = trained_stages(plan.config, pipeline_stages(plan.config.model))
    trained = whole.trained
    master = engine.master_bytes if engine.has_master else engine.weight_bytes
    return (
        (master + engine.average_bytes) * trained.parameters
        + engine.moments(whole)
        + CHECKPOINT_MANIFEST_BYTES * trained.tensors
    )


def checkpoints_kept_bytes(plan: RunPlan, one: int) -> int:
    """Return the bytes of all checkpoints on disk at once: kept, best, and being written.

    As many as are kept may wait for a mirror that cannot be reached. The checkpoint at the end of a
    stable phase is counted too; those of earlier extensions are not.
    """
    settings = plan.config.checkpoint
    best, stable = settings.best_of is not None, Curve.of(plan).stable_end is not None
    waiting = settings.keep if settings.mirror is not None else 0
    return one * (settings.keep + 1 + best + stable + waiting)


def weights_only_bytes(plan: LayoutPlan, engine: EngineMemory) -> int:
    """Return the bytes of one weights-only checkpoint in the compute format; 0 if none is saved."""
    if plan.config.checkpoint.weights_only_every_steps is None:
        return 0
    trained = trained_stages(plan.config, pipeline_stages(plan.config.model))[0].trained
    return engine.weight_bytes * trained.parameters + CHECKPOINT_MANIFEST_BYTES * trained.tensors


def weights_only_kept_bytes(plan: RunPlan, one: int) -> int:
    """Return the bytes of all weights-only checkpoints on disk at once: all of the run, or the kept
    ones and the one being written.
    """
    settings = plan.config.checkpoint
    every, keep = settings.weights_only_every_steps, settings.weights_only_keep
    if every is None:
        return 0
    made = plan.total_steps // every
    return one * (made if keep is None else min(made, keep + 1))
