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

LOGIT_BYTES_FORWARD = {2: 10, 4: 8}
"""Bytes per logit at the end of the forward pass, by the logits' element size.

Cross entropy upcasts bf16 logits (2) to fp32 (4) and keeps the log-softmax (4); fp32 logits are
not copied. Read off torch's graph of ``cross_entropy(logits.float(), labels)``.
"""

LOGIT_BYTES_BACKWARD = {2: 14, 4: 16}
"""The same at the start of the backward pass: logits, log-softmax, and the fp32 gradients of both
the loss and the log-softmax (4 each). ALST's Llama-8B runs give 14.6 between 32k and 65k tokens.
"""

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
    Accelerator.cpu: Range(low=int(0.33 * GIB), usual=int(0.42 * GIB), high=int(0.60 * GIB)),
}
"""Driver context and loaded kernels of a process (0.47 to 0.92 GiB on an A100 says
stas00/ml-engineering); on a CPU the resident set of Python with torch, deepspeed and transformers
(0.35 GiB measured before the first step, torch 2.13) and its thread pools."""

LIBRARY_WORKSPACE = Range(low=0, usual=int(0.06 * GIB), high=int(0.2 * GIB))
"""cuBLAS and similar: what the 6.86B ZeRO-3 row of DeepSpeedExamples leaves unexplained."""

COMMUNICATION_LIBRARY = Range(low=int(0.3 * GIB), usual=int(0.8 * GIB), high=int(1.6 * GIB))
"""NCCL's or RCCL's own buffers with more than one rank: 1.45 GiB at the first barrier of two ranks
on torch 2.1 (stas00/ml-engineering), a few hundred MiB on newer ones."""

HOST_RUNTIME = Range(low=GIB, usual=int(2.5 * GIB), high=4 * GIB)
"""Resident host memory of one rank on an accelerator: Python, torch's libraries, the driver."""

FRAGMENTATION_LOW, FRAGMENTATION, FRAGMENTATION_HIGH = 0.0, 0.03, 0.07
"""Reserved over allocated, minus one: what the caching allocator holds but cannot use."""

STATE_UNCERTAINTY = 0.01
"""Relative error of states and buffers: padding, and tensors not in any formula."""

ACTIVATION_UNCERTAINTY = 0.12
"""Relative error of activations, logits and gathered weights: their lifetimes overlap in ways
that the phases simplify."""
