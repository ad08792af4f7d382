"""Which number format each tensor really has, once "none means ..." is worked out."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import DataType, PrecisionConfig
from trainctl.options.precision import precision_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Formats as DeepSpeed sees them."""

    weights: DataType
    """The weights that forward and backward use; fp32 under autocast, and bf16 under fp8, whose
    matrix products convert on the way."""
    gradient_accumulation: DataType
    """Gradients while they accumulate."""
    communication: DataType
    """Gradients on the wire; under autocast, those of matrices only."""


def formats(precision: PrecisionConfig) -> Formats:
    """Return the formats that a precision config implies."""
    weights = DataType.fp32 if precision.autocast else precision_of(precision).format
    return Formats(
        weights=weights,
        gradient_accumulation=precision.gradient_accumulation or weights,
        communication=precision.communication or weights,
    )
