"""Placement and number formats of training state, parallelism, recomputation and kernels."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, StrEnum
from math import lcm
from typing import ClassVar

from trainctl.config.schema.option import option


@dataclass
class EngineConfig:
    """Engine that executes the training steps."""

    units: ClassVar[str] = "engine"

    kind: str = option(
        "deepspeed",
        "Training engine, which partitions the states and runs forward, backward and update.",
        units="engine",
    )


class GatherUnit(Enum):
    """Part of the model whose parameters ZeRO 3 gathers and releases together."""

    blocks = "blocks"
    modules = "modules"


@dataclass
class ZeroStageConfig:
    """ZeRO's partitioning over the data-parallel ranks (arXiv:1910.02054), and its buffers."""

    stage: int = option(
        1,
        "ZeRO stage: 0 partitions nothing, 1 optimizer states, 2 also gradients, 3 also "
        "parameters.",
        minimum=0,
        maximum=3,
    )
    overlap_comm: bool = option(
        False, "Reduce gradients during the backward pass; doubles the memory of the reduce bucket."
    )
    contiguous_gradients: bool = option(
        True, "Copy gradients into one contiguous buffer as they are produced."
    )
    reduce_scatter: bool = option(
        True, "Average gradients by reduce-scatter instead of all-reduce."
    )
    reduce_bucket_size: int = option(
        500_000_000, "Bucket size of the gradient reduction.", unit="elements", minimum=1
    )
    allgather_bucket_size: int = option(
        500_000_000,
        "Bucket size of the parameter all-gather after a step, stages 1 and 2.",
        unit="elements",
        minimum=2,
    )
    gather: GatherUnit | None = option(
        None,
        "Part of the model that is gathered and released together, stage 3: decoder blocks, or "
        "each of their modules. none chooses blocks where they can be.",
    )
    prefetch_bucket_size: int = option(
        50_000_000, "Parameters prefetched ahead of their use, stage 3.", unit="elements", minimum=0
    )
    param_persistence_threshold: int = option(
        100_000,
        "Parameters smaller than this stay unpartitioned, stage 3.",
        unit="elements",
        minimum=0,
    )
    max_live_parameters: int = option(
        1_000_000_000,
        "Maximum of gathered parameters at a time, stage 3.",
        unit="elements",
        minimum=0,
    )
    max_reuse_distance: int = option(
        1_000_000_000,
        "A parameter stays gathered if it is used again within this many parameters, stage 3.",
        unit="elements",
        minimum=0,
    )
    sub_group_size: int = option(
        1_000_000_000,
        "Parameters that the optimizer updates at a time, stage 3.",
        unit="elements",
        minimum=1,
    )
    hpz_partition_size: int = option(
        1,
        "ZeRO++ hpZ: size of the secondary partition, in devices of one node; 1 switches it off.",
        unit="devices",
        minimum=1,
    )
    shard_group_size: int | None = option(
        None,
        "engine=fsdp2, HSDP: number of neighbouring data-parallel ranks that ZeRO partitions over; "
        "each such group holds a copy. none partitions over all.",
        unit="devices",
        minimum=2,
        example="8",
    )
    quantized_weights: bool = option(False, "ZeRO++ qwZ: gather weights in int8.")
    quantized_gradients: bool = option(False, "ZeRO++ qgZ: reduce gradients in int4.")


