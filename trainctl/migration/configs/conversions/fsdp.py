"""Sharding of torch's FSDP, which accelerate, the Trainer and torchtitan name differently."""

from __future__ import annotations

from typing import Any

from trainctl.migration.configs.import_table import SIZES, Conversion

STAGES = {
    "FULL_SHARD": "3",
    "1": "3",
    "SHARD_GRAD_OP": "2",
    "2": "2",
    "NO_SHARD": "0",
    "3": "0",
    "HYBRID_SHARD": "3",
    "4": "3",
    "HYBRID_SHARD_ZERO2": "2",
    "_HYBRID_SHARD_ZERO2": "2",
    "5": "2",
}
"""ZeRO stage of each sharding strategy, by name or by FSDP1's number."""

HYBRID = ("HYBRID_SHARD", "4", "HYBRID_SHARD_ZERO2", "_HYBRID_SHARD_ZERO2", "5")
"""Strategies that shard within groups of ranks, by default nodes."""

NO_GROUPS = "DeepSpeed has no shard groups"
UNKNOWN_GROUP = "the number of devices of a node is not known here"


def choose_engine(
    source: Conversion,
    strategy: Any,
    *,
    name: str,
    to_host: bool = False,
    has_axes: bool = False,
    group: int | None = None,
) -> None:
    """Choose the engine and the ZeRO stage for a sharding strategy.

    Args:
        strategy: One of `STAGES`, or its number; None is full sharding.
        name: Key of the source that asks for it.
        to_host: Shards, gradients and states are offloaded to the host.
        has_axes: Ranks are not data-parallel alone, which `engine=fsdp2` does not do.
        group: Number of ranks that shard among themselves (HSDP); for a hybrid strategy by default
            unknown, for others all.
    """
    wanted = str(strategy or "FULL_SHARD").upper()
    stage = STAGES.get(wanted)
    if stage is None:
        source.leave(name, f"there is no sharding {strategy}", "zero_stage=3 or zero_stage=2")
        stage = "3"
    is_fsdp2 = not has_axes and stage != "0" and _is_supported(source)
    source.set("engine", "fsdp2" if is_fsdp2 else "deepspeed", name)
    source.set("zero_stage", stage, name)
    if is_fsdp2 and group is not None and group > 1:
        source.set("zero_stage.shard_group_size", group, name)
    elif wanted in HYBRID or group is not None:
        why = UNKNOWN_GROUP if is_fsdp2 else NO_GROUPS
        source.leave(name, why, "engine=fsdp2 zero_stage.shard_group_size=N")
    if to_host:
        source.set("offload", "cpu-all" if stage == "3" else "cpu")


def group_size(shards: Any, copies: int, ranks: int | None) -> int:
    """Return the ranks of a shard group, if a source names them or the `ranks` of all `copies`
    groups; 0 if it is not known.
    """
    if isinstance(shards, int) and shards > 1:
        return shards
    return 0 if ranks is None or ranks % copies else ranks // copies


FORMATS = ("fp32", "bf16")
OPTIMIZERS = ("adamw", "adam", "sgd", "lion")
COMPILED = ("compiled", "deepcompile", "liger")


def _is_supported(source: Conversion) -> bool:
    """Return True if `engine=fsdp2` does what has been converted so far (docs/fsdp2.md)."""
    choices, settings = source.converted.choices, source.converted.settings
    return (
        all(settings.get(size, 1) == 1 for size in SIZES)
        and choices.get("precision", "bf16") in FORMATS
        and choices.get("optimizer", "adamw") in OPTIMIZERS
        and choices.get("adapter", "none") == "none"
        and choices.get("kernels") not in COMPILED
        and not settings.get("kernels.liger")
        and settings.get("kernels.compile", "none") == "none"
    )
