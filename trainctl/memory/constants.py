"""Every number of the budget that is not derived: its value, unit and source.

What can be read off DeepSpeed or torch is exact; what was measured says where. `docs/memory.md`
discusses how far off each may be.
"""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import Accelerator, DataType

GIB = 2**30

BYTES = {DataType.fp32: 4, DataType.bf16: 2, DataType.fp16: 2, DataType.fp8: 2}
"""Bytes of an element. fp8 training keeps weights in bf16 and casts for each product."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitBytes:
    """Bytes per logit that a plain loss holds."""

    forward: int
    """Bytes at the end of the forward pass."""
    backward: int
    """Bytes at the start of the backward pass."""


FUSED_HEAD_GRADIENT_BYTES = 8
"""Bytes per element of the output projection while liger-kernel's fused loss adds to its gradient:
the gradient (2), the product of a chunk (2) and its fp32 copy (4)
(ops/fused_linear_cross_entropy.py)."""

LOGIT_BYTES = {2: LogitBytes(forward=10, backward=14), 4: LogitBytes(forward=8, backward=16)}
"""trainctl's plain loss, by the logits' element size: ``cross_entropy(logits.float(), labels)``.

Forward: 16-bit logits (2) are copied to fp32 (4), and the log-softmax is kept (4); fp32 logits are
not copied. Backward: logits, log-softmax, and the fp32 gradients of the loss and of the
log-softmax (4 each). Read off torch's graph; ALST's Llama-8B runs give 14.6 between 32k and 65k
tokens. """

STAGE0_ALLREDUCE_ELEMENTS = 500_000_000
"""Gradients flattened at once at stage 0 (MEMORY_OPT_ALLREDUCE_SIZE, runtime/engine.py)."""

NVME_OPTIMIZER_BUFFERS = 4
"""Pinned buffers of the optimizer swapper (deepspeed/runtime/zero/offload_config.py)."""

CHECKPOINT_MANIFEST_BYTES = 1024
"""Manifest and safetensors headers, bytes per parameter tensor."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A measured constant: its usual value and the smallest and largest seen, bytes."""

    low: int
    usual: int
    high: int


CONTEXT = {
    Accelerator.cuda: Range(low=int(0.45 * GIB), usual=int(0.55 * GIB), high=int(0.95 * GIB)),
    Accelerator.rocm: Range(low=int(0.45 * GIB), usual=int(0.80 * GIB), high=int(1.50 * GIB)),
    Accelerator.cpu: Range(low=int(0.33 * GIB), usual=int(0.42 * GIB), high=int(1.00 * GIB)),
}
"""Driver context and loaded kernels of a process (0.47 to 0.92 GiB on an A100 says
stas00/ml-engineering); on a CPU the resident set of Python with torch, deepspeed and transformers
before the first step (measured with torch 2.13: 0.37 GiB with its CPU build, 0.73 GiB with its CUDA
build, which loads CUDA's libraries without a device too) and its thread pools."""

LIBRARY_WORKSPACE = Range(low=int(0.016 * GIB), usual=2 * 2**25, high=6 * 2**25)
"""Inside torch's allocator: cuBLAS's workspace of 32 MiB on Hopper (8 on older devices) for each
thread that multiplies, which are that of the forward pass and autograd's
(ATen/cuda/CublasHandlePool.cpp). It is what DeepSpeedExamples' runs have allocated beyond their
tensors: to 0.01 GiB on an H100, and on an A100 17,039,360 of the 17,763,840 bytes that one logs."""

COMMUNICATOR = Range(low=int(0.3 * GIB), usual=int(0.8 * GIB), high=int(1.6 * GIB))
"""NCCL's or RCCL's own buffers for one group of ranks. A connection takes 9.2 MiB: 4 for large
messages, 0.5 and 4.7 for small ones (`computeBuffSizes`, nccl's init.cc). A channel has up to four,
one for its ring and three for its tree, and a machine with NVLink up to 24 channels: 0.86 GiB, or
0.21 with rings alone. How many there are hangs on the links and on which algorithms are used.
Measured: 1.45 GiB at the first barrier of two ranks on torch 2.1 (stas00/ml-engineering), a few
hundred MiB on newer ones. The usual value was fitted: with several groups 0.8 GiB each meets what
ten runs of BLOOM took beyond their tensors (bigscience, tr11-200B-ml)."""

HOST_RUNTIME = Range(low=GIB, usual=int(2.5 * GIB), high=4 * GIB)
"""Resident host memory of one rank on an accelerator: Python, torch's libraries, the driver."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fragmentation:
    """What the caching allocator holds but cannot use, as a share of what is allocated."""

    low: float
    usual: float
    high: float


FRAGMENTATION = Fragmentation(low=0.0, usual=0.12, high=0.20)
"""Blocks of many sizes: a Llama 8B at ZeRO-2 took 11 and 23 % more than its tensors
(stas00/ml-engineering), ten runs of BLOOM 5 to 20 %."""

FRAGMENTATION_LARGE = Fragmentation(low=0.0, usual=0.03, high=0.07)
"""The same where the hidden states of a micro batch take `LARGE_TENSOR_BYTES` or more, so that each
tensor has a block of its own: 1 to 4 % on a Llama 8B with 64k to 256k tokens (the same source)."""

LARGE_TENSOR_BYTES = 2**29

STATE_UNCERTAINTY = 0.01
"""Relative error of states and buffers: padding, and tensors not in any formula."""

ACTIVATION_UNCERTAINTY = 0.12
"""Relative error of activations, logits and gathered weights: their lifetimes overlap in ways
that the phases simplify."""

CALIBRATION_UNCERTAINTY = 0.05
"""Relative error of a runtime that was measured on the machine: another run there differs so."""
