"""Conversion of a row's free text to trainctl's settings."""

from __future__ import annotations

import re

from memory_rows import NotExpressible, Recompute, Row

from trainctl.config.registry import new_section
from trainctl.config.schema import (
    AttentionKind,
    CrossEntropyKind,
    DataType,
    ModelConfig,
    OffloadDevice,
    RunConfig,
)

NOTHING = re.compile(r"(none|no|not|false|off|n/?a|0|-|without)\b|-$")
"""Words by which a column says that something is off."""


def without_init(row: Row) -> bool:
    """Return True if the model was built whole, outside `deepspeed.zero.Init`."""
    return "no zero.init" in row.words("caveat")


def precision_words(row: Row, *columns: str) -> str:
    """Return the precision in one spelling, with other columns: `bfloat16` is bf16, `32-true`
    fp32.
    """
    text = row.words("precision", *columns)
    for spelling, name in (
        (r"\bbfloat16", "bf16"),
        (r"\b(float16|half)\b", "fp16"),
        (r"\b(float32|tf32|fp32-true|32-true|full precision)\b", "fp32"),
        (r"\b(float8|mxfp8|fp8_\w+|e4m3)\w*", "fp8"),
    ):
        text = re.sub(spelling, name, text)
    return text


def is_autocast(row: Row) -> bool:
    return bool(re.search(r"autocast|\bamp(_|\b)", row.words("precision")))


def is_pure(row: Row) -> bool:
    """Return True if weights, gradients and moments have 16 bits and there is no master copy."""
    return bool(
        re.search(
            r"(bf16|fp16)-true|(pure|true|all) (bf16|fp16)|bf16 params(?!.*reduce)|"
            r"(no|without|w/o) (fp32 )?master|bf16[- ]only|master-?less",
            precision_words(row, "sharding"),
        )
    )


def is_compiled(row: Row) -> bool:
    text = row.words("compile")
    return bool(text) and not NOTHING.match(text) and not re.match(r"eager|see\b|unknown|\?", text)


def frozen_bytes(row: Row) -> float | None:
    """Return the bytes per frozen weight where adapters train; None where all weights train."""
    text = row.words("id", "optimizer", "precision", "sharding", "caveat", "model")
    if not re.search(r"\blora\b|qlora|adapter|-lora-|_lora", text):
        return None
    if re.search(r"nf4|fp4|4-?bit|qlora", text):
        # Half a byte, and a scale in 8 bits for each block of 64 (arXiv:2305.14314, section 3).
        return 0.5 + 1 / 64 + 4 / (64 * 256)
    return 1.0 if re.search(r"int8|8-?bit", text) else 2.0


TOMLS = {"llama3_8b.toml": "selective (op)"}
"""Recomputation in torchtitan's own job files (activation_checkpoint, at e7c0cae)."""


def recompute_of(row: Row) -> tuple[Recompute, int]:
    """Return the recomputed part of a block, and the interval of recomputed blocks.

    Raises:
        NotExpressible: The row recomputes an unknown part.
    """
    text = row.words("ac_mode")
    if not text or NOTHING.match(text):
        return Recompute.none, 1
    if "per toml" in text:
        text = next(
            (mode for name, mode in TOMLS.items() if name in row.words("caveat")), "unknown"
        )
    if re.match(r"\?|unknown|see\b", text) or re.search(r"partial|budget|\bauto|moe_act", text):
        raise NotExpressible(f"ac_mode '{text}' does not say what is recomputed")
    if re.search(r"\bblock[ =]\s*\d", text):
        raise NotExpressible(f"ac_mode '{text}': a number of blocks that is not one in so many")
    every = re.search(
        r"every\s+(\d+)(?!\d|\s*(?:nd|rd|th)?\s+(?:mm|matmul|product|op))|selective[^\d]{0,4}(\d)",
        text,
    )
    if every:
        return Recompute.full, int(next(filter(None, every.groups())))
    if re.search(r"core|\battention\b|\battn\b", text) or (
        "selective" in text and "megatron" in row.words("framework")
    ):
        return Recompute.attention, 1
    if "selective" in text or re.search(r"\bop\b|\bsac\b", text):
        return Recompute.operations, 1
    return Recompute.full, 1


