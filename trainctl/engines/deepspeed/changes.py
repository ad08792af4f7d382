"""Changes to DeepSpeed that last as long as the process; the table in `patches` gives the reasons.

`trainctl.engines.patch_checks.apply_patches` makes those that a run needs, before the rank joins.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from importlib import import_module
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime import compiler
from deepspeed.runtime.zenflow.zenflow_stage_1_and_2 import ZenFlowZeroOptimizer
from deepspeed.runtime.zero import partition_parameters
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum


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
