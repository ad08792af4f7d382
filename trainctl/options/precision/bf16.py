"""bf16: the range of fp32 in two bytes, so the loss needs no scaling."""

from __future__ import annotations

from trainctl.config.schema import DataType, PrecisionConfig
from trainctl.options.precision import Precision

SPEC = Precision(
    name="bf16",
    keys=PrecisionConfig,
    format=DataType.bf16,
    ability="supports_bf16",
    instead=("fp16", "fp32"),
    on_cpu="right, and slow where the processor has no instructions for it",
    can_autocast=True,
)
