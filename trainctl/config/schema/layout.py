"""Placement and number formats of training state, parallelism, recomputation and kernels."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import ClassVar

from trainctl.config.schema.option import option


@dataclass
class EngineConfig:
    """Engine that executes the training steps."""

    units: ClassVar[str] = "engine"

    kind: str = option("deepspeed", "What partitions, computes and updates.", units="engine")


@dataclass
class ZeroStageConfig:
    """ZeRO's partitioning over the data-parallel ranks (arXiv:1910.02054), and its buffers."""

    stage: int = option(
        1, "0 nothing, 1 optimizer states, 2 and gradients, 3 and parameters.", minimum=0, maximum=3
    )
    overlap_comm: bool = option(
        False, "Reduce gradients while the backward pass goes on; doubles the reduce bucket."
    )
    contiguous_gradients: bool = option(True, "Copy gradients into one buffer as they are made.")
    reduce_scatter: bool = option(True, "Average gradients by reduce-scatter, not all-reduce.")
    reduce_bucket_size: int = option(
        500_000_000, "Gradients reduced at once.", unit="elements", minimum=1
    )
    allgather_bucket_size: int = option(
        500_000_000,
        "Parameters gathered at once after a step, stages 1 and 2.",
        unit="elements",
        minimum=2,
    )
    prefetch_bucket_size: int = option(
        50_000_000, "Parameters gathered ahead of use, stage 3.", unit="elements", minimum=0
    )
    param_persistence_threshold: int = option(
        100_000, "Smaller parameters stay whole, stage 3.", unit="elements", minimum=0
    )
    max_live_parameters: int = option(
        1_000_000_000, "Most gathered parameters at a time, stage 3.", unit="elements", minimum=0
    )
    max_reuse_distance: int = option(
        1_000_000_000,
        "Keep a parameter gathered if used again within this, stage 3.",
        unit="elements",
        minimum=0,
    )
    sub_group_size: int = option(
        1_000_000_000,
        "Parameters that the optimizer updates at once, stage 3.",
        unit="elements",
        minimum=1,
    )
    hpz_partition_size: int = option(
        1, "ZeRO++ secondary partition, devices of one node; 1 is off.", unit="devices", minimum=1
    )
    quantized_weights: bool = option(False, "ZeRO++ qwZ: gather weights as int8.")
    quantized_gradients: bool = option(False, "ZeRO++ qgZ: reduce gradients as int4.")


class OffloadDevice(Enum):
    """Storage of a state between uses."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


@dataclass
class OffloadConfig:
    """Training state kept in host memory or on NVMe (arXiv:2101.06840, arXiv:2104.07857)."""

    optimizer: OffloadDevice = option(OffloadDevice.none, "Master weights and optimizer states.")
    parameters: OffloadDevice = option(OffloadDevice.none, "Parameters; ZeRO stage 3 only.")
    ratio: float = option(
        1.0,
        "Share of the optimizer states that is offloaded; below 1 needs stage 3.",
        minimum=0,
        maximum=1,
    )
    pin_memory: bool = option(True, "Page-locked host buffers: faster, and rounded up in size.")
    nvme_path: str | None = option(
        None, "Folder on a local NVMe drive; required for nvme.", local=True
    )
    buffer_count: int = option(5, "Pinned buffers of parameters in flight, nvme.", minimum=1)
    buffer_size: int = option(100_000_000, "Size of each of them.", unit="elements", minimum=1)
    max_in_cpu: int = option(
        1_000_000_000, "Parameters kept in host memory beside NVMe.", unit="elements", minimum=0
    )
    zenflow: bool = option(
        False,
        "Update the columns with the largest gradients on the device at each step, and the rest in "
        "host memory once in a while (ZenFlow, arXiv:2505.12242).",
    )
    zenflow_topk_ratio: float = option(
        0.1, "zenflow: share of a matrix's columns updated on the device; below 1.", above=0
    )
    zenflow_update_interval: int | None = option(
        None,
        "zenflow: steps between updates in host memory; none decides by the gradients.",
        unit="optimizer steps",
        minimum=1,
    )
    zenflow_select_interval: int | None = option(
        None,
        "zenflow: steps between choices of the columns, at least the update interval; none "
        "chooses once.",
        unit="optimizer steps",
        minimum=1,
    )
    zenflow_warmup_steps: int = option(
        0,
        "zenflow: first steps, in which everything is updated in host memory.",
        unit="optimizer steps",
        minimum=0,
    )
    zenflow_overlap_step: bool = option(
        False,
        "zenflow: update in host memory by another process, while steps go on; for scripts.",
    )
    super_offload: bool = option(False, "SuperOffload, for tightly coupled CPU and GPU.")


class DataType(StrEnum):
    """Number formats for storage and communication, by their usual short names."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"
    fp8 = "fp8"


