"""Every configuration key: its type, default, meaning, unit and range. Standard library only.

Each class below is one config group (`conf/<group>/`) or section. `option` attaches to a field what
the reference documentation, the range check and the error messages need. A value of ``None`` means
"derived": `trainctl.plan` computes it and records the reason. Enum members are named as users write
them in YAML, with the value equal to the name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields, is_dataclass
from enum import Enum
from typing import Any


def option(
    default: Any,
    doc: str,
    *,
    unit: str = "",
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
) -> Any:
    """A config field with its meaning, unit and range.

    Args:
        default: The default; lists and dicts are copied for each instance.
        doc: One or two sentences for the reference and for error messages.
        unit: Unit of a number ("bytes", "optimizer steps"), empty for pure numbers and names.
        minimum: Smallest legal value, inclusive.
        maximum: Largest legal value, inclusive.
        above: Bound below, exclusive (a learning rate is above 0).
    """
    metadata = {"doc": doc, "unit": unit, "minimum": minimum, "maximum": maximum, "above": above}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(cls: type) -> Any:
    """A nested section with that class's defaults."""
    return field(default_factory=cls, metadata={"doc": (cls.__doc__ or "").strip()})


# ---------------------------------------------------------------------------- model


class ModelFamily(Enum):
    """Architecture of a decoder; `hf` reads everything from a transformers directory."""

    llama = "llama"
    mistral = "mistral"
    qwen3 = "qwen3"
    gpt2 = "gpt2"
    hf = "hf"


class AttentionKind(Enum):
    """Attention kernel, named as transformers names them."""

    sdpa = "sdpa"
    eager = "eager"
    flash_attention_2 = "flash_attention_2"


@dataclass
class ModelConfig:
    """The decoder to train: its published shape, so that planning needs no torch."""

    name: str = option("tiny-llama", "Name shown in plans, reports and exports.")
    family: ModelFamily = option(ModelFamily.llama, "Architecture.")
    model_type: str | None = option(
        None, "transformers' name of the architecture; read from config.json for family=hf."
    )
    path: str | None = option(
        None, "Local transformers directory with config.json; required for family=hf."
    )
    initial_weights: str | None = option(
        None, "Directory of safetensors to start from; none initialises from training.seed."
    )
    vocab_size: int = option(512, "Rows of the embedding.", unit="tokens", minimum=0)
    hidden_size: int = option(128, "Width of the residual stream.", minimum=0)
    intermediate_size: int = option(384, "Width of the feed-forward layer.", minimum=0)
    num_layers: int = option(4, "Decoder blocks.", minimum=0)
    num_attention_heads: int = option(4, "Query heads.", minimum=1)
    num_key_value_heads: int | None = option(
        None,
        "Key and value heads (grouped-query attention); none means one for each query head.",
        minimum=1,
    )
    head_dim: int | None = option(
        None, "Width of a head; none means hidden_size / num_attention_heads.", minimum=1
    )
    max_position_embeddings: int = option(
        2048, "Longest sequence that the model is defined for.", unit="tokens", minimum=1
    )
    tie_word_embeddings: bool = option(False, "Output projection shares the embedding's weights.")
    rope_theta: float = option(10000.0, "Base of the rotary embedding.", above=0)
    norm_epsilon: float = option(1e-5, "Epsilon of the (RMS or layer) norms.", above=0)
    initializer_range: float = option(
        0.02, "Standard deviation of the initial weights.", above=0, maximum=1
    )
    sliding_window: int | None = option(
        None, "Attention window of mistral; none attends to everything.", unit="tokens", minimum=1
    )
    attention: AttentionKind = option(AttentionKind.sdpa, "Attention kernel.")
    mup: bool = option(False, "Maximal-update parametrisation (arXiv:2203.03466).")
    trust_remote_code: bool = option(False, "Let transformers run Python code found in model.path.")
    factory: str | None = option(
        None, "Your own function that makes the model, as module:function; the shape describes it."
    )


# ------------------------------------------------------------- optimisation and schedule


class OptimizerKind(Enum):
    """Update rule; which ZeRO stage and offload each allows is checked by the rules."""

    adamw = "adamw"
    adam = "adam"
    lion = "lion"
    muon = "muon"
    adamw_8bit = "adamw_8bit"
    adafactor = "adafactor"
    lamb = "lamb"
    sgd = "sgd"


