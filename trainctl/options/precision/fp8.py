"""Matrix products of blocks in fp8 (arXiv:2209.05433) by torchao, everything else in bf16."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from trainctl.config.schema import DataType, PrecisionConfig
from trainctl.config.schema.option import option
from trainctl.options.precision import Precision


class Fp8Scales(Enum):
    """Elements that share a scale, by torchao's names for its recipes."""

    tensorwise = "tensorwise"
    rowwise = "rowwise"


@dataclass
class Fp8Config(PrecisionConfig):
    """Keys of fp8."""

    emulate_fp8: bool = option(
        False, "fp8: round to fp8 but multiply in fp32, for devices without fp8."
    )
    fp8_scales: Fp8Scales = option(
        Fp8Scales.tensorwise,
        "fp8: elements that share a scale, a power of two for rowwise; rowwise keeps outliers of "
        "one row from the others, and is slower.",
    )


SPEC = Precision(
    name="fp8",
    keys=Fp8Config,
    build="trainctl.train.models.kernels:convert_to_fp8",
    modules=("torchao",),
    format=DataType.bf16,
    ability="supports_fp8",
    instead=("bf16", "fp16"),
    emulated_by="emulate_fp8",
    product_bytes=1,
    multiple=16,  # torch._scaled_mm
)
