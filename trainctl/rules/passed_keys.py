"""Treatment of every key of DeepSpeed's JSON in the `deepspeed` section: a closed list.

A key that is derived from a config key is set by the config key. A key that the trainer relies on
belongs to the trainer, but a user's own program may set it. Some of the other keys change neither
loss nor gradient norm, as `tests/train/test_passed_keys_on_ranks.py` shows with real runs; nothing
reads the rest. `tests/plans/test_passed_keys.py` verifies that every key of the schema is in one of
these tables.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from trainctl.config.derived import DerivedValue
from trainctl.config.schema import RunConfig
from trainctl.config.suggest import words
from trainctl.hardware import Hardware
from trainctl.plans.deepspeed import BATCH_KEYS, nest_settings
from trainctl.plans.deepspeed_table import (
    CONDITIONS,
    PARAMETERS,
    SOURCES,
    STATES,
    ZENFLOW,
    ZERO,
    Modes,
    config_value,
)
from trainctl.plans.types import Mesh
from trainctl.rules.deepspeed.case import Case, JsonContext, Names, command_line_text
from trainctl.rules.deepspeed_schema import Schema, load

CONFIG_KEYS = SOURCES | {
    "zero_optimization.stage": "zero_stage.stage",
    "optimizer.type": "optimizer.kind",
    "data_types.grad_accum_dtype": "precision.gradient_accumulation",
    "torch_autocast.enabled": "precision.autocast",
}
"""Config key by the JSON key derived from it."""

CONFIG_OWNED_KEYS = {key: f"use {source}" for key, source in CONFIG_KEYS.items()} | {
    **dict.fromkeys(BATCH_KEYS, "use training.global_batch_size and training.micro_batch_size"),
    "data_parallel_size": "it is derived from the devices: use parallelism.data",
    "optimizer": "use the optimizer group",
    "expert_parallel": "use parallelism.expert",
    "tensor_parallel.autotp_size": "use parallelism.tensor",
    "sequence_parallel_size": "use parallelism.sequence",
    "seq_parallel_communication_data_type": "use precision.communication",
    "gradient_clipping": "use optimizer.gradient_clipping",
    "bfloat16": "use the precision group",
    "communication_data_type": "use precision.communication",
    "compile.deepcompile": "use kernels.compile=deepcompile",
    "log_level": "use logging.deepspeed_level",
    f"{ZERO}.cpu_offload": "use the offload group",
    f"{ZERO}.cpu_offload_param": "use the offload group",
    f"{ZERO}.cpu_offload_use_pin_memory": "use offload.pin_memory",
}
"""Keys and sections that config keys set, with what to use instead; refused for every program."""

_OWN_LOGGERS = (
    "use {} in logging.to: this would get nothing but the learning rate, and begin again at 0 "
    "after a resume"
)
_UNTRIED = "trainctl trains with DeepSpeed's default only"
TRAINER_OWNED_KEYS = {
    "scheduler": "the trainer sets the learning rate at each step: use the schedule group",
    "activation_checkpointing": "use the activation_checkpointing group",
    "autotuning": "use `trainctl plan`, which searches, or `trainctl sweep`",
    "checkpoint": "the trainer writes checkpoints of its own: use the checkpoint section",
    "datastates_ckpt": "the trainer writes checkpoints of its own: use the checkpoint section",
    "comet": _OWN_LOGGERS.format("a logger, such as wandb,"),
    "csv_monitor": "every run has its steps as tables: RUN/steps/attempt-N.csv",
    "tensorboard": _OWN_LOGGERS.format("tensorboard"),
    "wandb": _OWN_LOGGERS.format("wandb"),
    "aio.use_gds": _UNTRIED,
    "bf16": "use the precision group",
    "compile": _UNTRIED,
    "data_efficiency": "the trainer reads the data: use the data section and training.batch_ramp",
    "data_types": "use the precision group",
    "fp16": "use the precision group",
    "gradient_allreduce_op": "the trainer counts on the mean over the ranks",
    "hybrid_engine": "it is for generating between steps, which the trainer does not do",
    "managed_gradient_accumulation": "the trainer counts on DeepSpeed to accumulate",
    "pipeline": "use parallelism.pipeline",
    "steps_per_print": "the trainer reports itself: use logging.every_steps",
    "tensor_parallel": "use parallelism.tensor",
    "torch_autocast": "use the precision group",
    "use_data_before_expert_parallelism": "use parallelism.expert",
    "wall_clock_breakdown": "the trainer reports the time of each part of a step itself",
    "zero_allow_untested_optimizer": "trainctl sets it where the optimizer needs it",
    "zero_force_ds_cpu_optimizer": "trainctl chooses the kernel that updates",
    STATES: "use the offload group",
    PARAMETERS: "use the offload group",
    ZENFLOW: "use offload.zenflow and the keys beside it",
    f"{ZERO}.compute_grad_norm": "the trainer needs the norm of the gradients",
    f"{ZERO}.round_robin_gradients": "checkpoints hold the states in the order of the parameters",
    f"{ZERO}.stage3_module_granularity_threshold": "use zero_stage.gather",
    f"{ZERO}.leaf_module": "use zero_stage.gather",
    f"{ZERO}.save_muon_momentum_buffer_in_memory": _UNTRIED,
    f"{ZERO}.zero_quantized_nontrainable_weights": "use adapter.base_weights",
}
"""Keys and sections that the trainer relies on, with what to use instead; a user's own program
may set them.
"""

_READ_UNDER = {
    "": """
    comms_logger.debug comms_logger.enabled comms_logger.prof_all comms_logger.prof_ops
    comms_logger.verbose disable_python_gc dump_state gradient_predivide_factor memory_breakdown
    prescale_gradients timers.throughput.enabled timers.throughput.synchronized
    """,
    # With stages, DeepSpeed starts a profiler timer twice and fails.
    "no stages": """
    flops_profiler.detailed flops_profiler.enabled flops_profiler.module_depth
    flops_profiler.output_file flops_profiler.profile_step flops_profiler.recompute_fwd_factor
    flops_profiler.top_modules
    """,
    "stage 1 or 2": """
    zero_optimization.ignore_unused_parameters zero_optimization.parameter_alignment
    zero_optimization.use_multi_rank_bucket_allreduce
    """,
    "stage 3": """
    zero_optimization.enable_sanity_checks zero_optimization.log_trace_cache_warnings
    zero_optimization.memory_efficient_linear zero_optimization.stage3_allgather_sequential
    zero_optimization.stage3_model_persistence_threshold
    zero_optimization.stage3_use_all_reduce_for_fetch_params
    """,
    "nvme": """
    aio.block_size aio.intra_op_parallelism aio.overlap_events aio.queue_depth aio.single_submit
    """,
}
PASS_THROUGH_KEYS = {key: need for need, keys in _READ_UNDER.items() for key in words(keys)}
"""Keys that change neither loss nor gradient norm, each with the condition in `CONDITIONS` under
which DeepSpeed reads it; empty for always.
"""

_OWN_CHECKPOINTS = "the trainer writes and reads checkpoints of its own"
UNREAD_KEYS = {
    "allgather_size": "DeepSpeed has dropped it",
    "dataloader_drop_last": "the trainer reads the data itself",
    "disable_allgather": "DeepSpeed reads it nowhere",
    "vocabulary_size": "DeepSpeed reads it nowhere",
    "weight_quantization": "it is read by DeepSpeed's inference only",
    f"{ZERO}.allgather_partitions": "DeepSpeed reads it nowhere",
    f"{ZERO}.elastic_checkpoint": _OWN_CHECKPOINTS,
    f"{ZERO}.legacy_stage1": "the old stage 1 is gone",
    f"{ZERO}.load_from_fp32_weights": _OWN_CHECKPOINTS,
    f"{ZERO}.override_module_apply": "the trainer makes the parameters one at a time",
    f"{ZERO}.pipeline_loading_checkpoint": _OWN_CHECKPOINTS,
    f"{ZERO}.stage3_gather_16bit_weights_on_model_save": "`trainctl export` writes the weights",
    f"{ZERO}.stage3_gather_fp16_weights_on_model_save": "`trainctl export` writes the weights",
}
"""Keys and sections that nothing reads when the trainer runs the steps, with the reasons."""

TABLES: tuple[Mapping[str, str], ...] = (
    CONFIG_OWNED_KEYS,
    TRAINER_OWNED_KEYS,
    PASS_THROUGH_KEYS,
    UNREAD_KEYS,
)


def canonical_key(name: str, schema: Schema | None = None) -> str:
    """Return a dotted JSON key in trainctl's spelling: DeepSpeed accepts two for some keys."""
    known = (schema or load()).keys.get(name)
    return (known and known.same_as) or name


