"""Which copies an update of the optimizer makes on the way, besides gradients and states.

Those of trainctl's own rules (`trainctl.train.optimizers`) are compared by a test with what torch's
allocator gives out while they step.
"""

from __future__ import annotations

from dataclasses import replace

from trainctl.config.schema import Accelerator
from trainctl.memory.activations import compute_bytes
from trainctl.options.optimizer import FOREACH, KERNEL, PLAIN, Maker, Update, spec_of
from trainctl.plan.optimizers import is_fused, maker
from trainctl.plan.types import Sketch


def update_of(plan: Sketch, *, uses_muon: bool) -> Update:
    """The update of a parameter group.

    Args:
        uses_muon: Whether Muon updates the group.
    """
    config, spec = plan.config, spec_of(plan.config.optimizer)
    on_cpu = plan.hardware.accelerator is Accelerator.cpu
    if config.trains_itself:
        if uses_muon and spec.matrix_update is not None:
            half = compute_bytes(plan) // 2
            ((at_once, matrix),) = spec.matrix_update.moments
            return replace(spec.matrix_update, moments=((at_once, matrix * half),))
        is_ours = maker(config, plan.hardware) is Maker.trainctl
        if is_ours and spec.update is not None:
            return spec.update
        if is_fused(config, plan.hardware):
            return KERNEL
        if is_ours:
            return PLAIN  # of what it does not update itself: AdamW, each flat tensor by itself
    elif spec.device_operator:
        return KERNEL
    return PLAIN if on_cpu else FOREACH