@dataclass
class OptimizerConfig:
    """The update rule and its hyperparameters."""

    kind: OptimizerKind = option(OptimizerKind.adamw, "Update rule.")
    lr: float = option(3e-4, "Peak learning rate; the schedule scales it.", above=0)
    weight_decay: float = option(
        0.1, "Decoupled decay of matrices; norms, biases and embeddings have none.", minimum=0
    )
    beta1: float = option(0.9, "Decay of the first moment.", minimum=0, maximum=0.999999)
    beta2: float = option(0.95, "Decay of the second moment.", minimum=0, maximum=0.999999)
    epsilon: float = option(1e-8, "Added to the root of the second moment.", above=0)
    momentum: float = option(0.95, "Momentum of sgd and muon.", minimum=0, maximum=0.999999)
    matrix_lr: float | None = option(
        None, "Learning rate of muon's matrices; none means lr.", above=0
    )
    decay_embeddings: bool = option(False, "Apply weight_decay to embeddings too.")
    gradient_clipping: float = option(
        1.0, "Largest global gradient norm; 0 switches clipping off.", minimum=0
    )


class ScheduleKind(Enum):
    """Shape of the learning rate over the run, after the warmup."""

    constant = "constant"
    linear = "linear"
    cosine = "cosine"
    wsd = "wsd"
    polynomial = "polynomial"
    exponential = "exponential"
    step = "step"
    inverse_sqrt = "inverse_sqrt"
    one_cycle = "one_cycle"
    cyclic = "cyclic"


class DecayShape(Enum):
    """Shape of the last phase of `wsd`."""

    linear = "linear"
    cosine = "cosine"
    one_minus_sqrt = "one_minus_sqrt"


@dataclass
class ScheduleConfig:
    """Learning rate as a function of the optimizer step."""

    kind: ScheduleKind = option(ScheduleKind.cosine, "Shape after the warmup.")
    warmup_steps: int | None = option(
        None,
        "Linear warmup; none derives it from warmup_fraction.",
        unit="optimizer steps",
        minimum=0,
    )
    warmup_fraction: float = option(
        0.02, "Warmup as a share of the run, when warmup_steps is none.", minimum=0, maximum=1
    )
    floor_ratio: float = option(0.1, "Final learning rate over the peak.", minimum=0, maximum=1)
    decay_fraction: float = option(
        0.2, "Share of the run that `wsd` decays over.", minimum=0, maximum=1
    )
    decay_shape: DecayShape = option(DecayShape.one_minus_sqrt, "Decay of `wsd`.")
    power: float = option(1.0, "Exponent of `polynomial`.", above=0)
    step_every: int | None = option(
        None, "Interval of `step` and period of `cyclic`.", unit="optimizer steps", minimum=1
    )
    step_factor: float = option(0.1, "Factor of `step` at each interval.", above=0, maximum=1)


# ------------------------------------------------------------------ layout and precision


@dataclass
class ZeroStageConfig:
    """What ZeRO partitions over the data-parallel ranks (arXiv:1910.02054), and its buffers."""

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
    """Where a state lives between uses."""

    none = "none"
    cpu = "cpu"
    nvme = "nvme"


@dataclass
class OffloadConfig:
    """States kept in host memory or on NVMe (arXiv:2101.06840, arXiv:2104.07857)."""

    optimizer: OffloadDevice = option(OffloadDevice.none, "Master weights and optimizer states.")
    parameters: OffloadDevice = option(OffloadDevice.none, "Parameters; ZeRO stage 3 only.")
    ratio: float = option(
        1.0,
        "Share of the optimizer states that is offloaded; below 1 needs stage 3.",
        minimum=0,
        maximum=1,
    )
    pin_memory: bool = option(True, "Page-locked host buffers: faster, and rounded up in size.")
    nvme_path: str | None = option(None, "Folder on a local NVMe drive; required for nvme.")
    buffer_count: int = option(5, "Pinned buffers of parameters in flight, nvme.", minimum=1)
    buffer_size: int = option(100_000_000, "Size of each of them.", unit="elements", minimum=1)
    max_in_cpu: int = option(
        1_000_000_000, "Parameters kept in host memory beside NVMe.", unit="elements", minimum=0
    )
    zenflow: bool = option(False, "Update important gradients on the device (ZenFlow).")
    super_offload: bool = option(False, "SuperOffload, for tightly coupled CPU and GPU.")


