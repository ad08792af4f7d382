"""Differences of other frameworks from DeepSpeed with transformers: a table, and code of blocks.

Megatron-LM, FSDP and trainers on one device hold the same 16 bytes per parameter in other places,
implement blocks differently, and hold other copies of the logits.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import memory_blocks as blocks
import memory_megatron as megatron
from memory_rows import NotExpressible, Recompute, Row
from memory_settings import (
    check_sharding,
    frozen_bytes,
    is_autocast,
    is_compiled,
    is_pure,
    offload_of,
    precision_words,
    recompute_of,
    uses_foreach,
)

from trainctl.config.schema import (
    AttentionKind,
    ModelConfig,
    OffloadDevice,
)
from trainctl.memory import constants
from trainctl.memory.activations import BlockActivations, compute_bytes
from trainctl.memory.constants import LogitBytes
from trainctl.memory.engine import EngineMemory
from trainctl.plans.types import LayoutPlan

FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """Placement of states by a framework other than DeepSpeed; bytes per parameter."""

    weights: float = 0
    """Weights, whole on each rank."""
    weight_shard: float = 0
    """Weights, sharded over the data-parallel ranks."""
    gradients: float = 0
    """Persistent gradient buffers, whole on each rank."""
    late_gradients: float = 0
    """Gradients that are allocated during the backward pass, whole on each rank."""
    late_shard: float = 0
    states: float = 0
    state_shard: float = 0
    gathered: int = 0
    """Number of blocks gathered at a time, in the compute type."""
    keeps_gathered: bool = False
    """Whether gathered weights stay from the forward to the backward pass."""
    buckets: float = 0
    """Communication buffers."""
    in_flight: int = 2
    """Bytes per element of the gradient that is being computed (of a tensor or a block)."""
    cast: float = 0
    """Weights cast to the compute type and kept (autocast)."""


TRAINERS = {
    # fp32 shards cast for each gather; gradients are reduced in fp32 and appear in backward. Three
    # blocks: the one in use, the one being gathered, and the buffer it is copied out of.
    "fsdp": Trainer(weight_shard=4, late_shard=4, state_shard=8, gathered=3, in_flight=6),
    "fsdp shard_grad_op": Trainer(
        weight_shard=4, late_shard=4, state_shard=8, gathered=3, in_flight=6, keeps_gathered=True
    ),
    "fsdp bf16": Trainer(weight_shard=2, late_shard=2, state_shard=4, gathered=3, in_flight=4),
    # CPUOffloadPolicy: shards, their gradients and the moments are on the host.
    "fsdp offload": Trainer(gathered=3, in_flight=6),
    # fp32 weights, gradients and moments everywhere, and the reducer's buckets.
    "ddp autocast": Trainer(weights=4, late_gradients=4, states=8, buckets=4, cast=2, in_flight=4),
    "ddp bf16": Trainer(weights=2, late_gradients=2, states=4, buckets=2),
    "ddp fp32": Trainer(weights=4, late_gradients=4, states=8, buckets=4, in_flight=4),
    "one device autocast": Trainer(weights=4, late_gradients=4, states=8, cast=2, in_flight=4),
    "one device bf16": Trainer(weights=2, late_gradients=2, states=4),
    # litgpt accumulates several micro-batches per step, so gradients are alive in the forward pass.
    "litgpt": Trainer(weights=2, gradients=2, states=4),
    "one device fp32": Trainer(weights=4, late_gradients=4, states=8, in_flight=4),
}
"""Placement in each framework: parts of 16 bytes per parameter, and additional buffers."""


AUTOCAST = (TRAINERS["ddp autocast"], TRAINERS["one device autocast"])


JAX = ("jax", "maxtext", "tensorflow", "mindspore", "paddle", "levanter", "t5x", "mesh")


def trainer_of(row: Row) -> Trainer | megatron.Job | None:
    """Return the placement of states by the row's framework; None is DeepSpeed.

    Raises:
        NotExpressible: It is no framework of torch's, or its partitioning is unknown.
    """
    framework, sharding = row.words("framework"), precision_words(row, "sharding")
    if any(name in framework for name in JAX):
        raise NotExpressible(f"{row['framework']}: torch's allocator is not used")
    if "colossal" in framework and "zero" not in sharding and "ddp" not in sharding:
        raise NotExpressible(f"{row['framework']}: no term for its buffers")
    check_sharding(row)
    if re.search(r"megatron|nemo(?!.*auto)", framework) and "deepspeed" not in framework:
        return megatron.job_of(row)
    adapted = frozen_bytes(row)
    offloaded = OffloadDevice.none not in offload_of(row)
    divides = re.search(r"fsdp|full_shard|shard_grad|fully|hsdp", sharding) or (
        re.search(r"torchtitan|fsdp", framework) and "ddp" not in sharding
    )
    if divides and "no_shard" not in sharding:
        if adapted is not None:
            # Fabric's FSDP flattens a block to one parameter. It has a whole gradient if an adapter
            # in it trains, and is not reduced between micro-batches.
            whole = adapted if "litgpt" in framework else 0
            return Trainer(weight_shard=adapted, gradients=whole, gathered=3)
        if offloaded:
            return TRAINERS["fsdp offload"]
        if re.search(r"shard_grad_op|zero-?2", sharding):
            return TRAINERS["fsdp shard_grad_op"]
        return TRAINERS["fsdp bf16" if is_pure(row) else "fsdp"]
    if "deepspeed" in framework or re.search(r"zero[- ]?[1-3]|zero-offload|zero\+\+", sharding):
        return None
    if offload_of(row) != (OffloadDevice.none, OffloadDevice.none):
        raise NotExpressible(f"offload '{row['offload']}' without FSDP or ZeRO")
    if adapted is not None:
        return Trainer(weights=adapted)
    many = row.number("dp", row.number("world_gpus", 1)) > 1
    kind = "ddp" if many else "one device"
    if "fp32" in sharding and not re.search(r"bf16|fp16|fp8|mixed|amp|autocast", sharding):
        return TRAINERS[f"{kind} fp32"]
    if "litgpt" in framework and "mixed" not in sharding:
        return TRAINERS["ddp bf16" if many else "litgpt"]
    pure = is_pure(row)
    return TRAINERS[f"{kind} bf16" if pure else f"{kind} autocast"]


def update_temporaries(row: Row, engine: EngineMemory) -> int:
    """Return the number of second-moment copies in one update: its root, where torch's Adam updates
    all tensors together (`_multi_tensor_adam`, torch/optim/adam.py).
    """
    return int(engine.optimizer.kind == "adamw" and uses_foreach(row))


def logit_bytes_of(row: Row, engine: EngineMemory) -> LogitBytes:
    loss, framework = row.words("loss"), row.words("framework")
    if "litgpt" in framework:
        # Fabric returns the model's output in fp32. The log-softmax is kept for all chunks of the
        # logits; the backward pass handles one chunk at a time.
        return LogitBytes(forward=8, backward=8)
    if "bf16 logits" in loss and not is_autocast(row):
        # Log-softmax in bf16; a variable of the program keeps the logits through the backward pass.
        return LogitBytes(forward=4, backward=8)
    if "vocab-parallel" in loss or "megatron" in framework:
        # Softmax in fp32, in place; its gradient is written over it, then cast.
        return LogitBytes(forward=6, backward=6)
    if "llm-foundry" in framework or "mosaic" in framework or re.match(r"fused(?!.*linear)", loss):
        # flash-attn's loss: 16-bit logits and their gradient.
        return LogitBytes(forward=2, backward=4)
    if "shift copy" in loss and not is_autocast(row) and engine.weight_bytes < FP32:
        # The logits, their copy without the last token and the log-softmax, in 16 bits; the
        # backward pass adds the log-softmax and two gradients.
        return LogitBytes(forward=6, backward=6)
    if "compile" in loss or (is_compiled(row) and not re.search(r"block|layer", row["compile"])):
        return LogitBytes(forward=4, backward=6)
    return constants.LOGIT_BYTES[engine.weight_bytes]


def block_of(row: Row, plan: LayoutPlan, engine: EngineMemory) -> BlockActivations | None:
    """Return the activations of a block of the row's own code; None is transformers'."""
    model = plan.config.model
    code = _code(row, model)
    if code is None:
        return None
    if recompute_of(row)[0] is Recompute.attention:
        code = replace(code, scores=0)
    elif plan.config.model.attention is AttentionKind.eager and not code.scores:
        # Under autocast the softmax runs in fp32, and its result is cast for the product.
        autocast = trainer_of(row) in AUTOCAST
        code = replace(code, scores=6 if autocast else compute_bytes(plan), fp32_softmax=autocast)
        if _is_opt(model):
            # The scores and their maximum with the smallest finite number, and for fp16 the softmax
            # in fp32 (modeling_opt.py of transformers before 4.48).
            fp16 = "fp16" in precision_words(row)
            code = replace(code, scores=8 if fp16 else 2 * compute_bytes(plan), fp32_softmax=fp16)
        elif code.dropout:
            code = replace(code, scores=code.scores + 1 + compute_bytes(plan))
    text = row.words("cp_sp", "sharding", "caveat", "id", "model")
    titan = "torchtitan" in row.words("framework")
    if titan or re.search(r"sequence[-_ ]parallel|\btp\+sp\b|\bsp\b", text):
        code = replace(code, sequence_parallel=True)
    return blocks.block(
        model,
        replace(code, alternate=titan),
        key_heads=_key_heads(row, model),
        sequence_length=plan.batch.sequence_length,
        element=2 if engine.weight_bytes == 2 or engine.autocast else 4,
        tensor=plan.mesh.tensor,
    )


def _key_heads(row: Row, model: ModelConfig) -> int:
    """Return the number of key heads that attention keeps; litgpt repeats keys for every query."""
    own = row.number("kv_heads", 0)
    return model.num_attention_heads if not own or "litgpt" in row.words("framework") else own


TRANSFORMERS = (
    "deepspeed",
    "transformers",
    "hugging",
    "accelerate",
    "trl",
    "axolotl",
    "llama-factory",
)


def _code(row: Row, model: ModelConfig) -> blocks.Code | None:
    """Return the block implementation of a row; None is transformers', which the budget knows."""
    framework = row.words("framework")
    gated = model.family != "gpt2"
    if model.name == "SimpleTransformer":
        return blocks.TORCH_AUTOCAST if is_autocast(row) else blocks.TORCH
    if "megatron" in framework:
        return blocks.MEGATRON_UNFUSED
    adapts = frozen_bytes(row) is not None
    if is_compiled(row) and not adapts:
        return blocks.COMPILED if gated else blocks.COMPILED_GELU
    if any(word in framework for word in TRANSFORMERS):
        return None if gated else _gelu(row, model)
    if adapts and "litgpt" in framework:
        return blocks.LITGPT_LORA if gated else blocks.LITGPT_LORA_GELU
    if adapts:
        return blocks.FROZEN if gated else blocks.FROZEN_GELU
    if "litgpt" in framework and gated:
        return blocks.PLAIN_FP32_NORM
    code = blocks.PLAIN if gated else blocks.PLAIN_GELU
    # Under autocast the residual stream is fp32.
    return replace(code, norm=code.norm + 2) if trainer_of(row) in AUTOCAST else code


def _gelu(row: Row, model: ModelConfig) -> blocks.Code | None:
    """Return the block of transformers' models without a gate; None is GPT-2 without dropout, which
    the budget knows.

    GPT-2 and OPT apply dropout of 0.1 to what blocks add unless configured otherwise. OPT's ReLU
    keeps only its result, GPT-2's GELU is written in Python, others use torch's.
    """
    drops = not re.search(r"dropout[ =:]*(0\b|none|off)|no dropout", row.words("caveat"))
    if _is_opt(model):
        return replace(blocks.PLAIN_GELU, inner=1, dropout=drops)
    if re.search(r"gpt-?2", model.name.lower()):
        return replace(blocks.PLAIN_GELU, inner=5, dropout=True) if drops else None
    return blocks.PLAIN_GELU


def _is_opt(model: ModelConfig) -> bool:
    return model.name.lower().startswith(("opt", "facebook/opt"))