def entry_of(name: str, schema: Schema | None = None) -> str:
    """Return the table entry of a JSON key: the key itself, or the innermost section listed.

    `name` is dotted, in any spelling that DeepSpeed accepts. `schema` belongs to the installed
    DeepSpeed; the newest known by default. Returns an empty string for a key in no table.
    """
    parts = canonical_key(name, schema).split(".")
    sections = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((each for each in sections if any(each in table for table in TABLES)), "")


def owner_of(name: str, config: RunConfig) -> str:
    """Return what to use instead of a JSON key that is not passed through; empty if it is."""
    entry = entry_of(name)
    return CONFIG_OWNED_KEYS.get(entry) or (
        TRAINER_OWNED_KEYS.get(entry, "") if config.trains_itself else ""
    )


def idle_reason(name: str, config: RunConfig) -> str:
    """Return why nothing reads a passed-through key; empty if something does."""
    entry = entry_of(name)
    if not config.trains_itself:
        return ""
    need = PASS_THROUGH_KEYS.get(entry, "")
    if need:
        needed, is_met = CONDITIONS[need]
        if not is_met(Modes.of(config)):
            return f"it needs {needed}"
    return UNREAD_KEYS.get(entry, "")


OPTIONS = {"zero_stage.stage": "zero_stage", "optimizer.kind": "optimizer"}
"""Groups whose option has the same name as the value of a key."""