class DataType(Enum):
    """Number formats, by their usual short names."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"
    fp8 = "fp8"


@dataclass
class PrecisionConfig:
    """Number formats of weights, gradients and states."""

    compute: DataType = option(
        DataType.bf16,
        "Weights and activations in forward and backward; fp8: bf16, with the matrix products of "
        "blocks in fp8 (by torchao).",
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
    emulate_fp8: bool = option(
        False, "fp8: round to fp8 but multiply in fp32, to try it on devices without fp8."
    )
    loss_scale: float = option(0.0, "fp16: fixed loss scale; 0 adapts it.", minimum=0)
    initial_scale_power: int = option(
        16, "fp16: first adaptive loss scale, as a power of two.", minimum=0, maximum=32
    )
    loss_scale_window: int = option(
        1000,
        "fp16: steps without overflow before the scale doubles.",
        unit="optimizer steps",
        minimum=1,
    )


class PipelinePartition(Enum):
    """How blocks are dealt to pipeline stages."""

    parameters = "parameters"
    time = "time"
    uniform = "uniform"


@dataclass
class ParallelismConfig:
    """Sizes of the mesh's axes; data takes the devices that the others leave."""

    data: int | None = option(None, "Data-parallel size; none derives it.", minimum=1)
    tensor: int = option(1, "Shards of each matrix; keep it inside a node.", minimum=1)
    pipeline: int = option(1, "Stages of consecutive blocks.", minimum=1)
    sequence: int = option(1, "Ulysses shards of each sequence (arXiv:2309.14509).", minimum=1)
    expert: int = option(1, "Expert-parallel size, carved out of data.", minimum=1)
    pipeline_partition: PipelinePartition = option(
        PipelinePartition.parameters, "What the stages are balanced by."
    )
    stage_blocks: list[int] = option(
        [], "Blocks of each stage, in place of a balance; empty balances them."
    )
    sequence_sharded_norms: bool = option(
        False,
        "Split what lies between the tensor-parallel matrices, norms among it, along the sequence"
        " over the tensor ranks (arXiv:2205.05198); off keeps it whole on each.",
    )


class CheckpointingMode(Enum):
    """Which activations are recomputed in the backward pass."""

    none = "none"
    full = "full"
    selective = "selective"


@dataclass
class ActivationCheckpointingConfig:
    """Recompute activations instead of keeping them (arXiv:1604.06174, arXiv:2205.05198)."""

    mode: CheckpointingMode = option(
        CheckpointingMode.none,
        "none keeps all; full recomputes blocks from their inputs; selective keeps their products "
        "with weights and attention too, and recomputes the rest.",
    )
    every_kth_block: int = option(
        1, "Recompute the first of every k blocks, and keep the others whole.", minimum=1
    )
    offload_to_cpu: bool = option(
        False, "Keep the inputs of recomputed blocks in (pinned) host memory."
    )
    partition_across_tensor_ranks: bool = option(
        False, "Keep of them a slice on each tensor-parallel rank, gathered when needed."
    )


class CrossEntropyKind(Enum):
    """How the loss is computed from the last hidden states."""

    plain = "plain"
    chunked = "chunked"
    liger_fused = "liger_fused"


class CompileKind(Enum):
    """What is compiled."""

    none = "none"
    blocks = "blocks"
    deepcompile = "deepcompile"


@dataclass
class KernelsConfig:
    """Which code computes the model and its loss; the mathematics stays the same."""

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
    compile: CompileKind = option(
        CompileKind.none,
        "blocks: torch.compile of each decoder block; deepcompile: DeepSpeed's compiler of the "
        "whole model with its communication, on GPUs.",
    )


# ------------------------------------------------------------------------- data and run


class DataKind(Enum):
    """Where the text comes from."""

    stdlib = "stdlib"
    files = "files"


