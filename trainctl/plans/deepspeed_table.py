"""Table of the DeepSpeed JSON keys that correspond to one config key each.

The renderer writes the JSON from it, the importer reads a JSON back through it. The batch, the
optimizer and the schedule are not here: they need arithmetic, or have modules of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from trainctl.config.codec import value_at
from trainctl.config.derived import DerivedValue, derived
from trainctl.config.schema import RunConfig
from trainctl.plans.settings import number_formats

ZERO = "zero_optimization"
STATES = f"{ZERO}.offload_optimizer"
PARAMETERS = f"{ZERO}.offload_param"
ZENFLOW = f"{ZERO}.zenflow"
PREFETCH = f"{ZERO}.stage3_prefetch_bucket_size"


@dataclass(frozen=True, slots=True, kw_only=True)
class Modes:
    """Modes of a config or JSON that decide which keys the JSON has."""

    stage: int
    weights: str
    """Number format of the weights that the model computes with."""
    states: str
    """Device of the optimizer's states: none, cpu or nvme."""
    parameters: str
    """Device of the parameters: none, cpu or nvme."""
    zenflow: bool
    """Whether ZenFlow is enabled."""
    by_steps: bool = True
    """Whether ZenFlow counts its intervals in steps (otherwise in epochs)."""
    pipeline: int = 1
    """Number of pipeline stages; 1 means no pipeline."""

    @classmethod
    def of(cls, config: RunConfig) -> Modes:
        """Return the modes of a config."""
        offload = config.offload
        return cls(
            stage=config.zero_stage.stage,
            weights=number_formats(config.precision).weights.value,
            states=offload.optimizer.value,
            parameters=offload.parameters.value,
            zenflow=offload.zenflow,
            pipeline=config.parallelism.pipeline,
        )


_ZENFLOW = "offload.optimizer=cpu and offload.zenflow=true"
CONDITIONS: dict[str, tuple[str, Callable[[Modes], bool]]] = {
    "sharded": ("ZeRO stage 1 or more", lambda modes: modes.stage > 0),
    "stage 1 or 2": ("ZeRO stage 1 or 2", lambda modes: modes.stage in (1, 2)),
    "stage 3": ("ZeRO stage 3", lambda modes: modes.stage == 3),
    "states away": ("offload of the optimizer", lambda modes: modes.states != "none"),
    "states away at 3": (
        "offload of the optimizer at ZeRO stage 3",
        lambda modes: modes.states != "none" and modes.stage == 3,
    ),
    "states on nvme": ("offload.optimizer=nvme", lambda modes: modes.states == "nvme"),
    "zenflow": (_ZENFLOW, lambda modes: modes.states != "none" and modes.zenflow),
    "zenflow by steps": (
        _ZENFLOW,
        lambda modes: modes.states != "none" and modes.zenflow and modes.by_steps,
    ),
    "parameters away": ("offload of the parameters", lambda modes: modes.parameters != "none"),
    "parameters on nvme": ("offload.parameters=nvme", lambda modes: modes.parameters == "nvme"),
    "nvme": ("offload to NVMe", lambda modes: "nvme" in (modes.states, modes.parameters)),
    "bf16": ("bf16 weights", lambda modes: modes.weights == "bf16"),
    "fp16": ("fp16 weights", lambda modes: modes.weights == "fp16"),
    "no stages": ("parallelism.pipeline=1", lambda modes: modes.pipeline == 1),
}
"""Conditions under which the JSON has a key, by name, each in words for messages and as a function;
DeepSpeed ignores the key otherwise.
"""


def _identity(value: Any) -> Any:
    return value


@dataclass(frozen=True, slots=True)
class Row:
    """Key of the JSON with the config key that it is derived from."""

    when: str
    """Name of its condition in `CONDITIONS`."""
    key: str
    """Dotted key of the JSON."""
    source: str
    """Config key; empty if the value is constant."""
    reason: str = ""
    """Reason for the value; empty if the config key explains it."""
    write: Callable[[Any], Any] = _identity
    """Converts the config key's plain value to the JSON's; None leaves the key out."""
    read: Callable[[Any], Any] | None = _identity
    """Converts a JSON value back to the config key's; None if the JSON key does not determine
    it.
    """

    def holds(self, modes: Modes) -> bool:
        """Return True if the JSON has the key in these modes."""
        return CONDITIONS[self.when][1](modes)


