"""Every number of the step-time model that is neither a fact of the hardware nor derived.

Facts of a device are keys of `hardware` (`conf/hardware/`). Shares of rates, and the host's memory,
were fitted to the 43 published measurements of `tests/data/throughput.csv` that are marked `fit`;
the others are for `tests/search/test_speed.py`. `docs/planning.md` says how close they come.
"""

from __future__ import annotations

GIGA = 1e9

# Where the hardware does not say: an A100, in whose terms such a device is then compared.
ASSUMED_PEAK_TFLOPS = 312.0
ASSUMED_MEMORY_GB_PER_SECOND = 2000.0
ASSUMED_LINK_GB_PER_SECOND = 300.0
ASSUMED_NETWORK_GB_PER_SECOND = 25.0
ASSUMED_HOST_LINK_GB_PER_SECOND = 32.0
ASSUMED_MATRIX_EFFICIENCY = 0.75
"""Between the shares of the peak that were measured: 0.51 (MI300X) to 0.87 (A100)."""
ASSUMED_ATTENTION_EFFICIENCY = 0.35
"""FlashAttention 2 on a device that it was not written for (H100, arXiv:2407.08608)."""

HOST_MEMORY_GB_PER_SECOND = 140.0
"""What the optimizer on the host moves on a machine, all ranks together. A step of Llama-8B on
eight H200 (stas00/ml-engineering, insights/when-to-upgrade-gpus) leaves about 2 s for it: 120 GB/s;
ranks of one thread each (`OMP_NUM_THREADS=1`) reach a tenth."""
NVME_GB_PER_SECOND = 6.0
"""Of a machine's NVMe, reading or writing: one drive on PCIe 4.0 x4."""

MATRIX_SHARE = 0.82
"""Of the best rate of a single matrix product, what the products of a block reach one after the
other: their shapes are not the best ones, and a busy device clocks lower."""
FP8_SHARE = 0.88
"""The share of the peak in fp8 over that in bf16 (70.9 % and 80.3 % on H100, the same source)."""
MEMORY_SHARE = 0.75
"""Share of the memory's bandwidth that operations without matrix products reach."""
LINK_SHARE = 0.65
"""Share of a link's bandwidth that a collective of many megabytes reaches."""
NETWORK_SHARE = 0.60
"""The same between machines."""
HOST_LINK_SHARE = 0.75
"""Share of the host link's bandwidth that a copy from pinned memory reaches."""
OVERLAP = 0.80
"""Share of a collective that hides behind computation while there is enough of it."""
COLLECTIVE_LATENCY = 20e-6
"""Seconds that a collective takes at least, for each doubling of its ranks."""

BACKWARD_TO_FORWARD = 2.0
"""Matrix products: one for the input's gradient, one for the weight's."""
ATTENTION_BACKWARD = 2.5
"""Attention as one kernel computes its scores again (arXiv:2205.14135): five products to two."""

# Kernels of a forward pass of a block, each of which costs the processor some time to start.
KERNELS_OF_A_BLOCK = 60
KERNELS_OF_A_FUSED_BLOCK = 25
KERNEL_START = 5e-6
"""Seconds. A device that is faster than this waits for its processor."""

BACKWARD_TRAFFIC = 2.0
"""Bytes that operations between matrix products move in the backward pass, over the forward one."""
LOGIT_BYTES = 40
"""Moved per logit in both passes: cross entropy casts, normalises and differentiates."""
FUSED_LOGIT_BYTES = 12
"""The same in one kernel that writes the gradient in place of the logits."""
OPTIMIZER_BYTES = 34
"""Moved per parameter by an update in fp32: master weight, two moments, gradient, 16-bit weight."""