@dataclass
class DataConfig:
    """The corpus: which files, which of them are held out, and their order."""

    kind: DataKind = option(
        DataKind.stdlib, "stdlib: source files of this Python's standard library; files: globs."
    )
    paths: list[str] = option([], "files: globs of text (any suffix) and JSONL (.jsonl).")
    held_out_paths: list[str] = option(
        [], "files: globs of the held-out files; empty holds out a share of `paths`."
    )
    held_out_fraction: float = option(
        0.05, "Share of the files held out for evaluation.", minimum=0, maximum=0.5
    )
    text_key: str = option("text", "Key of the text in a JSONL object.")
    max_bytes: int | None = option(
        None, "Read no more text than this, in file order; none reads all.", unit="bytes", minimum=1
    )
    shuffle: bool = option(True, "Order is a pseudo-random function of (seed, sample counter).")
    mask_documents: bool = option(
        False, "Attend, and count positions, only within a document of a packed sample."
    )
    factory: str | None = option(
        None, "Your own function that gives the documents, as module:function, instead of `kind`."
    )


class TokenizerKind(Enum):
    """How text becomes token ids."""

    byte = "byte"
    file = "file"
    hf = "hf"


@dataclass
class TokenizerConfig:
    """How text becomes token ids."""

    kind: TokenizerKind = option(
        TokenizerKind.byte,
        "byte: ids 0 to 255 and one end of document; file: tokenizers JSON; hf: directory.",
    )
    path: str | None = option(None, "File or directory; required unless kind is byte.")


@dataclass
class TrainingConfig:
    """How long, how much at a time, and from which seed."""

    seed: int = option(1234, "Everything random is a function of it.", minimum=0)
    steps: int | None = option(
        None,
        "Optimizer steps of the whole run; none derives it from tokens.",
        unit="optimizer steps",
        minimum=0,
    )
    tokens: int | None = option(
        None, "Token budget of the whole run, if steps is none.", unit="tokens", minimum=1
    )
    stop_after_steps: int | None = option(
        None,
        "End this launch at this step of the run; the schedule is unchanged.",
        unit="optimizer steps",
        minimum=1,
    )
    time_limit_minutes: float | None = option(
        None,
        "Save and end in time before this launch has lasted so long, with the exit code that "
        "a scheduler requeues (75).",
        unit="minutes",
        above=0,
    )
    sequence_length: int = option(2048, "Length of a packed sample.", unit="tokens", minimum=2)
    global_batch_size: int | None = option(
        None, "Sequences in an optimizer step, over all ranks.", unit="sequences", minimum=1
    )
    micro_batch_size: int | None = option(
        None,
        "Sequences in one forward pass of one data-parallel rank.",
        unit="sequences",
        minimum=1,
    )
    gradient_accumulation_steps: int | None = option(
        None, "Forward and backward passes in an optimizer step.", minimum=1
    )
    evaluate_every_steps: int | None = option(
        None,
        "Held-out loss at this interval and at the end; none only at the end.",
        unit="optimizer steps",
        minimum=1,
    )
    evaluation_samples: int = option(
        64, "Held-out sequences in an evaluation; 0 switches it off.", unit="sequences", minimum=0
    )
    sample_tokens: int = option(
        0, "Length of a text sampled from the model at the end.", unit="tokens", minimum=0
    )
    sample_prompt: str = option("def ", "Start of that text.")


@dataclass
class CheckpointConfig:
    """When state is saved, and how much is kept."""

    every_steps: int | None = option(
        None,
        "Save at this interval; none only by time and at the end.",
        unit="optimizer steps",
        minimum=1,
    )
    every_minutes: float | None = option(
        None, "Save when this much time has passed since the last.", unit="minutes", above=0
    )
    keep: int = option(3, "Complete checkpoints kept, the newest first.", minimum=1)
    best_of: str | None = option(
        None, "Also keep the best by this metric of an evaluation ('loss': smaller is better)."
    )
    at_end: bool = option(True, "Save when the launch ends in good order.")
    asynchronous: bool = option(
        False, "Copy the state to host memory and write it behind the training."
    )
    compare_replay: bool = option(
        True, "After a resume, stop if a step that is done again has another loss than before."
    )


class OnBadLoss(Enum):
    """What to do about a loss or gradient norm that is not finite."""

    stop = "stop"
    skip_step = "skip_step"
    skip_batch = "skip_batch"
    rewind = "rewind"