def set_precision(row: Row, config: RunConfig) -> None:
    """Set the number formats.

    Raises:
        NotExpressible: None is given, or weights train in a format that the budget lacks.
    """
    text, compute = precision_words(row), config.precision.compute
    if not text.strip():
        if re.search(r"deepspeed|titan|megatron|nemo|foundry", row.words("framework")):
            return  # default of these programs
        raise NotExpressible("precision is not given")
    if not re.search(r"fp32|fp16|bf16|fp8|16|32|mixed|amp|autocast|lora|nf4|int8|bit", text):
        raise NotExpressible(f"precision '{text}' is not known")
    if re.search(r"nf4|int[48]|nvfp4|mxfp4|\b[48]-?bit", text) and frozen_bytes(row) is None:
        raise NotExpressible(f"precision '{text}': weights that learn in it have no term")
    if re.search(r"\bfp16", text) and "bf16" not in text:
        compute = "fp16"
    if "fp32" in text and not re.search(r"bf16|fp16|fp8|mixed|amp|autocast", text):
        compute = "fp32"
    if "fp8" in text:
        compute = "fp8"
    precision = config.precision = new_section("precision", compute)
    if "master+grads+opt" in text or is_pure(row):
        precision.master_weights = precision.optimizer_states = DataType.bf16
    if "fp32 grad acc" in text or "fp32-main-grads" in text or "fp32 main" in text:
        precision.gradient_accumulation = DataType.fp32


OPTIMIZERS = (
    (r"8-?bit|_8bit|int8", "adamw_8bit"),
    (r"adafactor", "adafactor"),
    (r"\blamb\b", "lamb"),
    (r"\bmuon", "muon"),
    (r"\blion|cpulion|fusedlion", "lion"),
    (r"adam", "adamw"),
    (r"\bsgd\b", "sgd"),
)


def set_optimizer(row: Row, config: RunConfig) -> None:
    """Set the update rule; AdamW where none is named.

    Raises:
        NotExpressible: Nothing trains, or the rule's states are unknown.
    """
    text = row.words("optimizer")
    if NOTHING.match(text) or re.search(r"forward only|inference|frozen", text):
        raise NotExpressible("nothing learns: not a training job")
    kind = next((kind for words, kind in OPTIMIZERS if re.search(words, text)), None)
    if (kind is None and text) or re.search(r"galore|q-?adam|1-?bit|apollo|adam-?mini", text):
        raise NotExpressible(f"optimizer '{row['optimizer']}': no term for its states")
    if kind is None:
        return
    config.optimizer = new_section("optimizer", kind, lr=config.optimizer.lr)
    if kind == "sgd":
        config.optimizer.momentum = 0.9 if "momentum" in text else 0.0
    if "foreach" in text:
        config.optimizer.fused = False


FUSED_FRAMEWORKS = ("torchtitan", "nanogpt", "litgpt", "foundry", "mosaic", "composer", "olmo")
"""Trainers that use torch's fused kernel or update tensor by tensor, unless a row says
otherwise.
"""


def uses_foreach(row: Row) -> bool:
    """Return True if torch updates all tensors of a rank together.

    That is the default on CUDA without a fused kernel (`_default_to_fused_or_foreach`,
    torch/optim).
    """
    text = row.words("optimizer")
    if "foreach" in text:
        return True
    if re.search(r"fused|apex|deepspeed|cpu|bnb|bitsandbytes|paged|8-?bit", text):
        return False
    return not any(name in row.words("framework") for name in FUSED_FRAMEWORKS)


def zero_stage_of(row: Row) -> int:
    """Return the ZeRO stage closest to how a row divides its states."""
    text = row.words("sharding")
    match = re.search(r"(?:zero|stage)\D{0,2}(\d)", text)
    if match:
        return int(match.group(1))
    if re.search(r"infinity|zero\+\+", text):
        return 3
    if "zero-offload" in text:
        return 2
    if re.search(r"fsdp|fully|full_shard|hsdp", text):
        return 3
    return 1 if "distributed optimizer" in text else 0


