"""torch's `fully_shard` (FSDP2): sharded parameters, gradients and states, without DeepSpeed."""

from __future__ import annotations

from dataclasses import dataclass

from trainctl.config.schema import (
    CompileKind,
    CrossEntropyKind,
    DataType,
    EngineConfig,
    OffloadDevice,
    RunConfig,
)
from trainctl.config.schema.option import option
from trainctl.options.activation_checkpointing import recomputing_section
from trainctl.options.engine import EngineSpec
from trainctl.options.limits import Limit, never_value, only_value
from trainctl.options.optimizer import Maker, spec_of


@dataclass
class Fsdp2Config(EngineConfig):
    """Keys of FSDP2."""

    reduce_every_micro_batch: bool = option(
        True,
        "Reduce gradients after each micro-batch; false reduces them once per step, and keeps "
        "them unsharded until then.",
    )


def _fp32_or_none(name: str) -> Limit:
    """Return the limit that a gradient format is fp32 or not set."""

    def holds(config: RunConfig) -> bool:
        return getattr(config.precision, name) in (None, DataType.fp32)

    key = f"precision.{name}"
    return Limit(key=key, holds=holds, why=_FP32, nearest=f"{key}=fp32")


def _is_whole_offload(config: RunConfig) -> bool:
    places = {config.offload.optimizer, config.offload.parameters}
    return places in ({OffloadDevice.none}, {OffloadDevice.cpu})


def _keeps_inputs_here(config: RunConfig) -> bool:
    settings = recomputing_section(config)
    return settings is None or not settings.offload_to_cpu


_DATA = "is data parallel only"
_FP32 = "keeps fp32 shards, and adds up and sends gradients in fp32"
_PASS = "passes nothing on to DeepSpeed"
_PLUS = "has none of ZeRO++"
_VARIANT = "offloads to host memory by torch's own optimizers"
_OWN = "is for trainctl's own trainer; a program of yours gets DeepSpeed's JSON"

LIMITS = (
    Limit(
        key="zero_stage.stage",
        holds=lambda config: config.zero_stage.stage >= 2,
        why="has gradients and states in shards always: 2 keeps gathered weights from forward to "
        "backward, 3 gathers them twice",
        nearest="zero_stage=2",
    ),
    *(
        only_value(f"parallelism.{axis}", 1, _DATA)
        for axis in ("tensor", "pipeline", "sequence", "context", "expert")
    ),
    only_value(
        "model.num_experts", None, "has not been tried with mixtures of experts", "another model"
    ),
    Limit(
        key="precision.compute",
        holds=lambda config: config.precision.compute in ("fp32", "bf16"),
        why="computes in fp32 and bf16: it scales no loss, and casts nothing to fp8",
        nearest="precision=bf16",
    ),
    only_value("precision.autocast", False, "casts whole weights when it gathers them"),
    only_value("precision.master_weights", DataType.fp32, _FP32),
    only_value("precision.optimizer_states", DataType.fp32, _FP32),
    _fp32_or_none("gradient_accumulation"),
    _fp32_or_none("communication"),
    Limit(
        key="optimizer.kind",
        holds=lambda config: spec_of(config.optimizer).is_elementwise,
        why="steps optimizers that look at one element at a time",
        nearest="optimizer=adamw, adam, sgd or lion",
    ),
    Limit(
        key="optimizer.fused",
        holds=lambda config: (
            not config.optimizer.fused
            or spec_of(config.optimizer).fused_by in (Maker.torch, Maker.trainctl)
        ),
        why="has no kernel of DeepSpeed's",
        nearest="optimizer.fused=false",
    ),
    only_value(
        "gradients.centralize", False, "has no whole gradient to centralize before it is sent"
    ),
    Limit(
        key="offload.optimizer",
        holds=_is_whole_offload,
        why="offloads parameters, gradients and states together, to host memory",
        nearest="offload=cpu-all, or offload=none",
    ),
    Limit(
        key="offload.parameters",
        holds=lambda config: (
            config.offload.parameters is OffloadDevice.none or config.zero_stage.stage == 3
        ),
        why="gathers weights that are offloaded where they are used, forward and backward",
        nearest="zero_stage=3, or offload=none",
    ),
    only_value("offload.ratio", 1.0, _VARIANT, "offload.ratio=1"),
    only_value("offload.zenflow", False, _VARIANT),
    only_value("offload.super_offload", False, _VARIANT),
    only_value("zero_stage.hpz_partition_size", 1, _PLUS),
    only_value("zero_stage.quantized_weights", False, _PLUS),
    only_value("zero_stage.quantized_gradients", False, _PLUS),
    Limit(
        key="activation_checkpointing.offload_to_cpu",
        holds=_keeps_inputs_here,
        why="has not been tried with inputs of blocks in host memory",
        nearest="activation_checkpointing.offload_to_cpu=false",
    ),
    only_value("kernels.compile", CompileKind.none, "has not been tried with a compiler"),
    only_value("kernels.liger", False, "has not been tried with Liger's kernels"),
    never_value(
        "kernels.cross_entropy",
        CrossEntropyKind.liger_fused,
        "has not been tried with Liger's kernels",
        "kernels.cross_entropy=chunked",
    ),
    only_value("script", None, _OWN, "no script"),
    only_value("trainer", None, _OWN),
    Limit(
        key="deepspeed",
        holds=lambda config: not config.deepspeed,
        why=_PASS,
        nearest="leave deepspeed.* out",
    ),
)

SPEC = EngineSpec(
    name="fsdp2",
    keys=Fsdp2Config,
    build="trainctl.engines.fsdp2.engine:Fsdp2Backend",
    settings="trainctl.plans.fsdp2:derived_settings",
    phases="trainctl.memory.fsdp2:phases",
    offloaded="trainctl.memory.fsdp2:offloaded_components",
    gradients=DataType.fp32,
    limits=LIMITS,
)
