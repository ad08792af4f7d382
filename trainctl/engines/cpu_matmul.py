"""Matrix products in bf16 and fp16 on a processor without instructions for them.

torch has no library to call there and multiplies element by element, which takes ten to forty times
as long as fp32 (`gemm` in aten/src/ATen/native/CPUBlas.cpp). Here the factors are widened to fp32,
the fp32 library multiplies them, and the result is rounded once. Processors with such instructions
also add exact products in fp32, so results differ only in the order of a sum.
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
"""All other matrix products of a model are composed of these."""


def use_fp32_cpu_products(section: PrecisionConfig, device: torch.device) -> None:
    """Widen the factors in this process if the CPU lacks instructions for the compute format.

    Args:
        device: Device of the model; nothing changes unless it is the CPU.
    """
    narrow = precision_of(section).format.value
    if device.type == "cpu" and narrow in lacking_formats():
        widen_format(_NARROW[narrow])


@cache
def widen_format(format: torch.dtype) -> torch.library.Library:
    """Replace torch's CPU kernels of matrix products for factors of one format only.

    Args:
        format: Format of the factors to widen.

    Returns:
        The library that owns the kernels; the cache keeps it, so they stay for the whole process.
    """
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about replacing a kernel
        for product in _PRODUCTS:
            library.impl(product.__name__, _widening_kernel(product, format), "CPU")
    return library


def _widening_kernel(
    product: Callable[..., torch.Tensor], format: torch.dtype
) -> Callable[..., Any]:
    def kernel(*factors: torch.Tensor, **scales: float) -> torch.Tensor:
        left, right = factors[-2:]
        if all(factor.dtype is format for factor in factors):
            return product(*(factor.float() for factor in factors), **scales).to(format)
        # torch's own kernel: the overload with `out` has a kernel that was not replaced.
        out = right.new_empty(*left.shape[:-1], right.shape[-1])
        return product(*factors, **scales, out=out)

    return kernel