@dataclass
class PrecisionConfig:
    """Number formats of weights, gradients and optimizer states."""

    units: ClassVar[str] = "precision"

    compute: str = option(
        "bf16",
        "Weights and activations in forward and backward; fp8: bf16, with the matrix products of "
        "blocks in fp8 (by torchao).",
        units="precision",
    )
    master_weights: DataType = option(DataType.fp32, "The copy that the optimizer updates.")
    optimizer_states: DataType = option(DataType.fp32, "Moments of the optimizer.")
    gradient_accumulation: DataType | None = option(
        None, "Gradients while they accumulate; none means the type of the weights."
    )
    communication: DataType | None = option(
        None, "Gradients on the wire; none means the type of the weights."
    )
    autocast: bool = option(False, "Weights in fp32, matrix products in compute type by autocast.")


class PipelinePartition(Enum):
    """Quantity that pipeline stages are balanced by."""

    parameters = "parameters"
    time = "time"
    uniform = "uniform"


@dataclass
class ParallelismConfig:
    """Sizes of the device mesh's axes; the data axis takes the devices that the others leave."""

    data: int | None = option(None, "Data-parallel size; none derives it.", minimum=1)
    tensor: int = option(1, "Shards of each matrix; keep it inside a node.", minimum=1)
    pipeline: int = option(1, "Stages of consecutive blocks.", minimum=1)
    sequence: int = option(1, "Ulysses shards of each sequence (arXiv:2309.14509).", minimum=1)
    expert: int = option(1, "Expert-parallel size, carved out of data.", minimum=1)
    pipeline_partition: PipelinePartition = option(
        PipelinePartition.parameters, "What the stages are balanced by."
    )
    stage_blocks: list[int] = option(
        [],
        "Blocks of each stage, in place of a balance; empty balances them.",
        example="[9,8,8,7]",
    )
    sequence_sharded_norms: bool = option(
        False,
        "Split what lies between the tensor-parallel matrices, norms among it, along the sequence"
        " over the tensor ranks (arXiv:2205.05198); off keeps it whole on each.",
    )


@dataclass
class ActivationCheckpointingConfig:
    """Recomputation of activations in the backward pass (arXiv:1604.06174, arXiv:2205.05198)."""

    units: ClassVar[str] = "activation_checkpointing"

    mode: str = option(
        "none",
        "none keeps all; full recomputes blocks from their inputs; selective keeps their products "
        "with weights and attention too, and recomputes the rest.",
        units="activation_checkpointing",
    )


class CrossEntropyKind(Enum):
    """Implementation of the loss over the last hidden states."""

    plain = "plain"
    chunked = "chunked"
    liger_fused = "liger_fused"


class CompileKind(Enum):
    """Part of the model that is compiled."""

    none = "none"
    blocks = "blocks"
    deepcompile = "deepcompile"


@dataclass
class KernelsConfig:
    """Kernels for the model and its loss; results are mathematically equal."""

    liger: bool = option(
        False, "Norms, rotary embedding and SwiGLU by the package liger-kernel; on GPUs."
    )
    cross_entropy: CrossEntropyKind = option(
        CrossEntropyKind.plain,
        "plain: all logits at once; chunked: those of chunk_tokens tokens, computed again in the "
        "backward pass; liger_fused: liger-kernel's, on GPUs.",
    )
    chunk_tokens: int = option(
        1024, "chunked: tokens whose logits exist at once.", unit="tokens", minimum=1
    )
    mlp_tiles: int = option(
        1,
        "Parts of a micro-batch's tokens that go through a feed-forward layer one after the other, "
        "and are computed again in the backward pass; for long sequences.",
        minimum=1,
    )
    compile: CompileKind = option(
        CompileKind.none,
        "blocks: torch.compile of each decoder block; deepcompile: DeepSpeed's compiler of the "
        "whole model with its communication, on GPUs.",
    )
