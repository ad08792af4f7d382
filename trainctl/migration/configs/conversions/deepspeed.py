"""ZeRO and FSDP in other programs' configurations.

DeepSpeed's JSON is a file that they name, or a section. The sharding of torch's FSDP has other
names in accelerate, the Trainer and torchtitan.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainctl.config.json_file import read_json
from trainctl.errors import Finding, TrainctlError
from trainctl.migration.configs.import_json import import_json, world_size_of
from trainctl.migration.configs.import_table import SIZES, Conversion
from trainctl.migration.configs.result import Why
from trainctl.rules.deepspeed.case import JsonContext
from trainctl.rules.resolve import check_json

NO_JSON = "TC570"
OPEN_BATCH = {"train_micro_batch_size_per_gpu": "auto"}
"""Key of a JSON whose batch the other program fills in."""


def convert_file(source: Conversion, name: str) -> None:
    """Convert a JSON that the key `name` holds or names."""
    value = source.get(name)
    if isinstance(value, Mapping):
        _convert(source, value, name)
        return
    path = source.locate(str(value))
    try:
        document = read_json(path)
    except (TrainctlError, OSError, ValueError):
        document = None
    if document is None or not document.is_readable:
        _leave_json(source, name, f"there is no readable JSON {path}")
    else:
        _convert(source, document.value, name)


def _leave_json(source: Conversion, name: str, reason: str) -> None:
    """Leave out a JSON: the ZeRO stage that it asks for is missing."""
    source.leave(name, reason, "trainctl validate --deepspeed FILE")
    source.converted.choices.pop("zero_stage", None)
    source.findings.append(
        Finding(rule=NO_JSON, key="zero_stage", message=f"{name}: {reason}", hint="zero_stage=N")
    )


def _convert(source: Conversion, json: Mapping[str, Any], name: str) -> None:
    """Convert a whole JSON; what is left out of it is told with the place of the JSON."""
    wrong = _first_error(source, json)
    if wrong:
        _leave_json(source, name, f"DeepSpeed refuses it: {wrong}")
        return
    result = import_json(json, world_size=_ranks(source, json))
    source.set("zero_stage", "0", name)
    for ours, value in {**result.choices, **result.all_settings}.items():
        source.set(ours, value, name)
    for left in result.left_out:
        why = Why.ignored if left.value == "auto" else left.why
        source.converted.leave(f"{name}: {left.key}", left.value, left.reason, left.nearest, why)


def convert_section(source: Conversion, section: str, *groups: str) -> None:
    """Convert a section that DeepSpeed's JSON has too, such as `zero_optimization`.

    Args:
        groups: trainctl's groups that the section says something about.
    """
    json = {**OPEN_BATCH, section: source.document.get(section)}
    names = [key for key in source.leaves if key.startswith(f"{section}.")]
    wrong = _first_error(source, json)
    if wrong:
        for key in names:
            source.leave(key, f"DeepSpeed refuses it: {wrong}", "zero_stage=1")
        return
    result = import_json(json, world_size=_ranks(source, json))
    for ours, value in {**result.choices, **result.all_settings}.items():
        if ours.partition(".")[0] in (*groups, "deepspeed"):
            source.set(ours, value, names[0])
    for left in result.left_out:
        if left.key in names:
            why = Why.ignored if left.value is False else left.why
            source.leave(left.key, left.reason, left.nearest, why)


def _first_error(source: Conversion, json: Mapping[str, Any]) -> str:
    around = JsonContext(world_size=_ranks(source, json), fills_auto=True)
    errors = [each for each in check_json(json, around) if each.is_error]
    return f"{errors[0].key}: {errors[0].message}" if errors else ""


def _ranks(source: Conversion, json: Mapping[str, Any]) -> int:
    return source.world_size or max(1, world_size_of(json))


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
