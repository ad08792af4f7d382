"""Mapping of a DeepSpeed JSON's values to trainctl's keys."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainctl.config.registry import load_specs
from trainctl.migration.configs.result import ConvertedKeys
from trainctl.options.optimizer import OptimizerForm
from trainctl.plans.deepspeed_table import (
    BF16_KEYS,
    FP16_KEYS,
    OFFLOAD_KEYS,
    SOURCES,
    ZENFLOW,
    ZERO,
    ZERO_KEYS,
    Modes,
    Row,
)
from trainctl.rules.deepspeed.case import AUTO, HF_AUTO_KEYS, Case, is_number
from trainctl.rules.deepspeed.keys import autos

DEVICES = (f"{ZERO}.offload_optimizer.device", f"{ZERO}.offload_param.device")

NOT_PARAMETERS = ("torch_adam", "adam_w_mode")
"""Keys that select the optimizer's class; `optimizer.kind` and the offload determine it here."""

KERNELS = {
    True: "offloaded states are updated by DeepSpeed's own kernel",
    False: "states on the device are updated by torch's AdamW: nothing to compile",
}
"""Reasons for not importing `torch_adam`, by whether the optimizer is offloaded."""

TORCH_WEIGHT_DECAY = 0.01
"""Default of torch.optim.AdamW, which `torch_adam` selects; FusedAdam's is 0."""

RECOMPUTE = "activation_checkpointing"
"""Name of both DeepSpeed's JSON section and trainctl's group."""

NOT_RECOMPUTED_SO = {
    "partition_activations": "there are no tensor ranks to partition over",
    "contiguous_memory_optimization": "trainctl keeps the inputs of blocks where they are",
    "number_checkpoints": "trainctl recomputes by blocks: activation_checkpointing.every_kth_block",
    "synchronize_checkpoint_boundary": "it is of DeepSpeed's own recomputation",
    "profile": "it is of DeepSpeed's own recomputation",
}
"""Keys of that section that trainctl's recomputation does not need, with the reasons."""

LEFT_OPEN = {name: key for name, key in SOURCES.items() if name in HF_AUTO_KEYS} | {
    "train_batch_size": "training.global_batch_size",
    "train_micro_batch_size_per_gpu": "training.micro_batch_size",
    "gradient_accumulation_steps": "training.gradient_accumulation_steps",
    "gradient_clipping": "optimizer.gradient_clipping",
    "optimizer.params.lr": "optimizer.lr",
    "optimizer.params.betas": "optimizer.beta1 and optimizer.beta2",
    "optimizer.params.eps": "optimizer.epsilon",
    "optimizer.params.weight_decay": "optimizer.weight_decay",
    "scheduler.params.warmup_max_lr": "optimizer.lr",
    "scheduler.params.warmup_num_steps": "schedule.warmup_steps",
    "scheduler.params.total_num_steps": "training.steps",
    "fp16.enabled": "the group precision",
    "bf16.enabled": "the group precision",
    "zero_optimization.stage": "the group zero_stage",
    "zero_optimization.offload_optimizer.device": "the group offload",
    "zero_optimization.offload_param.device": "the group offload",
}
"""trainctl's key, or group, for each JSON key that transformers or accelerate would fill in."""


def wanted_values(case: Case) -> ConvertedKeys:
    """Return the choices and values for everything in the JSON that trainctl has a key for."""
    wanted, modes = ConvertedKeys(), _read_modes(case)
    _import_batch(case, wanted)
    _import_optimizer(case, wanted)
    _import_schedule(case, wanted)
    _import_zero(case, modes, wanted)
    _import_offload(case, modes, wanted)
    _import_precision(case, modes, wanted)
    _import_recomputation(case, wanted)
    _record_unset_autos(case, wanted)
    if case.tensor_size > 1:
        wanted.take("tensor_parallel.autotp_size", "parallelism.tensor", case.tensor_size)
    sequence = case.get("sequence_parallel_size")
    if is_number(sequence) and sequence > 1:
        wanted.take("sequence_parallel_size", "parallelism.sequence", sequence)
    if case.given("log_level"):
        wanted.take("log_level", "logging.deepspeed_level", str(case.get("log_level")).lower())
    return wanted


def _record_unset_autos(case: Case, wanted: ConvertedKeys) -> None:
    """Record each unfilled "auto" as left out: trainctl's own value holds."""
    for name in autos(case):
        if name in HF_AUTO_KEYS:
            instead = LEFT_OPEN.get(name)
            reason = f"nobody set it{f'; {instead} says it here' if instead else ''}"
            wanted.leave(name, AUTO, reason)