KNOWN_SHARDING = re.compile(
    r"zero|fsdp|fully|full_shard|shard_grad|hsdp|distributed optimizer|ddp|data[- ]parallel|\bdp\b|"
    r"no_shard|replica|single|\b1 (gpu|device)|\btp|\bpp|tensor|pipeline|3d|lora|optimizer states?"
)


def check_sharding(row: Row) -> None:
    """Refuse rows whose partitioning of states is unknown.

    Raises:
        NotExpressible: The row does not say which ranks hold the states, or the scheme is unknown.
    """
    text, framework = row.words("sharding"), row.words("framework")
    if re.search(r"gemini|expert|\bep\d*\b|fairscale|sharded_ddp|\bmics\b", text):
        raise NotExpressible(f"sharding '{row['sharding']}': no term for it")
    alone = max(row.number("world_gpus", 0), row.number("dp", 0)) <= 1
    if not text and not alone and not re.search(r"titan|fsdp|ddp|megatron|nemo", framework):
        raise NotExpressible("sharding is not given")
    if text and not NOTHING.match(text) and not KNOWN_SHARDING.search(text):
        raise NotExpressible(f"sharding '{row['sharding']}' is not known")


LIGHTNING = {"reduce_bucket_size": 200_000_000, "sub_group_size": 1_000_000_000_000}
"""Lightning's default sizes of DeepSpeed's buffers (DeepSpeedStrategy,
pytorch/strategies/deepspeed.py of lightning).
"""


def set_buffers(row: Row, config: RunConfig) -> None:
    """Set the buffers: DeepSpeed's defaults, changed by the row's caveat about its JSON."""
    zero, caveat = config.zero_stage, row.words("caveat")
    if "lightning" in row.words("framework"):
        for key, size in LIGHTNING.items():
            setattr(zero, key, size)
    for key, name in (
        ("reduce_bucket_size", "reduce_bucket_size"),
        ("stage3_param_persistence_threshold", "param_persistence_threshold"),
        ("stage3_prefetch_bucket_size", "prefetch_bucket_size"),
        ("stage3_max_live_parameters", "max_live_parameters"),
        ("stage3_max_reuse_distance", "max_reuse_distance"),
        ("sub_group_size", "sub_group_size"),
    ):
        match = re.search(rf"{key}\s*[=:]\s*([\d.e]+)", caveat)
        if match:
            setattr(zero, name, int(float(match.group(1).rstrip("."))))
    zero.overlap_comm = (
        "overlap_comm" in caveat and not re.search(r"overlap_comm\s*[=:]\s*(false|0)", caveat)
    ) or (zero.stage == 3 or "stas00" in row["source_repo"])


def set_loss(row: Row, config: RunConfig) -> None:
    """Set how the loss computes logits.

    Raises:
        NotExpressible: The loss is not the cross entropy of tokens.
    """
    loss = row.words("loss")
    match = re.search(r"reward model|\b(dpo|orpo|ppo|grpo)\b", row.words("id", "caveat"))
    if match:
        raise NotExpressible(f"{match[0]}: no cross entropy of tokens")
    if re.search(r"\b(dpo|grpo|ppo|orpo|kto|rlhf|mse|reward|contrastive|distill\w*)\b", loss):
        raise NotExpressible(f"loss '{row['loss']}': no cross entropy of tokens")
    if "liger" in loss and "no liger" not in loss:
        config.kernels.liger = "ce" in loss or "fused" in loss
        config.kernels.cross_entropy = CrossEntropyKind.liger_fused
    elif re.search(r"fused[-_ ]linear|cut[-_ ]cross|\bcce\b|linear[-_ ]cross", loss):
        config.kernels.cross_entropy = CrossEntropyKind.liger_fused
    elif re.search(r"chunk|tiled(?!\s*mlp)", loss) and "litgpt" not in row.words("framework"):
        # litgpt keeps all chunks and does not recompute them.
        config.kernels.cross_entropy = CrossEntropyKind.chunked