class OffloadDevice(Enum):
    """Storage of a state between uses."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


@dataclass
class OffloadConfig:
    """Training state kept in host memory or on NVMe (arXiv:2101.06840, arXiv:2104.07857)."""

    optimizer: OffloadDevice = option(
        OffloadDevice.none, "Offload target of the master weights and optimizer states."
    )
    parameters: OffloadDevice = option(
        OffloadDevice.none, "Offload target of the parameters; ZeRO stage 3 only."
    )
    ratio: float = option(
        1.0,
        "Fraction of the optimizer states that is offloaded; below 1 needs stage 3.",
        minimum=0,
        maximum=1,
    )
    pin_memory: bool = option(
        True, "Use page-locked host buffers: faster transfers, but sizes are rounded up."
    )
    nvme_path: str | None = option(
        None, "Directory on a local NVMe drive; required for nvme.", local=True
    )
    buffer_count: int = option(
        5, "Number of pinned buffers for parameters in flight, nvme.", minimum=1
    )
    buffer_size: int = option(
        100_000_000, "Size of each pinned buffer, nvme.", unit="elements", minimum=1
    )
    max_in_cpu: int = option(
        1_000_000_000,
        "Parameters kept in host memory when the rest is on NVMe.",
        unit="elements",
        minimum=0,
    )
    zenflow: bool = option(
        False,
        "Update the columns with the largest gradients on the device at each step, and the rest "
        "in host memory at a longer interval (ZenFlow, arXiv:2505.12242).",
    )
    zenflow_topk_ratio: float = option(
        0.1, "zenflow: fraction of a matrix's columns updated on the device; below 1.", above=0
    )
    zenflow_update_interval: int | None = option(
        None,
        "zenflow: interval between updates in host memory; none adapts it to the gradients.",
        unit="optimizer steps",
        minimum=1,
    )
    zenflow_select_interval: int | None = option(
        None,
        "zenflow: interval between selections of the columns, at least the update interval; none "
        "selects once.",
        unit="optimizer steps",
        minimum=1,
    )
    zenflow_warmup_steps: int = option(
        0,
        "zenflow: initial steps in which everything is updated in host memory.",
        unit="optimizer steps",
        minimum=0,
    )
    zenflow_overlap_step: bool = option(
        False,
        "zenflow: run the host-memory update in another process, overlapped with the next steps; "
        "for scripts.",
    )
    super_offload: bool = option(False, "Use SuperOffload, for tightly coupled CPU and GPU.")


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
        "Type of weights and activations in forward and backward; fp8: bf16, with the matrix "
        "products of the blocks in fp8 (torchao).",
        units="precision",
    )
    master_weights: DataType = option(
        DataType.fp32, "Type of the master weights, which the optimizer updates."
    )
    optimizer_states: DataType = option(DataType.fp32, "Type of the optimizer's moments.")
    gradient_accumulation: DataType | None = option(
        None, "Type in which gradients are accumulated; none means the type of the weights."
    )
    communication: DataType | None = option(
        None, "Type in which gradients are communicated; none means the type of the weights."
    )
    autocast: bool = option(
        False, "Keep weights in fp32 and run matrix products in the compute type by torch.autocast."
    )


class PipelinePartition(Enum):
    """Quantity that pipeline stages are balanced by."""

    parameters = "parameters"
    time = "time"
    uniform = "uniform"


# A name may not begin with a digit in a class.
PipelineSchedule = Enum("PipelineSchedule", {"1f1b": "1f1b", "dualpipev": "dualpipev"})


@dataclass
class ParallelismConfig:
    """Sizes of the device mesh's axes; the data axis takes the devices that the others leave."""

    data: int | None = option(
        None, "Data-parallel size; none derives it from the number of devices.", minimum=1
    )
    tensor: int = option(
        1, "Tensor-parallel size; should not exceed the devices of a node.", minimum=1
    )
    pipeline: int = option(
        1, "Pipeline-parallel size: number of stages of consecutive blocks.", minimum=1
    )
    sequence: int = option(1, "Ulysses sequence-parallel size (arXiv:2309.14509).", minimum=1)
    context: int = option(
        1,
        "Context-parallel size: ring attention (arXiv:2310.01889) over ranks with two chunks of "
        "each sequence.",
        minimum=1,
    )
    expert: int = option(
        1,
        "Expert-parallel size, a divisor of the data-parallel size; with tensor ranks, each of "
        "them has other experts too.",
        minimum=1,
    )
    pipeline_partition: PipelinePartition = option(
        PipelinePartition.parameters, "Criterion by which pipeline stages are balanced."
    )
    stage_blocks: list[int] = option(
        [],
        "Number of blocks in each pipeline stage; empty balances the stages. DualPipeV has two "
        "stages a rank.",
        example="[9,8,8,7]",
    )
    pipeline_schedule: PipelineSchedule = option(
        PipelineSchedule["1f1b"],
        "Order of micro-batches in the pipeline: 1f1b (arXiv:1806.03377), or dualpipev "
        "(arXiv:2412.19437), where each rank has two stages, i and 2p − 1 − i.",
    )
    sequence_sharded_norms: bool = option(
        False,
        "Megatron-style sequence parallelism: shard norms and other activations between the "
        "tensor-parallel matrices along the sequence (arXiv:2205.05198); off replicates them on "
        "each tensor rank.",
    )

    @property
    def is_folded(self) -> bool:
        """Whether the stages go along the pipeline ranks and back, so that the first has both
        ends.
        """
        return self.pipeline > 1 and self.pipeline_schedule is PipelineSchedule.dualpipev

    @property
    def stages(self) -> int:
        """Number of pipeline stages, one or two a rank."""
        return self.pipeline * (2 if self.is_folded else 1)

    @property
    def sequence_parts(self) -> int:
        """Number of ranks that share a sequence: those of the sequence and context axes."""
        return self.sequence * self.context

    @property
    def sequence_multiple(self) -> int:
        """Number that divides the sequence length: each context rank has two equal chunks, which
        the sequence ranks divide together.
        """
        return self.sequence if self.context == 1 else self.context * lcm(2, self.sequence)


@dataclass
class ActivationCheckpointingConfig:
    """Recomputation of activations in the backward pass (arXiv:1604.06174, arXiv:2205.05198)."""

    units: ClassVar[str] = "activation_checkpointing"

    mode: str = option(
        "none",
        "none keeps all activations; full recomputes blocks from their inputs; selective also "
        "keeps the outputs of matrix products and attention, and recomputes the rest.",
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

    liger: bool | None = option(
        None,
        "Use liger-kernel for norms, rotary embedding and SwiGLU; GPUs only. null: where it is "
        "installed and knows the model.",
    )
    cross_entropy: CrossEntropyKind | None = option(
        None,
        "plain: all logits at once; chunked: logits of chunk_tokens tokens at a time, recomputed "
        "in the backward pass; liger_fused: fused linear cross-entropy of liger-kernel, GPUs "
        "only. null: liger_fused beside liger where the loss allows it, else plain.",
    )
    chunk_tokens: int = option(
        1024,
        "cross_entropy=chunked: number of tokens whose logits exist at once.",
        unit="tokens",
        minimum=1,
    )
    mlp_tiles: int = option(
        1,
        "Number of tiles into which a micro-batch's tokens are split in the feed-forward layers; "
        "tiles run one after the other and are recomputed in the backward pass; for long "
        "sequences.",
        minimum=1,
    )
    compile: CompileKind | None = option(
        None,
        "none: nothing; blocks: torch.compile of each decoder block; deepcompile: DeepSpeed's "
        "compilation of the whole model with its communication, GPUs only. null: blocks on GPUs "
        "without liger, where they compile.",
    )

    @property
    def is_compiled(self) -> bool:
        """Whether the model, or its blocks, are compiled."""
        return self.compile in (CompileKind.blocks, CompileKind.deepcompile)

    @property
    def has_all_logits(self) -> bool:
        """Whether the logits of all tokens exist at once."""
        return self.cross_entropy in (CrossEntropyKind.plain, None)
