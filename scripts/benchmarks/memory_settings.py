"""What the free text of a row says, as trainctl's own settings."""

from __future__ import annotations

import re

from memory_rows import GIB, Recompute, Row

from trainctl.config.schema import (
    CrossEntropyKind,
    DataType,
    ModelConfig,
    OffloadDevice,
    RunConfig,
)


def without_init(row: Row) -> bool:
    """Whether the model was made whole, outside `deepspeed.zero.Init`."""
    return "no zero.init" in row.words("caveat")


def is_autocast(row: Row) -> bool:
    return "autocast" in row.words("precision")


def frozen_bytes(row: Row) -> float | None:
    """Bytes of a weight that does not learn, where adapters do; None where all weights learn."""
    text = row.words("id", "optimizer", "precision", "sharding", "caveat", "model")
    if not re.search(r"\blora\b|qlora|adapter|-lora-|_lora", text):
        return None
    if re.search(r"nf4|fp4|4-?bit|qlora", text):
        # Half a byte, and a scale in 8 bits for each block of 64 (arXiv:2305.14314, section 3).
        return 0.5 + 1 / 64 + 4 / (64 * 256)
    return 1.0 if re.search(r"int8|8-?bit", text) else 2.0


def recompute_of(row: Row) -> tuple[Recompute, int]:
    text = row.words("ac_mode")
    if not text or re.match(r"(none|no|false|off)\b|-$", text):
        return Recompute.none, 1
    every = re.search(r"every\s+(\d+)|selective[^\d]{0,4}(\d)", text)
    if every:
        return Recompute.full, int(next(filter(None, every.groups())))
    if "core" in text or ("selective" in text and "megatron" in row.words("framework")):
        return Recompute.attention, 1
    if "selective" in text or re.search(r"\bop\b|\bsac\b", text):
        return Recompute.operations, 1
    return Recompute.full, 1


def set_precision(row: Row, config: RunConfig) -> None:
    text = row.words("precision")
    precision = config.precision
    if re.search(r"\bfp16|\bfloat16", text):
        precision.compute = DataType.fp16
    if ("fp32" in text or "32-true" in text) and not re.search(
        r"bf16|fp16|fp8|bfloat16|mixed", text
    ):
        precision.compute = DataType.fp32
    if "master+grads+opt" in text or "pure bf16" in text:
        precision.master_weights = precision.optimizer_states = DataType.bf16
    if "fp32 grad acc" in text or "fp32-main-grads" in text or "fp32 main" in text:
        precision.gradient_accumulation = DataType.fp32


def zero_stage_of(row: Row) -> int:
    text = row.words("sharding")
    found = re.search(r"zero\D{0,2}(\d)", text)
    if found:
        return int(found.group(1))
    if "fsdp" in text or "fully" in text or "full_shard" in text:
        return 3
    return 1 if "distributed optimizer" in text else 0


def set_buffers(row: Row, config: RunConfig) -> None:
    """Buffers: DeepSpeed's defaults, and what the caveat says of the row's JSON."""
    zero, caveat = config.zero_stage, row.words("caveat")
    for key, name in (
        ("reduce_bucket_size", "reduce_bucket_size"),
        ("stage3_param_persistence_threshold", "param_persistence_threshold"),
        ("sub_group_size", "sub_group_size"),
    ):
        found = re.search(rf"{key}=([\d.e]+)", caveat)
        if found:
            setattr(zero, name, int(float(found.group(1).rstrip("."))))
    zero.overlap_comm = (
        "overlap_comm" in caveat or zero.stage == 3 or "stas00" in row["source_repo"]
    )


def set_loss(row: Row, config: RunConfig) -> None:
    loss = row.words("loss")
    if "liger" in loss and "no liger" not in loss:
        config.kernels.liger = "ce" in loss or "fused" in loss
        config.kernels.cross_entropy = CrossEntropyKind.liger_fused
    elif "chunk" in loss or "tiled" in loss:
        config.kernels.cross_entropy = CrossEntropyKind.chunked


def offload_of(row: Row) -> tuple[OffloadDevice, OffloadDevice]:
    text = row.words("offload")
    if not text or text.startswith("none"):
        return OffloadDevice.none, OffloadDevice.none
    where = OffloadDevice.nvme if "nvme" in text else OffloadDevice.cpu
    optimizer = where if "opt" in text else OffloadDevice.none
    parameters = where if "param" in text else OffloadDevice.none
    return optimizer, parameters


def capacity_of(row: Row) -> int | None:
    text = row.words("gpu", "value")
    found = re.search(r"(\d+)\s*g[bi]", text) or re.search(r"[ah]100[-_ ](\d+)|<=\s*(\d+)", text)
    if found:
        return int(next(filter(None, found.groups()))) * GIB
    for name, size in (("h200", 141), ("b200", 180), ("h100", 80), ("a100", 80)):
        if name in text:
            return size * GIB
    return None


def stage_blocks_of(row: Row, model: ModelConfig, pipeline: int) -> tuple[int, ...]:
    """Equal stages; where the embeddings count as blocks, the first and the last have one less."""
    layers = model.num_layers
    if pipeline == 1:
        return (layers,)
    if "embedding gets its own slot" in row.words("caveat"):
        whole = _equal(layers + 2, pipeline)
        return (whole[0] - 1, *whole[1:-1], whole[-1] - 1)
    return _equal(layers, pipeline)


def _equal(layers: int, pipeline: int) -> tuple[int, ...]:
    return tuple((layers + pipeline - 1 - stage) // pipeline for stage in range(pipeline))
