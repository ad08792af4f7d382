"""What an update of the optimizer holds besides gradients and states: copies made on the way.

Those of trainctl's own rules (`trainctl.train.optimizers`) are compared by a test with what torch's
allocator gives out while they step.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import Accelerator, OptimizerKind
from trainctl.memory.constants import BYTES
from trainctl.plan.optimizers import EIGHT_BIT_AT_ONCE, Maker, is_fused, maker
from trainctl.plan.types import RunPlan


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """Temporaries of one update: the most of some moments.

    Attributes:
        moments: Bytes per element of what is updated at once, and per element of the largest
            parameter in it, at each moment.
        whole_tensors: Whether a parameter counts whole where a rank has a part of it only.
        by_tensor: Whether, without ZeRO, each parameter is updated by itself.
        at_most: Elements of a parameter that are updated at once; None is all.
    """

    moments: tuple[tuple[int, int], ...] = ((0, 0),)
    whole_tensors: bool = False
    by_tensor: bool = False
    at_most: int | None = None

    def bytes(self, at_once: int, largest: int) -> int:
        """Bytes of an update of `at_once` elements, whose largest parameter has `largest`."""
        part = largest if self.whole_tensors else min(largest, at_once, self.at_most or largest)
        return max(each * at_once + tensor * part for each, tensor in self.moments)


KERNEL = Update()
"""One kernel keeps what it needs in registers."""

FOREACH = Update(moments=((4, 0),))
"""torch's Adam on all tensors of an accelerator together: the root of the second moment."""

PLAIN = Update(moments=((8, 0),), by_tensor=True)
"""torch's Adam tensor by tensor: the root, and the root divided by its correction."""

OWN = {
    # The step; LAMB's is divided out of the corrected first moment, and its norms are those of
    # copies in fp64.
    OptimizerKind.lion: Update(moments=((4, 0),), by_tensor=True),
    OptimizerKind.lamb: Update(moments=((8, 0), (4, 8)), by_tensor=True),
    # The step, a parameter's second moment, and two fp64 copies of its step for the norm.
    OptimizerKind.adafactor: Update(moments=((4, 20),), by_tensor=True),
    # A stretch's moments in fp32, before and after, the step, and 64-bit places of the codes.
    OptimizerKind.adamw_8bit: Update(moments=((0, 53),), by_tensor=True, at_most=EIGHT_BIT_AT_ONCE),
}
"""trainctl's rules but Muon, which is two rules (`update_of`)."""

MUON = 4, 10
"""Of Muon's matrices: their directions in fp32; and for one of them, in 16 bits, five of its size:
the iterate, the next one, the step before, its Gram matrix and the polynomial of that."""


def update_of(plan: RunPlan, *, uses_muon: bool, is_fused_adam: bool) -> Update:
    """The update of a parameter group.

    It follows from the config and not from the JSON, which the planner's sketches do not have.

    Args:
        uses_muon: Whether Muon updates the group.
        is_fused_adam: Whether DeepSpeed's FusedAdam does.
    """
    config, kind = plan.config, plan.config.optimizer.kind
    on_cpu = plan.hardware.accelerator is Accelerator.cpu
    if is_fused_adam:
        return KERNEL
    if config.trains_itself:
        if uses_muon:
            at_once, matrix = MUON
            half = BYTES[config.precision.compute] // 2
            return Update(moments=((at_once, matrix * half),), whole_tensors=True, by_tensor=True)
        if maker(config, plan.hardware) is Maker.trainctl and kind in OWN:
            return OWN[kind]
        if is_fused(config, plan.hardware):
            return KERNEL
        if kind is OptimizerKind.muon:
            return PLAIN  # AdamW of what Muon does not update, each flat tensor by itself
    elif kind in (OptimizerKind.lion, OptimizerKind.lamb):
        return KERNEL
    return PLAIN if on_cpu else FOREACH
