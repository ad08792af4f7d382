"""Everything in fp32."""

from __future__ import annotations

from trainctl.config.schema import DataType, PrecisionConfig
from trainctl.options.precision import Precision

SPEC = Precision(name="fp32", keys=PrecisionConfig, format=DataType.fp32)
