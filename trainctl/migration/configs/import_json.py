"""Import of a DeepSpeed JSON as group choices and overrides that render back to an equivalent JSON.

Equivalent means equal values in force for DeepSpeed, defaults included. Keys without a trainctl key
are passed through as `deepspeed.*`; keys that trainctl derives are left out and reported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainctl.config.codec import flatten, to_plain
from trainctl.config.compose import compose
from trainctl.config.json_file import read_json
from trainctl.config.keys import as_override
from trainctl.config.schema import RunConfig, walk_leaves
from trainctl.errors import TrainctlError
from trainctl.migration.configs.import_values import RECOMPUTE, wanted_values
from trainctl.migration.configs.result import ConvertedKeys, ImportResult, LeftOutKey
from trainctl.plans.deepspeed_table import (
    CONDITIONS,
    MIN_ONE_KEYS,
    PREFETCH,
    TABLE,
    Modes,
    at_least_one,
)
from trainctl.rules.deepspeed.case import Case, JsonContext, is_number, is_whole
from trainctl.rules.passed_keys import PASS_THROUGH_KEYS, entry_of, idle_reason, owner_of
from trainctl.rules.resolve import check_file, resolve

TRAINCTL_KEYS = {
    "steps_per_print": "trainctl reports itself",
    "wall_clock_breakdown": "trainctl reports itself",
    "torch_autocast.lower_precision_safe_modules": "trainctl keeps ZeRO's gathering exact",
    "tensor_parallel.autotp_size": "parallelism.tensor says it",
    "sequence_parallel_size": "parallelism.sequence says it",
    "seq_parallel_communication_data_type": "precision.communication says it",
}
"""Keys that trainctl sets by itself, each with the reason for not importing it."""


def import_json(
    json: Mapping[str, Any], *, world_size: int, accelerator: str = "cpu"
) -> ImportResult:
    """Convert a DeepSpeed JSON to choices and overrides.

    The JSON must have no error by `trainctl.rules.deepspeed.check`. `world_size` is the number of
    ranks, over which the batch is counted. `accelerator` is their kind, as in `hardware=8xcpu`.
    """
    case = Case(json, JsonContext(world_size=world_size, fills_auto=True))
    wanted = wanted_values(case)
    here = [f"hardware={world_size}x{accelerator}"]
    choices = [f"{group}={option}" for group, option in wanted.choices.items()]
    base = compose([*here, *choices, "training.steps=1000"]).config
    settings = _changed_values(wanted, base)
    written = [f"{key}={as_override(value)}" for key, value in settings.items()]
    config = compose([*here, *choices, "training.steps=1000", *written]).config
    rendered = _rendered_json(config)
    passed, left_out = _remaining_keys(case, wanted, config, rendered)
    left = (*wanted.left_out, *left_out)
    leaves = (".".join(path) for path, _ in _leaves(case))
    carried = tuple(key for key in leaves if key not in {each.key for each in left})
    return ImportResult(wanted.choices, settings, passed, left, carried)


def import_json_file(file: Path, world_size: int | None) -> ImportResult:
    """Import a DeepSpeed JSON; the result's findings are warnings about the file.

    Args:
        world_size: Ranks that its batch is for; None takes what its numbers say.

    Raises:
        TrainctlError: The file cannot be read, or is not valid for DeepSpeed.
    """
    ranks = world_size or world_size_of(read_json(file).value)
    checked = check_file(file, JsonContext(world_size=ranks, fills_auto=True))
    if checked.has_error:
        raise TrainctlError.from_findings(checked.findings)
    imported = import_json(checked.document.value, world_size=ranks)
    return replace(imported, file=file.name, findings=checked.findings)


def world_size_of(json: Mapping[str, Any]) -> int:
    """Return a JSON's world size by its three batch sizes; the smallest possible without them."""
    case = Case(json, JsonContext(fills_auto=True))
    total, micro, steps = (case.get(name) for name in BATCH)
    sequence = case.get("sequence_parallel_size")
    sequence = int(sequence) if is_whole(sequence) and sequence > 0 else 1
    fewest = sequence * case.tensor_size
    if not all(is_whole(size) and size > 0 for size in (total, micro, steps)):
        return fewest
    data, rest = divmod(int(total), int(micro * steps))
    return fewest if rest else data * sequence


def differences(
    original: Mapping[str, Any], rendered: Mapping[str, Any], *, world_size: int
) -> list[str]:
    """Return the keys whose values in force differ between two JSONs, except `TRAINCTL_KEYS`.

    The schedule, single parameters of the optimizer, and recomputation are not compared: the
    trainer handles them by its own keys.
    """
    before = Case(original, JsonContext(world_size=world_size, fills_auto=True))
    ranks = int(before.counted_ranks or 1) // before.tensor_size
    after = Case(rendered, JsonContext(world_size=world_size, data_parallel_size=ranks))
    names = (
        {*before.values, *after.values} - {"scheduler.type", "optimizer.type"} - {*TRAINCTL_KEYS}
    )
    names -= {*BATCH}
    names = {name for name in names if not name.startswith(f"{RECOMPUTE}.")}
    if after.stage == 0 and after.get("gradient_clipping") == 0:
        names -= {"gradient_clipping"}  # in fp32 without ZeRO the trainer clips, not DeepSpeed
    if after.get("bf16.check_grad_overflow") is False:
        names -= {"bf16.check_grad_overflow"}  # the trainer judges the norm before the update
    if 0 < (before.get(PREFETCH) or 0) < (after.get(PREFETCH) or 0):
        names -= {PREFETCH}  # as large as a block, where blocks are gathered as a whole
    names = {name for name in names if not before.schema.keys[name].is_section}
    different = [name for name in names if not _has_same_effect(before, after, name)]
    batches = (_import_batch(before, ranks), _import_batch(after, ranks))
    return sorted([*different, *(["train_batch_size"] if batches[0] != batches[1] else [])])


