"""Rates that hardware reaches, and the constants of the step-time model.

The constants are every number of the step-time model that is neither a fact of the hardware nor
derived. Facts of a device are keys of `hardware` (`conf/hardware/`). Fractions of peak rates, and
the host's memory bandwidth, are fitted to the published measurements of
`tests/data/throughput.csv` marked `fit`; `tests/tuning/test_speed.py` tests against the others.
`docs/planning.md` states the accuracy.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import PrecisionConfig
from trainctl.hardware import Hardware
from trainctl.options.precision import is_emulated, precision_of

GIGA = 1e9
TERA = 1e12

# Assumed where the hardware states nothing: an A100.
ASSUMED_PEAK_TFLOPS = 312.0
ASSUMED_MEMORY_GB_PER_SECOND = 2000.0
ASSUMED_LINK_GB_PER_SECOND = 300.0
ASSUMED_NETWORK_GB_PER_SECOND = 25.0
ASSUMED_HOST_LINK_GB_PER_SECOND = 32.0
ASSUMED_MATRIX_EFFICIENCY = 0.75
"""Within the measured fractions of the peak: 0.51 (MI300X) to 0.87 (A100)."""
ASSUMED_ATTENTION_EFFICIENCY = 0.35
"""FlashAttention 2 on a device that it was not written for (H100, arXiv:2407.08608)."""

HOST_MEMORY_GB_PER_SECOND = 140.0
"""Host memory bandwidth of an offloaded optimizer, all ranks of a machine together. A step of
Llama-8B on eight H200 (stas00/ml-engineering, insights/when-to-upgrade-gpus) leaves about 2 s for
it: 120 GB/s. Ranks of one thread each (`OMP_NUM_THREADS=1`) reach a tenth.
"""
NVME_GB_PER_SECOND = 6.0
"""Read or write bandwidth of a machine's NVMe: one drive on PCIe 4.0 x4."""

MATRIX_SHARE = 0.82
"""Fraction of the best single matrix product's rate that the products of a block reach in sequence:
their shapes are not optimal, and a busy device clocks lower.
"""
GROUPED_SHARE = 0.80
"""Rate of grouped products over the rate of a block's other products."""
GROUPED_ROWS = 128
"""Rows of a tile of a grouped product (torch's grouped kernels and CUTLASS's on Hopper)."""
FP8_SHARE = 0.88
"""Fraction of the peak reached in fp8, divided by the fraction in bf16 (70.9 % and 80.3 % on H100,
stas00/ml-engineering).
"""
MEMORY_SHARE = 0.75
"""Fraction of the memory bandwidth reached by operations between matrix products."""
LINK_SHARE = 0.65
"""Fraction of a link's bandwidth that a collective of many megabytes reaches."""
NETWORK_SHARE = 0.60
"""Fraction of the network bandwidth that a collective between machines reaches."""
HOST_LINK_SHARE = 0.75
"""Fraction of the host link's bandwidth that a copy from pinned memory reaches."""
OVERLAP = 0.80
"""Fraction of a collective that overlaps with computation, if there is enough computation."""
COLLECTIVE_LATENCY = 20e-6
"""Minimum seconds of a collective for each doubling of its ranks."""

ORTHOGONALIZATION_STEPS = 5
"""Newton-Schulz steps of an update by Muon."""

BACKWARD_TO_FORWARD = 2.0
"""Backward over forward matrix products: the input's and the weight's gradient."""
ATTENTION_BACKWARD = 2.5
"""Backward over forward products of fused attention, which recomputes its scores: five to two
(arXiv:2205.14135).
"""
MERGED_BYTES, ADDED_BYTES = 18, 10
"""Bytes moved per element of the queries to merge the attention to one rank's keys in fp32, and to
add its gradient.
"""

# Kernel launches in the forward pass of a block.
KERNELS_OF_A_BLOCK = 60
KERNELS_OF_A_FUSED_BLOCK = 25
KERNELS_OF_EXPERTS = 40
"""Further launches of a sparse block: routing, sorting, grouped products, scattering."""
KERNEL_START = 5e-6
"""Seconds per kernel launch. A device faster than its launches waits for the processor."""

DISPATCH = 15e-6
"""Seconds per operation under `selective` in a user's module: each is looked at in Python."""
WATCHED_CALL = 6e-6
"""Seconds per operation in models of transformers, where Python looks at calls alone."""
FORWARD_HOOK, BACKWARD_HOOK = 1e-3, 0.5e-3
"""Seconds of the host per module with parameters at ZeRO 3, in either pass: DeepSpeed's hooks look
up, gather and release the module's parameters. Fitted to two runs of Qwen3 0.6B on one H100
(docs/planning.md); one CPU process, whose gathers start no kernels, took 170 and 120 µs.
"""
BLOCK_HOOKS = 0.35
"""Share of that time if each decoder block is gathered as a whole (docs/planning.md)."""

BACKWARD_TRAFFIC = 2.0
"""Backward over forward bytes moved by the operations between matrix products."""
LOGIT_BYTES = 40
"""Bytes moved per logit in both passes: cross entropy casts, normalises and differentiates."""
FUSED_LOGIT_BYTES = 12
"""Bytes moved per logit by a fused kernel that overwrites the logits with their gradient."""
OPTIMIZER_BYTES = 34
"""Bytes moved per parameter by an fp32 update: master, two moments, gradient, 16-bit weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """Achievable rates of a device, per second."""

    products: float
    """FLOP/s of the matrix products in blocks."""
    wide_products: float
    """FLOP/s of products outside blocks and of eager attention, which fp8 leaves in 16 bits."""
    attention: float
    """FLOP/s of fused attention."""
    memory: float
    """Bytes/s of the operations between matrix products."""
    is_known: bool
    """Whether the hardware states its peak and its memory bandwidth."""


def device_rates(hardware: Hardware, precision: PrecisionConfig) -> Rates:
    """Return the achievable rates of a device in a number format; an A100's where unknown."""
    compute = precision_of(precision)
    peak = hardware.peak_tflops(compute.format)
    is_known = peak is not None and hardware.memory_bandwidth_gb_per_second is not None
    flops = (peak or ASSUMED_PEAK_TFLOPS) * TERA
    bandwidth = hardware.memory_bandwidth_gb_per_second or ASSUMED_MEMORY_GB_PER_SECOND
    share = hardware.matrix_efficiency or ASSUMED_MATRIX_EFFICIENCY
    attention = hardware.attention_efficiency or ASSUMED_ATTENTION_EFFICIENCY
    reached = share * MATRIX_SHARE
    products = flops * reached
    if compute.product_bytes is not None and not is_emulated(precision):
        narrow = hardware.peak_tflops(compute.name)
        products = (narrow * TERA if narrow else flops) * reached * FP8_SHARE
    return Rates(
        products=products,
        wide_products=flops * reached,
        attention=flops * attention,
        memory=bandwidth * GIGA * MEMORY_SHARE,
        is_known=is_known,
    )
