"""Number format of each kind of tensor, with the defaults resolved."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import DataType, PrecisionConfig
from trainctl.options.precision import precision_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Formats:
    """Number formats as DeepSpeed sees them."""

    weights: DataType
    """Format of the weights in forward and backward pass: fp32 under autocast, and bf16 under fp8,
    which casts for each matrix product.
    """
    gradient_accumulation: DataType
    """Format of accumulated gradients."""
    communication: DataType
    """Format of gradients in communication; under autocast, of the matrices' gradients only."""


def formats(precision: PrecisionConfig) -> Formats:
    """Return the formats that a precision config implies."""
    weights = DataType.fp32 if precision.autocast else precision_of(precision).format
    return Formats(
        weights=weights,
        gradient_accumulation=precision.gradient_accumulation or weights,
        communication=precision.communication or weights,
    )