def _changed_values(wanted: ConvertedKeys, base: RunConfig) -> dict[str, Any]:
    """Return the wanted values that the chosen options do not have already."""
    plain = {key: to_plain(value) for key, _, value in walk_leaves(base)}
    return {key: value for key, value in wanted.settings.items() if plain[key] != value}


def _rendered_json(config: RunConfig) -> dict[str, Any]:
    """Return the JSON of a configuration; if it cannot be planned, the part that can be derived."""
    from trainctl.hardware import resolve_hardware
    from trainctl.plans.deepspeed import derived_settings, nest_settings
    from trainctl.plans.derive import derive_batch, derive_mesh

    hardware = resolve_hardware(config.hardware)
    plan = resolve(config, hardware).plan
    if plan is not None:
        return plan.deepspeed
    mesh, _ = derive_mesh(config.parallelism, hardware)
    batch, _ = derive_batch(config.training, mesh.data) if mesh else (None, ())
    return nest_settings(derived_settings(config, hardware, mesh, batch))


def _remaining_keys(
    case: Case, wanted: ConvertedKeys, config: RunConfig, rendered: Mapping[str, Any]
) -> tuple[dict[str, Any], list[LeftOutKey]]:
    """Return the remaining keys of the JSON: passed through, or left out with the reason."""
    ours = Case(rendered)
    derived = {key for key, _ in flatten(rendered)}
    passed: dict[str, Any] = {}
    left_out: list[LeftOutKey] = []
    for path, value in _leaves(case):
        key = ".".join(path)
        known = case.schema.find(path)
        name = (known.same_as or known.name) if known else key
        newer = known.replaced.split(" or ") if known else []
        if key in wanted.imported or path[0] in wanted.imported or _has_any(wanted.imported, newer):
            continue
        if known is None:
            left_out.append(LeftOutKey(key, value, "DeepSpeed has no such key"))
        elif name in TRAINCTL_KEYS:
            left_out.append(LeftOutKey(key, value, TRAINCTL_KEYS[name]))
        elif _has_same_effect(case, ours, name):
            continue
        elif entry_of(name) not in PASS_THROUGH_KEYS and any(
            f"{name}.".startswith(f"{k}.") or f"{k}.".startswith(f"{name}.") for k in derived
        ):
            shown = ours.values.get(name)
            left_out.append(LeftOutKey(key, value, f"trainctl derives it, as {as_override(shown)}"))
        elif (
            reason := _missing_requirement(name, config)
            or owner_of(name, config)
            or idle_reason(name, config)
        ):
            left_out.append(LeftOutKey(key, value, reason))
        else:
            passed[name] = value
    return passed, left_out


def _has_any(imported: Iterable[str], keys: Sequence[str]) -> bool:
    """Return True if one of the keys, or a key inside a section of that name, is imported."""
    return any(f"{key}.".startswith(f"{name}.") for name in keys if name for key in imported)


def _missing_requirement(name: str, config: RunConfig) -> str:
    """Return what a table key needs that the configuration lacks; empty if nothing."""
    modes = Modes.of(config)
    row = next((each for each in TABLE if each.key == name and not each.holds(modes)), None)
    return "" if row is None else f"it needs {CONDITIONS[row.when][0]}"


def _leaves(case: Case) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every value of the JSON that is no section, every free-form section, and as a whole
    every entry that no version of DeepSpeed reads.
    """
    for path, value, key in case.entries():
        is_section = key is not None and key.is_section and isinstance(value, Mapping)
        if is_section and key is not None and key.unknown != "free" and value:
            continue
        if not case.is_filled(path, value):
            yield path, value


def _has_same_effect(before: Case, after: Case, name: str) -> bool:
    """Return True if both JSONs have the same value in force, or neither reads the key."""
    left, right = _effective_setting(before, name), _effective_setting(after, name)
    return bool(left == right)


def _effective_setting(case: Case, name: str) -> Any:
    value = case.get(name)
    if name == "zero_optimization.overlap_comm" and value is None:
        return case.stage == 3
    if name == "communication_data_type" and value is None:
        return case.weights
    if name == "data_types.grad_accum_dtype" and value is None:
        return case.weights
    if name == "torch_autocast.dtype":
        value = value or "bf16"
    if name.endswith("_dtype") or name.endswith(".dtype"):
        short = str(value).removeprefix("torch.")
        return FORMATS.get(short, short)
    if name == "log_level" and value is None:
        return "warning"
    if name in MIN_ONE_KEYS and is_number(value):
        return at_least_one(value)
    return value.lower() if case.schema.keys[name].any_case and isinstance(value, str) else value


FORMATS = {
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float32": "fp32",
    "float": "fp32",
}
BATCH = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")


def _import_batch(case: Case, ranks: int) -> tuple[int, int] | None:
    """Return the micro-batch size and the accumulation steps, from the batch keys that are present.

    Returns None if transformers or accelerate fill them in. The arithmetic follows
    runtime/config.py; samples shared by a tensor-parallel group count once.
    """
    total, micro, steps = (case.get(name) for name in BATCH)
    if any(case.has(name) and case.get(name) is None for name in BATCH):
        return None
    if total is not None and case.around.data_parallel_size is None:
        total //= case.tensor_size
    if micro is None:
        steps = steps or 1
        micro = total // ranks // steps
    return micro, steps or (total // (micro * ranks) if total is not None else 1)