def _flag_row(when: str, key: str, source: str, value: Any, reason: str = "") -> Row:
    """Return a row that is true if the config key equals `value`, and left out otherwise."""

    def write(said: Any) -> bool | None:
        return True if said == value else None

    return Row(when, key, source, reason, write, lambda is_on: value if is_on else None)


def at_least_one(size: Any) -> Any:
    """Return the size with 0 replaced by 1, as DeepSpeed reads it."""
    return max(size, 1)


def _constant_row(when: str, key: str, value: Any, reason: str, source: str = "") -> Row:
    """Return a row with a constant value; there is nothing to read back."""
    return Row(when, key, source, reason, lambda _: value, None)


def _interval_row(when: str, key: str, source: str, undecided: Any, reason: str = "") -> Row:
    """Return a row for a number of steps; `undecided` replaces None and lets DeepSpeed choose."""

    def read(steps: Any) -> int | None:
        return steps if isinstance(steps, int) and steps >= 1 else None

    return Row(when, key, source, reason, lambda steps: undecided if steps is None else steps, read)


ZERO_KEYS = (
    Row("sharded", f"{ZERO}.overlap_comm", "zero_stage.overlap_comm"),
    Row("sharded", f"{ZERO}.contiguous_gradients", "zero_stage.contiguous_gradients"),
    Row("sharded", f"{ZERO}.reduce_scatter", "zero_stage.reduce_scatter"),
    Row("sharded", f"{ZERO}.reduce_bucket_size", "zero_stage.reduce_bucket_size"),
    Row("stage 1 or 2", f"{ZERO}.allgather_bucket_size", "zero_stage.allgather_bucket_size"),
    Row("stage 3", PREFETCH, "zero_stage.prefetch_bucket_size"),
    Row(
        "stage 3",
        f"{ZERO}.stage3_param_persistence_threshold",
        "zero_stage.param_persistence_threshold",
    ),
    Row("stage 3", f"{ZERO}.stage3_max_live_parameters", "zero_stage.max_live_parameters"),
    Row("stage 3", f"{ZERO}.stage3_max_reuse_distance", "zero_stage.max_reuse_distance"),
    Row("stage 3", f"{ZERO}.sub_group_size", "zero_stage.sub_group_size", read=at_least_one),
    Row(
        "stage 3",
        f"{ZERO}.zero_hpz_partition_size",
        "zero_stage.hpz_partition_size",
        read=at_least_one,
    ),
    Row("stage 3", f"{ZERO}.zero_quantized_weights", "zero_stage.quantized_weights"),
    Row("stage 3", f"{ZERO}.zero_quantized_gradients", "zero_stage.quantized_gradients"),
)

