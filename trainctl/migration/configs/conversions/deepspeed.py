"""DeepSpeed's JSON inside another program's configuration: a file that it names, or a section."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainctl.config.json_file import read_json
from trainctl.errors import Finding, TrainctlError
from trainctl.migration.configs.import_json import import_json, world_size_of
from trainctl.migration.configs.import_table import Conversion
from trainctl.migration.configs.result import Why
from trainctl.rules.deepspeed.case import JsonContext
from trainctl.rules.registry import check_json

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
    """Return the first error of a JSON; empty if it has none."""
    around = JsonContext(world_size=_ranks(source, json), fills_auto=True)
    errors = [each for each in check_json(json, around) if each.is_error]
    return f"{errors[0].key}: {errors[0].message}" if errors else ""


def _ranks(source: Conversion, json: Mapping[str, Any]) -> int:
    return source.world_size or max(1, world_size_of(json))
