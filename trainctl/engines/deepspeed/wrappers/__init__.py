"""Adapters, one for each class of wrapper that DeepSpeed puts around an optimizer.

(DeepSpeed 0.19: runtime/engine.py, `_configure_optimizer`, chooses among bf16_optimizer.py,
fp16/unfused_optimizer.py, zero/stage_1_and_2.py, zero/stage3.py and classes derived from these.)
"""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.fp16.unfused_optimizer import FP16_UnfusedOptimizer
from deepspeed.runtime.superoffload.superoffload_stage3 import SuperOffloadOptimizer_Stage3
from deepspeed.runtime.zenflow.zenflow_stage_1_and_2 import ZenFlowZeroOptimizer
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch.optim import Optimizer

from trainctl.engines.deepspeed.wrappers.base import Wrapper
from trainctl.engines.deepspeed.wrappers.partitioned import (
    Bf16OptimizerWrapper,
    Stage1And2,
    Stage1And2OnHost,
    ZenFlow,
)
from trainctl.engines.deepspeed.wrappers.replicated import MasterCopies, Unwrapped
from trainctl.engines.deepspeed.wrappers.stage_3 import (
    Stage3,
    Stage3OnHost,
    SuperOffload,
)


def wrapper_adapter(wrapper: Any) -> type[Wrapper]:
    """Return the adapter class for a wrapper, by its class and by where its optimizer is."""
    match wrapper:
        case SuperOffloadOptimizer_Stage3():
            return SuperOffload
        case DeepSpeedZeroOptimizer_Stage3():
            return Stage3OnHost if wrapper.offload_optimizer else Stage3
        case ZenFlowZeroOptimizer():
            return ZenFlow
        case DeepSpeedZeroOptimizer():
            return Stage1And2OnHost if wrapper.cpu_offload else Stage1And2
        case BF16_Optimizer():
            return Bf16OptimizerWrapper
        case FP16_UnfusedOptimizer():
            return MasterCopies
        case Optimizer():
            return Unwrapped
        case _:
            raise AssertionError(f"DeepSpeed has a wrapper without an adapter: {type(wrapper)}")