def set_tiles(row: Row, config: RunConfig) -> None:
    """Set the number of feed-forward tiles: a rank's tokens divided by the width, rounded up
    (ArcticTraining, TiledMLP).
    """
    if "tiledmlp" in row.words("loss", "caveat").replace(" ", ""):
        tokens = config.training.sequence_length // config.parallelism.sequence
        config.kernels.mlp_tiles = max(1, -(-tokens // config.model.hidden_size))


def set_attention(row: Row, config: RunConfig) -> None:
    """Set transformers' eager attention where a row says so and its scores are not recomputed.

    All other kernels keep the same tensors.
    """
    if recompute_of(row)[0] is Recompute.attention:
        return
    if re.search(r"\beager|\bmath|naive|unfused|need_weights", row.words("attention")):
        config.model.attention = AttentionKind.eager


def offload_of(row: Row) -> tuple[OffloadDevice, OffloadDevice]:
    """Return the devices of optimizer and parameters.

    Raises:
        NotExpressible: The row offloads something, but does not say what.
    """
    text, sharding = row.words("offload"), row.words("sharding")
    if not text or NOTHING.match(text):
        if "infinity" in sharding:
            raise NotExpressible("ZeRO-Infinity, and offload does not say of what")
        by_name = OffloadDevice.cpu if "zero-offload" in sharding else OffloadDevice.none
        return by_name, OffloadDevice.none
    where = OffloadDevice.nvme if "nvme" in text else OffloadDevice.cpu
    # FSDP offloads all of its shards or none.
    everything = re.search(r"\b(all|everything)\b", text) or (
        "fsdp" in sharding and "cpu" in text and not offloads_activations(row)
    )
    has_optimizer = bool(everything or re.search(r"opt|zero-offload|states", text))
    has_parameters = bool(everything or "param" in text)
    if not (has_optimizer or has_parameters or offloads_activations(row)):
        raise NotExpressible(f"offload '{row['offload']}' does not say of what")
    return (
        where if has_optimizer else OffloadDevice.none,
        where if has_parameters else OffloadDevice.none,
    )


def offloads_activations(row: Row) -> bool:
    """Return True if inputs of recomputed blocks are kept on the host."""
    in_mode = re.search(r"offload", row.words("ac_mode"))
    return bool(in_mode or re.search(r"\bact|activation|ckpt.*cpu", row.words("offload")))


def context_of(row: Row) -> int:
    """Return the number of ranks that share a sequence.

    Megatron's sequence parallelism only divides replicated tensors among tensor-parallel ranks, so
    it adds no ranks here.
    """
    text = row.words("cp_sp")
    match = re.search(r"(?:\bcp|context|ulysses|ring|alst)\D{0,12}(\d+)", text)
    if match:
        return max(1, int(match[1]))
    if re.search(r"\bep\b|\bep\d|expert|\btp\b|tensor|megatron", text):
        return 1
    return max(1, row.number("cp_sp", 1))


def partition_of(row: Row) -> int | None:
    """Return the number of ranks that share the states, if it is not the data-parallel size."""
    text = row.words("sharding", "dp")
    match = re.search(r"(?:dp_)?shard(?:ed|ing)?(?:_degree|_size)?\s*[=:x ]\s*(\d+)", text)
    # The 32 of `fp32 sharded` is no number of shards.
    match = match or re.search(r"(?<![a-z\d])(\d+)\s*(?:-way )?shard", text)
    return int(match[1]) if match else None


def stage_blocks_of(row: Row, model: ModelConfig, pipeline: int) -> tuple[int, ...]:
    """Divide blocks equally; where embeddings count as blocks, the first and last stage get one
    less.

    Raises:
        NotExpressible: There are fewer blocks than stages.
    """
    layers = model.num_layers
    if pipeline == 1:
        return (layers,)
    if layers < pipeline:
        raise NotExpressible(f"{layers} blocks on {pipeline} pipeline stages")
    if "embedding gets its own slot" in row.words("caveat"):
        whole = _equal(layers + 2, pipeline)
        return (whole[0] - 1, *whole[1:-1], whole[-1] - 1)
    return _equal(layers, pipeline)


def _equal(layers: int, pipeline: int) -> tuple[int, ...]:
    return tuple((layers + pipeline - 1 - stage) // pipeline for stage in range(pipeline))