@dataclass
class StabilityConfig:
    """What to do when a loss or gradient goes wrong; decided by all ranks before the update."""

    on_bad_loss: OnBadLoss = option(OnBadLoss.stop, "stop keeps the last good checkpoint.")
    spike_factor: float | None = option(
        None,
        "A loss above this multiple of its running mean is bad; none looks for NaN only.",
        above=1,
    )
    max_interventions: int = option(3, "Interventions in a row before the run stops.", minimum=0)
    z_loss: float = option(0.0, "Weight of the squared log-normaliser of the output.", minimum=0)


@dataclass
class LoggingConfig:
    """What is recorded and shown while training."""

    every_steps: int = option(
        1,
        "Progress lines when the output is not a terminal; records are of every step.",
        unit="optimizer steps",
        minimum=1,
    )
    profile_steps: list[int] = option(
        [], "First and last step that the profiler records; empty switches it off."
    )
    profile_ranks: list[int] = option([0], "Ranks that it records.")
    deepspeed_level: str = option("warning", "Level of DeepSpeed's own log in the ranks' logs.")


class LauncherKind(Enum):
    """What starts the agents."""

    local = "local"
    ssh = "ssh"
    slurm = "slurm"
    mpi = "mpi"
    kubernetes = "kubernetes"


class CpuBinding(Enum):
    """Processors of a rank; the memory that it touches first then lies beside them."""

    none = "none"
    """The operating system moves ranks as it sees fit."""
    cores = "cores"
    """An equal share of the cores for each rank, in the order of the machine's sockets."""
    device = "device"
    """Its share of the cores on the socket that its device is attached to."""


class MpiFlavor(Enum):
    """Command lines of mpirun."""

    openmpi = "openmpi"
    mpich = "mpich"


class KubernetesApi(Enum):
    """Controllers that start a set of pods together."""

    jobset = "jobset"
    trainjob = "trainjob"