class PlanNames(Names):
    """Names for a plan's JSON: the config keys that its keys are derived from, as typed."""

    def __init__(self, config: RunConfig, passed: Sequence[DerivedValue] = ()) -> None:
        self._config = config
        self._passed = [setting.key for setting in passed]

    def passes(self, key: str) -> bool:
        """Return True if the user passes through the JSON key, a part of it, or its section."""
        return any(keys_overlap(key, other) for other in self._passed)

    def key(self, key: str) -> str:
        return f"deepspeed.{key}" if self.passes(key) else CONFIG_KEYS.get(key, key)

    def setting(self, key: str, value: Any) -> str:
        typed = None if self.passes(key) else config_value(self._config, CONFIG_KEYS.get(key, ""))
        return super().setting(self.key(key), value if typed is None else typed)

    def fix(self, key: str, value: Any) -> str:
        ours = self.key(key)
        if ours in OPTIONS:
            return f"{OPTIONS[ours]}={command_line_text(value).lower()}"
        return super().fix(ours, value)

    def stages(self, count: int) -> str:
        return f"parallelism.pipeline={count}"


def plan_json_case(
    config: RunConfig,
    hardware: Hardware,
    mesh: Mesh | None,
    settings: Sequence[DerivedValue],
    passed: Sequence[DerivedValue] = (),
) -> Case:
    """Build the case of a plan's JSON, as the common rules check it.

    `hardware` is the hardware of the run. `mesh` takes the place of the script's own mpu for
    DeepSpeed; None if no mesh is possible. `settings` are the JSON keys that trainctl sets, and
    `passed` those that the user passes through.
    """
    around = JsonContext(
        world_size=hardware.world_size,
        data_parallel_size=None if mesh is None else mesh.data,
        devices_per_node=hardware.devices_per_node,
        accelerator=hardware.accelerator,
        pipeline_stages=config.parallelism.pipeline,
        trainctl_trainer=config.trains_itself,
    )
    return Case(nest_settings((*settings, *passed)), around, names=PlanNames(config, passed))


def keys_overlap(key: str, other: str) -> bool:
    """Return True if two dotted keys are equal, or one is inside the section named by the other."""
    return f"{key}.".startswith(f"{other}.") or f"{other}.".startswith(f"{key}.")