def _import_batch(case: Case, wanted: ConvertedKeys) -> None:
    names = {
        "train_batch_size": "global_batch_size",
        "train_micro_batch_size_per_gpu": "micro_batch_size",
        "gradient_accumulation_steps": "gradient_accumulation_steps",
    }
    for key, ours in names.items():
        value = case.get(key)
        if value is None:
            continue
        if key == "train_batch_size" and case.tensor_size > 1:
            value //= case.tensor_size  # AutoTP counts each sample once per tensor rank
        wanted.take(key, f"training.{ours}", value)
    if not any(case.has(key) for key in list(names)[1:]):
        wanted.settings["training.gradient_accumulation_steps"] = 1  # DeepSpeed's default


def _import_optimizer(case: Case, wanted: ConvertedKeys) -> None:
    clipping = case.get("gradient_clipping")
    if clipping is not None:
        wanted.take("gradient_clipping", "optimizer.gradient_clipping", float(clipping))
    name = case.optimizer
    if name is None:
        return
    wanted.imported.add("optimizer")
    params = case.params("optimizer")
    spec = _find_optimizer(name, params)
    if spec is None:
        reason = "trainctl has no such optimizer: choose an option of the group optimizer"
        wanted.leave("optimizer.type", case.get("optimizer.type"), reason)
        return
    wanted.choices["optimizer"] = spec.name
    values = {each.name: each.default for each in spec.deepspeed.parameters}
    if params.get("torch_adam"):
        values["weight_decay"] = TORCH_WEIGHT_DECAY
    values |= {key: value for key, value in params.items() if value is not None}
    torch_adam = params.get("torch_adam")
    if torch_adam is not None and bool(torch_adam) is case.is_offloaded:
        key = "optimizer.params.torch_adam"
        wanted.leave(key, torch_adam, KERNELS[case.is_offloaded])
    _import_optimizer_parameters(spec.deepspeed, _without_autos(case, "optimizer", values), wanted)


def _find_optimizer(name: str, params: Mapping[str, Any]) -> Any:
    """Return the spec of a JSON's optimizer, the most specific one that matches, or None."""
    named = [
        spec
        for spec in load_specs("optimizer")
        if spec.deepspeed is not None and spec.deepspeed.matches(name, params)
    ]
    return max(named, key=lambda spec: len(spec.deepspeed.fixed), default=None)