@dataclass
class LauncherConfig:
    """How processes are started and stopped."""

    kind: LauncherKind = option(LauncherKind.local, "What starts the agents.")
    hosts: list[str] = option([], "Host names, for ssh.")
    hostfile: str | None = option(None, "File of `host slots=n` lines, for ssh.")
    include: str | None = option(
        None, "Hosts, and devices of each, to use, as in `node1@node2:0,2`; for ssh."
    )
    exclude: str | None = option(
        None, "Hosts, or devices of them, to leave out, as in `node1@node2:0,2`; for ssh."
    )
    interface: str | None = option(
        None, "Network interface of every host; none takes the one that reaches the others."
    )
    interfaces: dict[str, str] = option({}, "Interface of a host that has another, by its name.")
    python: str | None = option(
        None, "Python of every host, for ssh; none is the path of this one."
    )
    ssh_config: str | None = option(
        None, "File of ssh's own settings (`ssh -F`): ports, users, keys; none is the user's."
    )
    preflight_seconds: float = option(
        60.0, "Time for all hosts to answer before the start, for ssh.", unit="seconds", above=0
    )
    node_timeout_seconds: float = option(
        60.0,
        "A node that is not heard for so long is lost; one that does not hear its launcher ends.",
        unit="seconds",
        minimum=3,
    )
    min_nodes: int | None = option(
        None,
        "After losing nodes, go on with the others if there are so many; none waits for all.",
        minimum=1,
    )
    node_wait_seconds: float = option(
        600.0, "How long to wait for nodes before a restart.", unit="seconds", minimum=0
    )
    cpu_binding: CpuBinding = option(CpuBinding.none, "Processors that a rank may run on.")
    benchmark: bool = option(
        False, "Measure computation and collectives before training; names what is slow."
    )
    min_bandwidth_gb_per_second: float | None = option(
        None, "Refuse to train below this bandwidth of an all-reduce.", unit="GB/s", above=0
    )
    port: int | None = option(
        None, "Rendezvous port; none takes a free one.", minimum=1, maximum=65535
    )
    environment: dict[str, str] = option({}, "Variables set for every rank.")
    forward_environment: list[str] = option(
        [
            "CUDA_VISIBLE_DEVICES",
            "NCCL_*",
            "GLOO_*",
            "HF_HOME",
            "HF_HUB_OFFLINE",
            "OMP_NUM_THREADS",
            "TORCH_*",
            "PYTORCH_*",
        ],
        "Variables (globs) carried from this shell to every rank and recorded with the run.",
    )
    omp_num_threads: int | None = option(
        None, "Threads of each rank on the CPU; none shares the cores.", minimum=1
    )
    grace_seconds: float = option(
        3.0, "Time for ranks to end after SIGTERM before SIGKILL.", unit="seconds", minimum=0
    )
    communication_timeout_seconds: float = option(
        600.0, "A collective that takes longer fails.", unit="seconds", above=0
    )
    stop_grace_seconds: float = option(
        0.0,
        "After SIGTERM: time to finish the step, save and end with exit code 75; 0 ends at once.",
        unit="seconds",
        minimum=0,
    )
    max_restarts: int = option(
        0,
        "Times that a launch starts again by itself, from the newest checkpoint, after a failure.",
        minimum=0,
    )
    heartbeat_seconds: float = option(
        600.0,
        "A rank that gives no sign of life for so long, in a step or an evaluation, is hung.",
        unit="seconds",
        above=0,
    )
    slow_phase_seconds: float = option(
        3600.0,
        "As heartbeat_seconds, while a rank starts (up to its first step), saves or ends.",
        unit="seconds",
        above=0,
    )
    slurm_partition: str | None = option(None, "Partitions of the job; none is the cluster's own.")
    slurm_account: str | None = option(None, "Account that the job is charged to.")
    slurm_qos: str | None = option(None, "Quality of service.")
    slurm_constraint: str | None = option(None, "Features that the nodes must have.")
    slurm_time_minutes: int | None = option(
        None,
        "Time limit of the job; stop_grace_seconds before it the run saves and is requeued.",
        unit="minutes",
        minimum=1,
    )
    slurm_cpus_per_node: int | None = option(
        None, "Processors of each node; none asks for whole nodes.", minimum=1
    )
    slurm_gres: str | None = option(
        None, "Generic resources of each node; none asks for the planned GPUs."
    )
    slurm_dependency: str | None = option(
        None, "What the job waits for, such as afterok:4711, in Slurm's own words."
    )
    slurm_requeue: bool = option(True, "Start again after a preemption or at the time limit.")
    slurm_modules: list[str] = option([], "Environment modules that are loaded first.")
    slurm_options: list[str] = option([], "Further options of sbatch, such as --exclude=node7.")
    slurm_container: str | None = option(
        None, "Container image that agents and ranks run in, by Slurm's plugin pyxis."
    )
    slurm_container_mounts: list[str] = option(
        [], "Folders in the container, as SOURCE:TARGET; the run's own is always there."
    )
    mpi_program: str = option("mpirun", "The program that starts processes: a name or a path.")
    mpi_flavor: MpiFlavor = option(MpiFlavor.openmpi, "Whose command line it understands.")
    mpi_hostfile: str | None = option(
        None, "File of the hosts, as that program reads it; none leaves them to a scheduler."
    )
    mpi_options: list[str] = option([], "Further options of mpirun, each one word.")
    kubernetes_api: KubernetesApi = option(
        KubernetesApi.jobset, "Which controller the manifest is for."
    )
    kubernetes_image: str | None = option(
        None, "Container image that has trainctl; required for launcher=kubernetes."
    )
    kubernetes_namespace: str | None = option(None, "Namespace; none is kubectl's current one.")
    kubernetes_queue: str | None = option(None, "Kueue's local queue that admits the job.")
    kubernetes_claims: dict[str, str] = option(
        {}, "Persistent volume claims and where each is mounted; the run's folder must be on one."
    )
    kubernetes_shared_memory: str | None = option(
        "16Gi", "Size of /dev/shm, in memory; none leaves the 64 MiB of the container runtime."
    )
    kubernetes_node_selector: dict[str, str] = option({}, "Labels that the nodes must have.")
    kubernetes_service_account: str | None = option(None, "Service account of the pods.")
    kubernetes_python: str = option("python", "The interpreter inside the image.")


class Accelerator(Enum):
    """Kind of compute device; `auto` is detected."""

    auto = "auto"
    cuda = "cuda"
    rocm = "rocm"
    cpu = "cpu"


