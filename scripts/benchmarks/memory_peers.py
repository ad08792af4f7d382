"""Other estimators applied to a row: bytes on a device, or None where they have no answer.

DeepSpeed's and accelerate's estimates come from their own functions. EleutherAI's and Megatron's
are programs for other purposes, so their formulas are written out here with their source.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache

from memory_cases import Case

from trainctl.config.schema import OffloadDevice
from trainctl.plans.shapes import count_parameters, head_dim, key_value_heads


def deepspeed(case: Case) -> float | None:
    """Estimate with `estimate_zero2_model_states_mem_needs` or its ZeRO-3 counterpart
    (deepspeed/runtime/zero).

    They know no tensor or pipeline parallelism, so they get the parameters of a rank, and the
    number of data-parallel ranks as devices. Stages 0 and 1 have no estimator and use that of stage
    2.
    """
    functions = _deepspeed_functions()
    if functions is None:
        return None
    zero2, zero3 = functions
    plan, config = case.plan, case.plan.config
    mesh = plan.mesh
    total = _parameters(case) // (mesh.tensor * mesh.pipeline)
    ranks = mesh.data * mesh.sequence
    offload = config.offload.optimizer is not OffloadDevice.none
    if config.zero_stage.stage < 3:
        _, device = zero2(total, num_gpus_per_node=ranks, num_nodes=1, cpu_offload=offload)
        return float(device)
    whole = case.held[0]
    _, device, _ = zero3(
        total,
        max(whole.block_parameters, whole.embedding),
        num_gpus_per_node=ranks,
        num_nodes=1,
        cpu_offload=offload,
        cpu_offload_params=config.offload.parameters is not OffloadDevice.none,
    )
    return float(device)


@cache
def _deepspeed_functions() -> (
    tuple[Callable[..., tuple[int, int]], Callable[..., tuple[int, int, int]]] | None
):
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # otherwise it prints that it found no other
    try:
        from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
        from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
    except ImportError:
        return None
    return estimate_zero2_model_states_mem_needs, estimate_zero3_model_states_mem_needs


def _parameters(case: Case) -> int:
    """Return the parameters of the whole model, or of a stack of linear layers."""
    if not case.row["heads"]:
        return case.held[0].parameters
    return count_parameters(case.plan.config.model).total


def accelerate(case: Case) -> float | None:
    """Estimate as `accelerate estimate-memory`: the largest of model, gradients and optimizer on
    one device (`estimate_training_usage`, accelerate/commands/estimate.py).
    """
    function = _accelerate_function()
    if function is None:
        return None
    sixteen = case.engine.weight_bytes == 2 or case.engine.autocast
    size = 4 * _parameters(case)
    usage = function(size, "bfloat16" if sixteen else "float32")
    return float(max(usage.values()))


@cache
def _accelerate_function() -> Callable[[int, str], dict[str, int]] | None:
    try:
        from accelerate.commands.estimate import estimate_training_usage
    except ImportError:
        return None
    function: Callable[[int, str], dict[str, int]] = estimate_training_usage
    return function


def eleuther(case: Case) -> float | None:
    """Estimate by EleutherAI's cookbook, calc/calc_transformer_mem.py, with its defaults.

    The embedding is never tied, gradients are in fp32, there are an all-gather bucket and 10^9 live
    parameters, and 34 bytes per token, width and layer whether or not activations are recomputed.
    """
    plan, model = case.plan, case.plan.config.model
    if not case.row["heads"]:
        return None
    mesh, hidden, layers = plan.mesh, model.hidden_size, model.num_layers
    world = mesh.world_size
    keys = key_value_heads(model) / model.num_attention_heads
    matrices = 3 if model.family != "gpt2" else 2
    total = (
        2 * model.vocab_size * hidden
        + hidden * plan.batch.sequence_length
        + 8 * hidden * layers
        + 2 * hidden
        + 2 * (1 + keys) * layers * hidden**2
        + matrices * layers * hidden * model.intermediate_size
    )
    low = 2 if case.engine.weight_bytes == 2 or case.engine.autocast else 4
    stage = plan.config.zero_stage.stage
    weights = low * total / (mesh.tensor * mesh.pipeline) / (world if stage == 3 else 1)
    gradients = 4 * total / (world if stage >= 2 else 1)
    states = 12 * total / (world if stage >= 1 else 1)
    communication = 0.0
    if world > 1:
        communication += 5e8 * low if stage >= 1 else 0
        communication += 1e9 * low if stage == 3 else 0
    tokens = plan.batch.sequence_length * plan.batch.micro_batch_size
    activations = tokens * hidden * layers * (16 * low + 2.0)
    if plan.config.activation_checkpointing.mode == "none":
        scores = model.num_attention_heads * plan.batch.sequence_length / hidden
        activations += tokens * hidden * layers * (2 * low + 1) * scores
    return weights + gradients + states + communication + activations


def megatron(case: Case) -> float | None:
    """Estimate the first pipeline stage by Megatron-LM,
    megatron/training/theoretical_memory_usage.py.

    A parameter takes 18 bytes, or 6 + 12/N; activations (18 + 4 f/h) bytes per token, width and
    layer, divided by the tensor-parallel size, for as many micro-batches as stages; a logit 4 bytes
    without a pipeline.
    """
    plan, model = case.plan, case.plan.config.model
    if not case.row["heads"]:
        return None
    mesh, hidden = plan.mesh, model.hidden_size
    gated = model.family != "gpt2"
    keys = key_value_heads(model) / model.num_attention_heads
    ratio = head_dim(model) * model.num_attention_heads / hidden
    norm = 1 if gated else 2
    layer = (
        2 * hidden * (model.intermediate_size * (1.5 if gated else 1) + norm)
        + 2 * hidden**2 * (1 + keys) * ratio
    )
    embedding = hidden * model.vocab_size
    shard = (layer * model.num_layers + norm * hidden) / mesh.pipeline + embedding
    if not model.tie_word_embeddings and mesh.pipeline == 1:
        shard += embedding
    distributed = plan.config.zero_stage.stage >= 1
    states = shard / mesh.tensor * (6 + 12 / mesh.data if distributed else 18)
    tokens = plan.batch.sequence_length * plan.batch.micro_batch_size
    width = 18 + 4 * model.intermediate_size / hidden
    activations = tokens * hidden * width * model.num_layers
    activations += tokens * (8 + hidden) * mesh.pipeline
    if mesh.pipeline == 1:
        activations += 4 * tokens * hidden * (1 + model.vocab_size / hidden)
    return states + activations / mesh.tensor


PEERS: dict[str, Callable[[Case], float | None]] = {
    "DeepSpeed": deepspeed,
    "EleutherAI": eleuther,
    "Megatron": megatron,
    "accelerate": accelerate,
}