def _without_autos(case: Case, section: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters, DeepSpeed's defaults included, without the unfilled "auto" ones."""
    left_open = set(autos(case))
    return {
        name: value for name, value in values.items() if f"{section}.params.{name}" not in left_open
    }


def _import_optimizer_parameters(
    form: OptimizerForm, values: Mapping[str, Any], wanted: ConvertedKeys
) -> None:
    ours = {each.name: each for each in form.parameters}
    for name, value in values.items():
        parameter = ours.get(name)
        if parameter is None:
            if name not in (*form.fixed, *NOT_PARAMETERS):
                reason = "trainctl has no key for it"
                wanted.leave(f"optimizer.params.{name}", value, reason)
        elif len(parameter.keys) > 1:
            if isinstance(value, list) and len(value) == len(parameter.keys):
                for key, item in zip(parameter.keys, value, strict=True):
                    wanted.settings[f"optimizer.{key}"] = float(item)
        elif is_number(value):
            wanted.settings[f"optimizer.{parameter.keys[0]}"] = float(value)


def _import_schedule(case: Case, wanted: ConvertedKeys) -> None:
    name, params = case.get("scheduler.type"), case.params("scheduler")
    if name is None:
        return
    wanted.imported.add("scheduler")
    spec = _find_schedule(name)
    if spec is None:
        reason = "trainctl has no such schedule: choose an option of the group schedule"
        wanted.leave("scheduler.type", name, reason)
        return
    wanted.choices["schedule"] = spec.name
    ours = spec.deepspeed.parameters
    defaults = {each.name: each.default for each in ours if each.default is not None}
    params = _without_autos(case, "scheduler", defaults | dict(params))
    for each in ours:
        value: Any = params.get(each.name)
        if is_number(value):
            wanted.settings[each.key] = int(value) if each.is_whole else float(value)
    if params.get("warmup_type", "log") == "log":
        reason = "trainctl warms up linearly"
        wanted.leave("scheduler.params.warmup_type", "log", reason)
    for key in ("warmup_min_lr", "warmup_min_ratio"):
        if params.get(key):
            reason = "trainctl warms up from 0"
            wanted.leave(f"scheduler.params.{key}", params[key], reason)


def _find_schedule(name: str) -> Any:
    named = (
        spec
        for spec in load_specs("schedule")
        if spec.deepspeed is not None and spec.deepspeed.type == name
    )
    return next(named, None)


def _read_modes(case: Case) -> Modes:
    """Return the modes of the JSON; values that transformers or accelerate decide count as off."""
    stage = case.stage or 0
    is_decided = _has_devices(case)
    return Modes(
        stage=stage,
        weights=case.weights or "",
        states=case.offload_device if stage and is_decided else "none",
        parameters=case.parameter_device if stage == 3 and is_decided else "none",
        zenflow=case.has(ZENFLOW) and case.get(ZENFLOW) is not None,
        by_steps=case.get(f"{ZENFLOW}.select_strategy") == "step",
    )


def _has_devices(case: Case) -> bool:
    """Return True if the JSON sets the offload devices, and not transformers or accelerate."""
    return not any(case.has(key) and case.get(key) is None for key in DEVICES)


def _import_rows(rows: tuple[Row, ...], case: Case, modes: Modes, wanted: ConvertedKeys) -> None:
    """Import the JSON values of table rows; of two rows for one trainctl key, the first counts."""
    for row in rows:
        if row.read is None or row.source in wanted.settings or not row.holds(modes):
            continue
        value = case.get(row.key)
        if value is None and row.key == f"{ZERO}.overlap_comm":
            value = modes.stage == 3
        said = None if value is None else row.read(value)
        is_off = value is False and said is None  # super_offload=false changes nothing
        if value is not None and not is_off:
            wanted.take(row.key, row.source, said)


def _import_zero(case: Case, modes: Modes, wanted: ConvertedKeys) -> None:
    if case.stage is None:
        return  # transformers or accelerate decide it
    wanted.choices["zero_stage"] = str(modes.stage)
    wanted.imported |= {f"{ZERO}.stage", "allgather_size"}
    if isinstance(case.json.get(ZERO), bool):
        wanted.imported.add(ZERO)
    _import_rows(ZERO_KEYS, case, modes, wanted)


def _import_offload(case: Case, modes: Modes, wanted: ConvertedKeys) -> None:
    if not _has_devices(case):
        return
    options = {
        ("cpu", "none"): "cpu",
        ("cpu", "cpu"): "cpu-all",
        ("nvme", "none"): "nvme-optimizer",
        ("nvme", "nvme"): "nvme",
    }
    devices = dict(zip(DEVICES, (modes.states, modes.parameters), strict=True))
    wanted.choices["offload"] = options.get((modes.states, modes.parameters), "none")
    wanted.settings |= {SOURCES[key]: device for key, device in devices.items()}
    wanted.imported |= {key for key, device in devices.items() if device != "none"}
    if modes.zenflow and modes.states != "none":
        wanted.settings["offload.zenflow"] = True
    _import_rows(OFFLOAD_KEYS, case, modes, wanted)


def _import_recomputation(case: Case, wanted: ConvertedKeys) -> None:
    """Import the recomputation section. DeepSpeed recomputes only in a model that calls its API,
    which a JSON with the section is assumed to be for.
    """
    if not case.json.get(RECOMPUTE):
        return
    to_host = bool(case.get(f"{RECOMPUTE}.cpu_checkpointing"))
    wanted.choices["activation_checkpointing"] = "offloaded" if to_host else "full"
    wanted.imported.add(RECOMPUTE)
    for name, reason in NOT_RECOMPUTED_SO.items():
        key = f"{RECOMPUTE}.{name}"
        value = case.get(key)
        if not value:
            continue
        if name == "partition_activations" and case.tensor_size > 1:
            wanted.settings[f"{RECOMPUTE}.partition_across_tensor_ranks"] = True
        else:
            wanted.leave(key, value, reason)


def _import_precision(case: Case, modes: Modes, wanted: ConvertedKeys) -> None:
    weights = case.weights
    if weights is None:
        return  # transformers or accelerate decide it
    wanted.choices["precision"] = weights
    wanted.imported |= {"fp16.enabled", "bf16.enabled", "bfloat16"}
    if case.get("torch_autocast.enabled") and weights == "fp32":
        wanted.choices["precision"] = "autocast-bf16"
        dtype = str(case.get("torch_autocast.dtype") or "bf16").removeprefix("torch.")
        compute = "fp16" if dtype in ("fp16", "float16", "half") else "bf16"
        wanted.settings |= {"precision.autocast": True, "precision.compute": compute}
        wanted.imported |= {"torch_autocast.enabled", "torch_autocast.dtype"}
    _import_rows((*BF16_KEYS, *FP16_KEYS), case, modes, wanted)
    if case.given("data_types.grad_accum_dtype"):
        dtype = str(case.get("data_types.grad_accum_dtype")).removeprefix("torch.")
        format_ = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16"}.get(dtype, dtype)
        format_ = "fp32" if format_ in ("float32", "float") else format_
        wanted.take("data_types.grad_accum_dtype", "precision.gradient_accumulation", format_)
    if case.given("communication_data_type"):
        wire = str(case.get("communication_data_type")).lower()
        wanted.take("communication_data_type", "precision.communication", wire)
