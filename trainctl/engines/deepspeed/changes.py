"""Changes to DeepSpeed that last as long as the process; the table in `patches` gives the reasons.

`trainctl.engines.patch_checks.apply_patches` makes those that a run needs, before the rank joins.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import cache, partial
from importlib import import_module
from itertools import chain
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime import compiler
from deepspeed.runtime.zenflow.zenflow_stage_1_and_2 import ZenFlowZeroOptimizer
from deepspeed.runtime.zero import (
    parameter_offload,
    partition_parameters,
    partitioned_param_coordinator,
    stage3,
)
from deepspeed.runtime.zero.linear import LinearFunctionForZeroStage3
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum
from deepspeed.runtime.zero.partitioned_param_coordinator import PartitionedParameterCoordinator
from deepspeed.utils import nvtx, z3_leaf_module


def disable_shm_allreduce() -> None:
    """Make DeepSpeed use gloo on a CPU, without compiling its own all-reduce at each start."""
    # No setting does this: DeepSpeed decides by its table of operators that can be built, which
    # only comm/torch.py reads. The first read fills it with a compiler's help: 0.2 s per start.
    known = vars(deepspeed.ops).get("__compatible_ops__", {})
    deepspeed.ops.__compatible_ops__ = {**known, "deepspeed_shm_comm": False}


def leave_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon, which each of its optimizers imports, without torch's compiler.

    Two of its functions are passed to the compiler where they are defined. That imports all of the
    compiler: a second of each rank's start. trainctl calls neither, because it has its own Muon.
    """
    compiled = compiler.compile
    compiler.compile = lambda: lambda function: function
    try:
        with suppress(ImportError):  # this version of DeepSpeed has no Muon
            import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = compiled


def copy_from_swap_buffers() -> None:
    """Give a parameter that is read from NVMe its own memory while it is gathered.

    If one data rank holds the whole parameter, DeepSpeed lets it point into the read buffer
    (`.to(device)` copies nothing on a CPU; zero/partition_parameters.py, `NoGatherHandle`). As soon
    as the parameter is released, another one is read into that buffer. A recomputed block still
    holds its weights by then: gradients were silently off by some percent.
    """
    gather = partition_parameters._no_gather_coalesced

    def gather_copies(parameters: Iterable[torch.nn.Parameter]) -> Any:
        listed: list[Any] = list(parameters)
        handle = gather(listed)
        for parameter in listed:
            is_swapped = parameter.ds_tensor.final_location == OffloadDeviceEnum.nvme
            if is_swapped and parameter.data_ptr() == parameter.ds_tensor.data_ptr():
                parameter.data = parameter.data.clone()
        return handle

    partition_parameters._no_gather_coalesced = gather_copies


def reduce_gradients_one_by_one() -> None:
    """Make ZeRO 3 reduce each gradient of a block when it is there, as outside such blocks.

    For a block that is gathered as a whole, DeepSpeed takes all gradients in a hook of the block's
    inputs (zero/stage3.py). If these have no gradient (the first block under a frozen embedding) or
    the block runs twice in a step, the hook runs too early, and zeros are reduced.
    """
    stage3.z3_leaf_parameter = lambda parameter: False


def count_blocks_by_their_parameters() -> None:
    """Make ZeRO 3 measure how soon parameters are used again by what each unit gathers.

    DeepSpeed looks into all units as into the one that is released. When a block is, the whole
    model counts as a unit that uses it again; when an embedding is, blocks count as empty. Both
    stayed gathered (zero/partitioned_param_coordinator.py, `__params_to_release`).
    """
    PartitionedParameterCoordinator._PartitionedParameterCoordinator__params_to_release = cache(
        _ids_to_release
    )


