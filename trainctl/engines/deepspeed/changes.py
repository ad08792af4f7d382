"""The changes to DeepSpeed that last as long as the process; its table says why each is made.

`trainctl.engines.declared.apply` calls those that a run needs, before the rank joins the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
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


def do_without_shared_memory_operator() -> None:
    """Let DeepSpeed take gloo on a CPU, and not compile an all-reduce of its own at each start."""
    # No setting says so: the table of operators that could be built decides (comm/torch.py), its
    # one reader. Filled when first asked for, by a compiler: 0.2 s of each rank's start.
    known = vars(deepspeed.ops).get("__compatible_ops__", {})
    deepspeed.ops.__compatible_ops__ = {**known, "deepspeed_shm_comm": False}


def leave_muon_uncompiled() -> None:
    """Import DeepSpeed's Muon, which each of its optimizers looks at, without torch's compiler.

    Two of its functions are handed to the compiler as they are defined, which imports all of it: a
    second of each rank's start. trainctl calls neither: its Muon is its own.
    """
    compiled = compiler.compile
    compiler.compile = _as_it_is
    try:
        with suppress(ImportError):  # a version that has none has nothing to leave
            import_module("deepspeed.runtime.zero.muon.original_muon")
    finally:
        compiler.compile = compiled


def _as_it_is() -> Callable[[Any], Any]:
    """In place of `torch.compile`, a decorator that changes nothing."""
    return lambda function: function


def copy_from_swap_buffers() -> None:
    """Let a parameter that is read from NVMe have memory of its own while it is gathered.

    Where one data rank has all of it, DeepSpeed lets it point into the buffer that it was read into
    (`.to(device)` copies nothing on a CPU; zero/partition_parameters.py, `NoGatherHandle`), and
    reads another one into that buffer as soon as it is released. A recomputed block still holds
    its weights by then: gradients were off by some percent, without a word.
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
    """Let ZenFlow cut the model's weights out of its flat buffers as it has put them in.

    They hold matrices transposed, which its base class does not know (zero/stage_1_and_2.py).
    """
    ZenFlowZeroOptimizer._update_model_bit16_weights = _cut_out_weights


def settle_updated_masters_only() -> None:
    """Let ZenFlow, as it chooses columns, keep the master weights that are up to date.

    DeepSpeed rounds them all to the weights' format.
    """
    ZenFlowZeroOptimizer.sync_fp32_param_from_gpu = _settle_masters


def _cut_out_weights(optimizer: Any, group: int) -> None:
    """The model's weights as views of a group's flat buffer, which holds matrices transposed."""
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
    """Bring the master weights of what was updated on the device up to date; keep the others.

    These are the ones that do not round to the model's weights.
    """
    for group, master in enumerate(optimizer.single_partition_of_fp32_groups):
        rank = dist.get_rank(group=optimizer.real_dp_process_group[group])
        weights = optimizer.parallel_partitioned_bit16_groups[group][rank].to(master.device)
        is_current = master.data.to(weights.dtype) == weights
        master.data.copy_(torch.where(is_current, master.data, weights.to(master.dtype)))
