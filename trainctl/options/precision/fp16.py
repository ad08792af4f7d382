"""fp16 with a loss scale (arXiv:1710.03740): for devices without bf16."""

from __future__ import annotations

from trainctl.config.schema import DataType
from trainctl.options.precision import Precision, WithLossScale

SPEC = Precision(
    name="fp16",
    keys=WithLossScale,
    format=DataType.fp16,
    instead=("bf16", "fp32"),
    not_on_cpu_because="DeepSpeed does not train in fp16 on the CPU",
)