_ADAM = "Adam's four tensors: weight, gradient and two moments"
_STEP = "offload.zenflow: intervals are steps"
_AIO = "DeepSpeed's default, for NVMe"  # runtime/swap_tensor/constants.py
OFFLOAD_KEYS = (
    Row("states away", f"{STATES}.device", "offload.optimizer"),
    Row("states away", f"{STATES}.pin_memory", "offload.pin_memory"),
    Row("states away at 3", f"{STATES}.ratio", "offload.ratio", read=float),
    Row("states on nvme", f"{STATES}.nvme_path", "offload.nvme_path"),
    _constant_row("states on nvme", f"{STATES}.buffer_count", 4, _ADAM),
    _flag_row("states away", f"{STATES}.super_offload", "offload.super_offload", True),
    Row("zenflow", f"{ZENFLOW}.topk_ratio", "offload.zenflow_topk_ratio"),
    _constant_row(
        "zenflow by steps", f"{ZENFLOW}.select_strategy", "step", _STEP, "offload.zenflow"
    ),
    _interval_row(
        "zenflow by steps",
        f"{ZENFLOW}.select_interval",
        "offload.zenflow_select_interval",
        0,
        "offload.zenflow_select_interval; 0 chooses once",
    ),
    _interval_row(
        "zenflow", f"{ZENFLOW}.update_interval", "offload.zenflow_update_interval", "auto"
    ),
    Row("zenflow", f"{ZENFLOW}.full_warm_up_rounds", "offload.zenflow_warmup_steps"),
    Row("zenflow", f"{ZENFLOW}.overlap_step", "offload.zenflow_overlap_step"),
    Row("parameters away", f"{PARAMETERS}.device", "offload.parameters"),
    Row("parameters away", f"{PARAMETERS}.pin_memory", "offload.pin_memory"),
    Row("parameters on nvme", f"{PARAMETERS}.nvme_path", "offload.nvme_path"),
    Row("parameters on nvme", f"{PARAMETERS}.buffer_count", "offload.buffer_count"),
    Row("parameters on nvme", f"{PARAMETERS}.buffer_size", "offload.buffer_size"),
    Row("parameters on nvme", f"{PARAMETERS}.max_in_cpu", "offload.max_in_cpu"),
    _constant_row("nvme", "aio.block_size", 1_048_576, _AIO),
    _constant_row("nvme", "aio.queue_depth", 8, _AIO),
    _constant_row("nvme", "aio.intra_op_parallelism", 1, _AIO),
    _constant_row("nvme", "aio.single_submit", False, _AIO),
    _constant_row("nvme", "aio.overlap_events", True, _AIO),
)

_MASTERS, _MOMENTS = "precision.master_weights", "precision.optimizer_states"
BF16_KEYS = (
    _flag_row("bf16", "bf16.bf16_master_weights_and_grads", _MASTERS, "bf16", f"{_MASTERS}=bf16"),
    _flag_row("bf16", "bf16.bf16_optimizer_states", _MOMENTS, "bf16", f"{_MOMENTS}=bf16"),
)
_SCALE = "precision.loss_scale"
FP16_KEYS = (
    Row("fp16", "fp16.loss_scale", _SCALE, f"{_SCALE}; 0 adapts it", read=float),
    Row("fp16", "fp16.initial_scale_power", "precision.initial_scale_power"),
    Row("fp16", "fp16.loss_scale_window", "precision.loss_scale_window"),
    Row("fp16", "fp16.hysteresis", "precision.hysteresis"),
    Row("fp16", "fp16.min_loss_scale", "precision.min_loss_scale"),
    _constant_row("fp16", "fp16.consecutive_hysteresis", False, "DeepSpeed's default"),
    _flag_row("fp16", "fp16.fp16_master_weights_and_grads", _MASTERS, "fp16", f"{_MASTERS}=fp16"),
)
TABLE = (*ZERO_KEYS, *OFFLOAD_KEYS, *BF16_KEYS, *FP16_KEYS)

MIN_ONE_KEYS = frozenset(row.key for row in TABLE if row.read is at_least_one)
"""Keys of the JSON whose value 0 DeepSpeed reads as 1."""

SOURCES = {row.key: row.source for row in TABLE if row.read is not None}
"""Config key by the JSON key that determines it."""


def written_settings(rows: tuple[Row, ...], config: RunConfig) -> Iterator[DerivedValue]:
    """Yield the settings that a config has among these rows."""
    modes = Modes.of(config)
    for row in rows:
        value = row.write(config_value(config, row.source)) if row.holds(modes) else None
        if value is not None:
            sources = (row.source,) if row.source else ()
            yield derived(row.key, value, *sources, why=row.reason)


def ineffective_keys(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Yield the ZeRO and offload keys without effect in a config, and what each needs, in words."""
    modes, needs = Modes.of(config), dict[str, list[Row]]()
    for row in (*ZERO_KEYS, *OFFLOAD_KEYS):
        if row.read is not None:
            needs.setdefault(row.source, []).append(row)
    for key, rows in needs.items():
        if not any(row.holds(modes) for row in rows):
            yield key, " or ".join(CONDITIONS[row.when][0] for row in rows)


def config_value(config: RunConfig, key: str) -> Any:
    """Return the value of a config key, an enum as its plain value; None if `key` is empty."""
    if not key:
        return None
    value = value_at(config, key)
    return getattr(value, "value", value)