@dataclass
class HardwareConfig:
    """Facts about the machines, declared by an option of `hardware` or detected."""

    name: str = option("auto", "Name shown in plans, such as h100-80g.")
    driver_names: list[str] = option(
        [], "Names that the vendor's tool gives to the device: how hardware=auto recognises it."
    )
    accelerator: Accelerator = option(Accelerator.auto, "Kind of device; auto detects everything.")
    nodes: int = option(1, "Machines.", minimum=1)
    devices_per_node: int | None = option(
        None, "Devices (on cpu: processes) of a machine; none detects them.", minimum=1
    )
    device_memory_bytes: int | None = option(
        None,
        "Memory of a device as its driver reports it; none detects it.",
        unit="bytes",
        minimum=0,
    )
    host_memory_bytes: int | None = option(
        None,
        "Memory of a machine; none detects it, or leaves it unchecked when not here.",
        unit="bytes",
        minimum=0,
    )
    nvme_bytes: int | None = option(
        None, "Free space of a machine's NVMe; none leaves it unchecked.", unit="bytes", minimum=0
    )
    peak_tflops_fp32: float | None = option(
        None, "Dense fp32 throughput of a device, not TF32.", unit="TFLOP/s", above=0
    )
    peak_tflops_bf16: float | None = option(
        None, "Dense bf16 matrix throughput of a device.", unit="TFLOP/s", above=0
    )
    peak_tflops_fp16: float | None = option(
        None, "Dense fp16 matrix throughput, accumulated in fp32.", unit="TFLOP/s", above=0
    )
    peak_tflops_fp8: float | None = option(
        None, "Dense fp8 matrix throughput, accumulated in fp32.", unit="TFLOP/s", above=0
    )
    memory_bandwidth_gb_per_second: float | None = option(
        None, "Device memory bandwidth.", unit="GB/s", above=0
    )
    device_link_gb_per_second: float | None = option(
        None, "Bandwidth between devices of a node, one direction.", unit="GB/s", above=0
    )
    network_gb_per_second: float | None = option(
        None, "Bandwidth between nodes, per device.", unit="GB/s", above=0
    )
    supports_bf16: bool = option(True, "Whether the device computes in bf16.")
    supports_fp8: bool = option(False, "Whether the device computes in fp8.")


@dataclass
class RunConfig:
    """One run, whole: every group and section."""

    model: ModelConfig = section(ModelConfig)
    optimizer: OptimizerConfig = section(OptimizerConfig)
    schedule: ScheduleConfig = section(ScheduleConfig)
    zero_stage: ZeroStageConfig = section(ZeroStageConfig)
    offload: OffloadConfig = section(OffloadConfig)
    precision: PrecisionConfig = section(PrecisionConfig)
    parallelism: ParallelismConfig = section(ParallelismConfig)
    activation_checkpointing: ActivationCheckpointingConfig = section(ActivationCheckpointingConfig)
    kernels: KernelsConfig = section(KernelsConfig)
    data: DataConfig = section(DataConfig)
    tokenizer: TokenizerConfig = section(TokenizerConfig)
    training: TrainingConfig = section(TrainingConfig)
    checkpoint: CheckpointConfig = section(CheckpointConfig)
    stability: StabilityConfig = section(StabilityConfig)
    logging: LoggingConfig = section(LoggingConfig)
    launcher: LauncherConfig = section(LauncherConfig)
    hardware: HardwareConfig = section(HardwareConfig)
    recipe: str | None = option(None, "Name of the recipe that this was composed from.")
    script: str | None = option(
        None, "Your own program, started on every rank instead of trainctl's trainer."
    )
    script_arguments: list[str] = option([], "Its arguments: the words after `--`.")
    script_config_flag: str | None = option(
        "--deepspeed_config",
        "Added to them, with the path of DeepSpeed's JSON, unless it is there; none adds nothing.",
    )
    trainer: str | None = option(
        None, "Your own function that trains in place of trainctl's trainer, as module:function."
    )
    deepspeed: dict[str, Any] = option(
        {}, "Keys of DeepSpeed's own JSON, merged last; must not contradict a derived one."
    )

    @property
    def trains_itself(self) -> bool:
        """Whether trainctl's own trainer trains, and not a script or function of the user's."""
        return self.script is None and self.trainer is None


GROUPS = tuple(
    item.name
    for item in fields(RunConfig)
    if is_dataclass(item.default_factory) and item.name != "training"
)
"""The config groups: sections with a folder of options under `conf/`."""


def walk(config: Any, prefix: str = "") -> Iterator[tuple[str, Field[Any], Any]]:
    """Every leaf of a config: its dotted key, its field and its value."""
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            yield from walk(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", item, value
