"""AdamW with block-wise 8-bit moments (arXiv:2110.02861), in torchao's formats."""

from __future__ import annotations

from trainctl.options.optimizer import (
    NO_HOST_KERNEL,
    NO_SWAP,
    Optimizer,
    Update,
    WidthRule,
    WithMoments,
)

AT_ONCE = 2**22
"""Elements updated at a time, in whole blocks: their moments are in fp32 meanwhile."""

SPEC = Optimizer(
    name="adamw_8bit",
    keys=WithMoments,
    build="trainctl.train.optimizers.adamw_8bit:build",
    modules=("torchao",),
    needs="the block of 256",
    states=("exp_avg.codes", "exp_avg_sq.codes"),
    # One byte for the code, and an fp32 scale for each block of 256.
    state_bytes=1 + 4 / 256,
    tensor=False,
    has_cpu_kernel=False,
    host_operator="",
    why_not={
        "cpu": NO_HOST_KERNEL,
        "nvme": NO_SWAP,
        "tensor": "a tensor rank has a shard of a matrix, and its blocks of 256 would be others",
        "states": "its states have 8 bits already",
    },
    # fp32 moments of the elements before and after, the step, and 64-bit indices of the codes.
    update=Update(moments=((0, 53),), by_tensor=True, at_most=AT_ONCE),
    width_rule=WidthRule.adam,
)
