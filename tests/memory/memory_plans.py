"""Plans for the memory tests, built without resolution: the budget reads only these fields."""

from __future__ import annotations

from typing import Any

from trainctl.config.schema import Accelerator, ModelConfig, RunConfig
from trainctl.hardware import Hardware
from trainctl.plans.derive import blocks_of_stages
from trainctl.plans.types import Batch, Mesh, RunPlan
from trainctl.tuning.speed import with_values

GIB = 2**30

LLAMA_3_8B = ModelConfig(
    name="llama-8b",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=131_072,
)
LLAMA_2_7B = ModelConfig(
    name="llama-7b",
    vocab_size=32_000,
    hidden_size=4096,
    intermediate_size=11_008,
    num_layers=32,
    num_attention_heads=32,
    max_position_embeddings=4096,
)
GPT2 = ModelConfig(
    name="gpt2",
    family="gpt2",
    vocab_size=50_257,
    hidden_size=768,
    intermediate_size=3072,
    num_layers=12,
    num_attention_heads=12,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)
TINY = ModelConfig()


def make_plan(
    model: ModelConfig = TINY,
    *,
    devices: int = 8,
    nodes: int = 1,
    accelerator: Accelerator = Accelerator.cuda,
    device_memory: int | None = 80 * GIB,
    micro_batch: int = 1,
    accumulation: int = 1,
    sequence_length: int = 2048,
    tensor: int = 1,
    pipeline: int = 1,
    sequence: int = 1,
    context: int = 1,
    deepspeed: dict[str, Any] | None = None,
    **settings: Any,
) -> RunPlan:
    """Make a plan without its DeepSpeed JSON, which the budget does not read.

    `settings` are dotted keys with ``__`` for the dot (``zero_stage__stage=3``).
    """
    config = RunConfig(model=model, deepspeed=deepspeed or {})
    axes = config.parallelism
    axes.tensor, axes.pipeline, axes.sequence, axes.context = tensor, pipeline, sequence, context
    config = with_values(config, {k.replace("__", "."): value for k, value in settings.items()})
    data = devices * nodes // (tensor * pipeline * axes.sequence_parts)
    return RunPlan(
        config=config,
        hardware=Hardware(
            name="test",
            accelerator=accelerator,
            nodes=nodes,
            devices_per_node=devices,
            device_memory_bytes=device_memory,
        ),
        mesh=Mesh(data=data, tensor=tensor, pipeline=pipeline, sequence=sequence, context=context),
        batch=Batch(
            global_batch_size=micro_batch * accumulation * data,
            micro_batch_size=micro_batch,
            gradient_accumulation_steps=accumulation,
            sequence_length=sequence_length,
        ),
        total_steps=10,
        stop_step=10,
        warmup_steps=0,
        stage_blocks=blocks_of_stages(model, config.parallelism, sequence_length=sequence_length),
        deepspeed={},
    )
