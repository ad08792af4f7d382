"""Every number of the memory budget that is not derived: its value, unit and source.

Numbers read off DeepSpeed or torch are exact; measured ones name the measurement.
`docs/memory.md` discusses how far off each may be.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import Accelerator, DataType

GIB = 2**30

FP32 = 4
BYTES = {DataType.fp32: FP32, DataType.bf16: 2, DataType.fp16: 2, DataType.fp8: 2}
"""Bytes per element. fp8 training keeps weights in bf16 and casts them for each product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitBytes:
    """Bytes per logit that a plain loss holds."""

    forward: int
    """Bytes per logit at the end of the forward pass."""
    backward: int
    """Bytes per logit at the start of the backward pass."""


FUSED_HEAD_GRADIENT_BYTES = 8
"""Bytes per element of the output projection while liger-kernel's fused loss adds to its gradient:
the gradient (2), the product of a chunk (2) and its fp32 copy (4)
(ops/fused_linear_cross_entropy.py)."""

LOGIT_BYTES = {2: LogitBytes(forward=10, backward=14), 4: LogitBytes(forward=8, backward=16)}
"""Bytes per logit of trainctl's plain loss, ``cross_entropy(logits.float(), labels)``, by the
element size of the logits.

Forward: 16-bit logits (2) are copied to fp32 (4), and the log-softmax is kept (4). fp32 logits are
not copied. Backward: logits, log-softmax, and the fp32 gradients of the loss and of the
log-softmax (4 each). Read off torch's autograd graph. ALST's Llama-8B runs give 14.6 between 32k
and 65k tokens.
"""

STAGE0_ALLREDUCE_ELEMENTS = 500_000_000
"""Gradient elements flattened at once at ZeRO stage 0 (MEMORY_OPT_ALLREDUCE_SIZE,
runtime/engine.py).
"""

NVME_OPTIMIZER_BUFFERS = 4
"""Pinned buffers of DeepSpeed's optimizer swapper (deepspeed/runtime/zero/offload_config.py)."""

CHECKPOINT_MANIFEST_BYTES = 1024
"""Bytes of manifest and safetensors headers per parameter tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """Measured constant in bytes: the usual value, and the smallest and largest seen."""

    low: int
    usual: int
    high: int


CONTEXT = {
    Accelerator.cuda: Range(low=int(0.45 * GIB), usual=int(0.55 * GIB), high=int(0.95 * GIB)),
    Accelerator.rocm: Range(low=int(0.45 * GIB), usual=int(0.80 * GIB), high=int(1.50 * GIB)),
    Accelerator.cpu: Range(low=int(0.33 * GIB), usual=int(0.42 * GIB), high=int(1.00 * GIB)),
}
"""Driver context and loaded kernels of a process: 0.47 to 0.92 GiB on an A100
(stas00/ml-engineering). On a CPU, the resident set of Python with torch, deepspeed and transformers
before the first step, and its thread pools. Measured with torch 2.13: 0.37 GiB with its CPU build,
0.73 GiB with its CUDA build, which loads CUDA's libraries even without a device.
"""

LIBRARY_WORKSPACE = Range(low=int(0.016 * GIB), usual=2 * 2**25, high=6 * 2**25)
"""Workspaces inside torch's allocator: cuBLAS takes 32 MiB on Hopper (8 on older devices) for each
thread that multiplies matrices, the main thread and autograd's (ATen/cuda/CublasHandlePool.cpp).
DeepSpeedExamples' runs allocate this much beyond their tensors: to 0.01 GiB on an H100, and on an
A100 17,039,360 of the 17,763,840 bytes that one run logs.
"""

COMMUNICATOR = Range(low=int(0.3 * GIB), usual=int(0.8 * GIB), high=int(1.6 * GIB))
"""Buffers of NCCL or RCCL for one process group. A connection takes 9.2 MiB: 4 for large messages,
0.5 and 4.7 for small ones (`computeBuffSizes`, nccl's init.cc). A channel has up to four
connections, one for its ring and three for its tree, and a machine with NVLink has up to 24
channels: 0.86 GiB, or 0.21 with rings alone. The number of channels depends on the links and the
algorithms used. Measured: 1.45 GiB at the first barrier of two ranks on torch 2.1
(stas00/ml-engineering), a few hundred MiB on newer versions. The usual value is fitted: 0.8 GiB for
each of several groups matches what ten runs of BLOOM took beyond their tensors (bigscience,
tr11-200B-ml).
"""

HOST_RUNTIME = Range(low=GIB, usual=int(2.5 * GIB), high=4 * GIB)
"""Resident host memory of one rank on an accelerator: Python, torch's libraries, the driver."""


MIRROR_BYTES = 400 << 20
"""Host memory of the process that sends checkpoints to `checkpoint.mirror`: 4 parts of 32 MiB in
flight, each once more as it is read back, and Python with a client of the store.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragmentation:
    """Memory that the caching allocator holds but cannot use, as a fraction of allocated memory."""

    low: float
    usual: float
    high: float


FRAGMENTATION = Fragmentation(low=0.0, usual=0.12, high=0.20)
"""Fragmentation with allocator blocks of many sizes: a Llama 8B at ZeRO-2 took 11 and 23 % more
than its tensors (stas00/ml-engineering), ten runs of BLOOM 5 to 20 %.
"""

FRAGMENTATION_LARGE = Fragmentation(low=0.0, usual=0.03, high=0.07)
"""Fragmentation where the hidden states of a micro-batch take `LARGE_TENSOR_BYTES` or more, so that
each tensor has an allocator block of its own: 1 to 4 % on a Llama 8B with 64k to 256k tokens
(stas00/ml-engineering).
"""

LARGE_TENSOR_BYTES = 2**29

STATE_UNCERTAINTY = 0.01
"""Relative error of states and buffers: padding, and tensors that no formula counts."""

ACTIVATION_UNCERTAINTY = 0.12
"""Relative error of activations, logits and gathered weights: their lifetimes overlap in ways
that the phases simplify."""

CALIBRATION_UNCERTAINTY = 0.05
"""Relative error of runtime memory measured on the machine: repeated runs differ by this much."""
