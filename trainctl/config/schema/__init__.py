"""Schema of all configuration keys: type, default, meaning, unit and range. Standard library only.

Each class of this package is one config group (`conf/<group>/`) or section. If the options of a
group are kinds (`config.registry`), the class has the keys that all kinds share, and each kind adds
its own. `option` attaches to a field what the reference documentation, the range check and the
error messages need. A value of ``None`` means "derived": `trainctl.plans` computes it and records
the reason. Enum members are named as users write them in YAML, and their values equal their names.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, fields, is_dataclass
from typing import Any

from trainctl.config.schema.alerts import AlertKind, AlertsConfig
from trainctl.config.schema.launcher import Accelerator, CpuBinding, HardwareConfig, LauncherConfig
from trainctl.config.schema.layout import (
    ActivationCheckpointingConfig,
    CompileKind,
    CrossEntropyKind,
    DataType,
    EngineConfig,
    GatherUnit,
    KernelsConfig,
    OffloadConfig,
    OffloadDevice,
    ParallelismConfig,
    PipelinePartition,
    PipelineSchedule,
    PrecisionConfig,
    ZeroStageConfig,
)
from trainctl.config.schema.model import AdapterConfig, AttentionKind, ModelConfig, WeightsKind
from trainctl.config.schema.optimization import (
    AdaptiveClipping,
    ExpertsConfig,
    GradientsConfig,
    GroupOverride,
    LrScaling,
    ObjectiveConfig,
    OnBadLoss,
    OptimizerConfig,
    ScheduleConfig,
    ScheduleUnit,
    StabilityConfig,
)
from trainctl.config.schema.option import option, section
from trainctl.config.schema.run import (
    DEDUP_THRESHOLDS,
    BeginDocuments,
    CheckpointConfig,
    DataConfig,
    DataExecutor,
    DataFromPaths,
    DataFromRecords,
    Dedup,
    HeldOutBy,
    LoggingConfig,
    OnBadText,
    OnTooLong,
    Packing,
    TokenizerConfig,
    TokenizerFromPath,
    TrainingConfig,
)
from trainctl.config.schema.sources import SourceConfig, StageConfig


@dataclass
class RunConfig:
    """Complete configuration of one run: all groups and sections."""

    model: ModelConfig = section(ModelConfig)
    adapter: AdapterConfig = section(AdapterConfig)
    optimizer: OptimizerConfig = section(OptimizerConfig)
    schedule: ScheduleConfig = section(ScheduleConfig)
    objective: ObjectiveConfig = section(ObjectiveConfig)
    gradients: GradientsConfig = section(GradientsConfig)
    engine: EngineConfig = section(EngineConfig)
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
    experts: ExpertsConfig = section(ExpertsConfig)
    callbacks: dict[str, Any] = option(
        {},
        "Callbacks of the training loop, by name and in the order of their calls, each with its "
        "keys; `callbacks=[NAME]` chooses their files.",
        each="callbacks",
        left_out_if_empty=True,
    )
    logging: LoggingConfig = section(LoggingConfig)
    launcher: LauncherConfig = section(LauncherConfig)
    hardware: HardwareConfig = section(HardwareConfig)
    recipe: str | None = option(
        None, "Name of the recipe that this configuration was composed from."
    )
    script: str | None = option(
        None,
        "Your own training script, started on every rank instead of trainctl's trainer.",
        local=True,
        runs_code=True,
    )
    script_arguments: list[str] = option(
        [], "Command-line arguments of the script: everything after `--`."
    )
    script_config_flag: str | None = option(
        "--deepspeed_config",
        "Flag appended to script_arguments, followed by the path of the DeepSpeed JSON, unless "
        "they already contain it; none appends nothing.",
    )
    trainer: str | None = option(
        None, "Your own training function, run in place of trainctl's trainer, as module:function."
    )
    deepspeed: dict[str, Any] = option(
        {}, "Additional keys of DeepSpeed's JSON that no trainctl key covers."
    )

    @property
    def trains_itself(self) -> bool:
        """Whether trainctl's own trainer runs, and not a script or function of the user's."""
        return self.script is None and self.trainer is None


GROUPS = tuple(
    item.name
    for item in fields(RunConfig)
    if "section" in item.metadata and item.name != "training"
)
"""Config groups: sections with a folder of options under `conf/`."""

LIST_GROUPS = ("callbacks",)
"""Config groups of which a run chooses any number, as a list. `GROUP.NAME` has an option's keys."""


def walk_leaves(config: Any, prefix: str = "") -> Iterator[tuple[str, Field[Any], Any]]:
    """Yield the dotted key, the field and the value of every leaf of a config."""
    for item in fields(config):
        value = getattr(config, item.name)
        if is_dataclass(value):
            yield from walk_leaves(value, f"{prefix}{item.name}.")
        else:
            yield f"{prefix}{item.name}", item, value