def _ids_to_release(coordinator: Any, unit: torch.nn.Module, step: int) -> set[int]:
    """Return the ids of a unit's parameters that no unit needs again soon, behind a step of the
    recorded order.
    """
    known = {
        name: getattr(coordinator, f"_PartitionedParameterCoordinator__{name}")
        for name in (
            "most_recent_step_id_param_fetched_for",
            "submodule_order",
            "max_reuse_dist_in_numel",
        )
    }
    fetched = known["most_recent_step_id_param_fetched_for"]
    freed = {p for p in _parameters(unit) if not p.ds_persist and fetched[p] <= step}
    passed = 0
    for later in known["submodule_order"][step:]:
        if passed >= known["max_reuse_dist_in_numel"] or not freed:
            break
        for parameter in _parameters(later):
            freed.discard(parameter)
            passed += parameter.ds_numel
    return {parameter.ds_id for parameter in freed}


def _parameters(unit: torch.nn.Module) -> Iterable[Any]:
    return list_parameters(unit, recurse=z3_leaf_module(unit))


def list_parameters_once() -> None:
    """Make ZeRO 3 walk through the modules of a block once, not at each gathering and release."""
    partitioned_param_coordinator.iter_params = list_parameters


def list_parameters(module: Any, recurse: bool = False) -> Iterable[Any]:
    """Return a module's parameters, and those that it uses of other modules."""
    kept = module.__dict__.setdefault("_trainctl_parameters", {})
    if recurse not in kept:
        kept[recurse] = [each for _, each in module.named_parameters(recurse=recurse)]
    return chain(kept[recurse], (each for _, each in module.ds_external_parameters()))


def leave_out_debug_messages() -> None:
    """Make ZeRO 3 look up its rank for messages that it prints, not for all that it could print."""
    for module in (parameter_offload, partition_parameters, partitioned_param_coordinator, stage3):
        module.print_rank_0 = partial(_print_if_forced, module.print_rank_0)


def _print_if_forced(
    printed: Callable[..., None], message: str, debug: bool = False, force: bool = False
) -> None:
    if debug or force:
        printed(message, debug, force)


def leave_out_profiler_ranges() -> None:
    """Make DeepSpeed's functions leave out the ranges for a profiler that they begin and end."""
    nvtx.enable_nvtx = False


def keep_signature_of_products() -> None:
    """Keep the signature that torch compares the arguments of each product at ZeRO 3 with."""
    forward: Any = LinearFunctionForZeroStage3.forward
    forward.__signature__ = inspect.signature(forward)


def cut_out_transposed_weights() -> None:
    """Make ZenFlow read the model's weights from its flat buffers in the layout that it wrote.

    The buffers hold matrices transposed, which its base class ignores (zero/stage_1_and_2.py).
    """
    ZenFlowZeroOptimizer._update_model_bit16_weights = _cut_out_weights


def settle_updated_masters_only() -> None:
    """Make ZenFlow keep master weights that are up to date when it selects columns.

    DeepSpeed rounds all of them to the weights' format.
    """
    ZenFlowZeroOptimizer.sync_fp32_param_from_gpu = _settle_masters


def _cut_out_weights(optimizer: Any, group: int) -> None:
    """Set the model's weights to views of a group's flat buffer, which transposes matrices."""
    flat = optimizer.bit16_groups_flat[group]
    places = zip(
        optimizer.round_robin_bit16_groups[group],
        optimizer.round_robin_bit16_meta[group],
        optimizer.round_robin_bit16_offsets[group],
        strict=True,
    )
    for parameter, meta, offset in places:
        values = flat.narrow(0, offset, meta.numel()).view(meta.shape[::-1])
        parameter.data = values.t() if meta.dim() == 2 else values


def _settle_masters(optimizer: Any) -> None:
    """Copy the weights updated on the device to their master weights; keep all other master
    weights.

    A master weight is out of date if it does not round to the model's weight.
    """
    for group, master in enumerate(optimizer.single_partition_of_fp32_groups):
        rank = dist.get_rank(group=optimizer.real_dp_process_group[group])
        weights = optimizer.parallel_partitioned_bit16_groups[group][rank].to(master.device)
        is_current = master.data.to(weights.dtype) == weights
        master.data.copy_(torch.where(is_current, master.data, weights.to(master.dtype)))
