"""Products of bf16 and fp16 matrices on a processor that has no instructions for them.

torch has no library to call there and multiplies number by number, ten to forty times as long as in
fp32 (`gemm` in aten/src/ATen/native/CPUBlas.cpp). Here factors are widened to fp32, multiplied by
the library for that, and the result is rounded once: such instructions, too, add exact products in
fp32, so what differs is the order of a sum.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from trainctl.config.schema import PrecisionConfig
from trainctl.hardware.devices import lacking_formats
from trainctl.options.precision import precision_of

_NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
_PRODUCTS: tuple[Callable[..., torch.Tensor], ...] = (
    torch.mm,
    torch.bmm,
    torch.addmm,
    torch.baddbmm,
)
"""What all others that a model makes are composed of."""


def widen_narrow_products(section: PrecisionConfig, device: torch.device) -> None:
    """Widen them from now on in this process, if it computes on such a processor in such a format.

    Args:
        device: Where the model is.
    """
    narrow = precision_of(section).format.value
    if device.type == "cpu" and narrow in lacking_formats():
        widen(_NARROW[narrow])


@cache
def widen(format: torch.dtype) -> torch.library.Library:
    """Replace torch's CPU kernels of products; those of other formats go on as they were.

    Args:
        format: Of the factors to be widened.

    Returns:
        What torch keeps the kernels by: they live as long as it does, which is for ever.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there was a kernel before
        for product in _PRODUCTS:
            library.impl(product.__name__, _widened(product, format), "CPU")
    return library


def _widened(product: Callable[..., torch.Tensor], format: torch.dtype) -> Callable[..., Any]:
    def kernel(*factors: torch.Tensor, **scales: float) -> torch.Tensor:
        left, right = factors[-2:]
        if all(factor.dtype is format for factor in factors):
            return product(*(factor.float() for factor in factors), **scales).to(format)
        # torch's own kernel: that of the overload with `out` is another one.
        out = right.new_empty(*left.shape[:-1], right.shape[-1])
        return product(*factors, **scales, out=out)

    return kernel
