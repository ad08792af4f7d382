"""Write the closed schema of DeepSpeed's JSON from the installed package.

    python scripts/generate_deepspeed_schema.py           # write the file of this version
    python scripts/generate_deepspeed_schema.py --check   # print differences; exit 1 if any

The schema has three sources. Sections that are pydantic models describe themselves. The other
sections are read key by key in code, so the config is loaded once from a mapping that records each
requested key and its default. What neither source tells (the type behind a default of None, keys
that are read outside the loader) is written by hand in NOTES and ELSEWHERE. A note about a key that
no longer exists, or that is recorded by now, is an error.
"""

from __future__ import annotations

import contextlib
import enum
import inspect
import json
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.compile.config import CompileConfig
from deepspeed.inference.config import WeightQuantConfig
from deepspeed.module_inject import auto_ep_config
from deepspeed.module_inject.autotp_config import AutoTPPresets
from deepspeed.runtime import config as loader
from deepspeed.runtime import lr_schedules
from deepspeed.runtime.tensor_parallel.config import TPTrainingConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig
from pydantic import BaseModel

FOLDER = Path(__file__).parents[1] / "trainctl" / "rules" / "deepspeed_schema"
PACKAGE = Path(deepspeed.__file__).parent

MODELS = {
    "zero_optimization": DeepSpeedZeroConfig,
    "fp16": sys.modules["deepspeed.runtime.precision_config"].DeepSpeedFP16Config,
    "bf16": sys.modules["deepspeed.runtime.precision_config"].DeepSpeedBF16Config,
    "bfloat16": sys.modules["deepspeed.runtime.precision_config"].DeepSpeedBF16Config,
    "comms_logger": sys.modules["deepspeed.comm.config"].CommsLoggerConfig,
    "tensorboard": sys.modules["deepspeed.monitor.config"].TensorBoardConfig,
    "wandb": sys.modules["deepspeed.monitor.config"].WandbConfig,
    "csv_monitor": sys.modules["deepspeed.monitor.config"].CSVConfig,
    "comet": sys.modules["deepspeed.monitor.config"].CometConfig,
    "hybrid_engine": loader.HybridEngineConfig,
    "compile": CompileConfig,
    "tensor_parallel": TPTrainingConfig,
    "weight_quantization": WeightQuantConfig,
    "timers.throughput": sys.modules["deepspeed.utils.config"].DeepSpeedThroughputTimerConfig,
}
"""Sections that are pydantic models, which refuse unknown keys and wrong types."""

READ = (
    "activation_checkpointing",
    "aio",
    "autotuning",
    "autotuning.model_info",
    "checkpoint",
    "checkpoint.parallel_write",
    "checkpoint.writer",
    "data_efficiency",
    "data_efficiency.data_routing",
    "data_efficiency.data_routing.random_ltd",
    "data_efficiency.data_sampling",
    "data_efficiency.data_sampling.curriculum_learning",
    "data_efficiency.data_sampling.dynamic_batching",
    "data_types",
    "expert_parallel",
    "flops_profiler",
    "optimizer",
    "scheduler",
    "timers",
    "torch_autocast",
)
"""Sections that are read key by key, which ignore unknown keys."""

Note = dict[str, Any]


def _choice(*values: Any, default: Any = None, any_case: bool = False) -> Note:
    note = {"type": "string", "choices": list(values), "default": default}
    return note | ({"any_case": True} if any_case else {})


DTYPES = ["fp16", "float16", "half", "torch.float16", "bf16", "bfloat16", "torch.bfloat16"]
DTYPES += ["fp32", "float32", "float", "torch.float32"]

NOTES: dict[str, Note] = {
    # Keys whose default is None, or that have no default.
    "train_batch_size": {"type": "integer", "minimum": 1},
    "train_micro_batch_size_per_gpu": {"type": "integer", "minimum": 1},
    "gradient_accumulation_steps": {"type": "integer", "minimum": 1},
    "steps_per_print": {"type": "integer", "minimum": 1},
    "communication_data_type": _choice("fp16", "bf16", "fp32", any_case=True),
    "seq_parallel_communication_data_type": _choice(
        "fp16", "bf16", "fp32", default="fp32", any_case=True
    ),
    "gradient_allreduce_op": _choice("mean", "sum", default="mean", any_case=True),
    "gradient_clipping": {"type": "number", "minimum": 0},
    "gradient_predivide_factor": {"type": "number", "above": 0},
    "vocabulary_size": {"type": "integer", "minimum": 1},
    "log_level": _choice("debug", "info", "warning", "error", "critical", any_case=True),
    "optimizer.type": {"type": "string"},
    "optimizer.legacy_fusion": {"type": "boolean", "default": False},
    "scheduler.type": {"type": "string"},
    "torch_autocast.dtype": _choice(*DTYPES),
    "torch_autocast.lower_precision_safe_modules": {"type": "list"},
    "data_types.grad_accum_dtype": _choice(*DTYPES),
    "data_types.param_dtype": _choice(*DTYPES),
    "data_types.buffer_dtype": _choice(*DTYPES),
    "data_types.keep_in_fp32_modules": {"type": "any"},
    "activation_checkpointing.number_checkpoints": {"type": "integer", "minimum": 1},
    "aio.block_size": {"type": "integer", "minimum": 1},
    "aio.queue_depth": {"type": "integer", "minimum": 1},
    "aio.intra_op_parallelism": {"type": "integer", "minimum": 1},
    "flops_profiler.output_file": {"type": "string"},
    "checkpoint.tag_validation": _choice("Ignore", "Warn", "Fail", default="Warn", any_case=True),
    "checkpoint.writer.type": _choice("mock", "python", "fast", default="fast", any_case=True),
    "checkpoint.writer.data_parallel": _choice("replica", "socket", "machine", any_case=True),
    "autotuning.metric_path": {"type": "string"},
    "autotuning.arg_mappings": {"type": "section", "unknown": "free"},
    "autotuning.model_info_path": {"type": "string"},
    "autotuning.model_info.num_params": {"type": "integer", "minimum": 1},
    "autotuning.model_info.hidden_size": {"type": "integer", "minimum": 1},
    "autotuning.model_info.num_layers": {"type": "integer", "minimum": 1},
    "autotuning.max_train_batch_size": {"type": "integer", "minimum": 1},
    "autotuning.metric": _choice("latency", "throughput", "flops", default="throughput"),
    "autotuning.tuner_type": _choice("gridsearch", "random", "model_based", default="gridsearch"),
    "data_efficiency.data_sampling.dynamic_batching.max_batch_size": {"type": "integer"},
    "data_efficiency.data_sampling.dynamic_batching.lr_scaling_method": _choice(
        "linear", "sqrt", "none", default="linear"
    ),
    "data_efficiency.data_sampling.dynamic_batching.sequence_picking_order": _choice(
        "random", "seqlen", "dataloader", default="dataloader"
    ),
    "bfloat16": {"replaced": "bf16", "sets_replacement": True},
    "bf16": {"null": True},
    "aio": {"null": True},
    "expert_parallel": {"null": True},
    "checkpoint.writer": {"null": True},
    # Its validators take a single name for a list of one, and null for nothing.
    "zero_optimization.leaf_module": {"null": True},
    "zero_optimization.leaf_module.classes": {"type": "any"},
    "zero_optimization.leaf_module.names": {"type": "any"},
    "zero_optimization.leaf_module.name_suffixes": {"type": "any"},
    "data_efficiency.data_routing.random_ltd": {"type": "section", "unknown": "free"},
    "datastates_ckpt": {"type": "section", "unknown": "free"},
    # Ranges that only the models' validators check.
    "fp16.loss_scale": {"minimum": 0, "refuses_switch": True},
    "fp16.loss_scale_window": {"minimum": 1, "refuses_switch": True},
    "fp16.min_loss_scale": {"minimum": 1, "refuses_switch": True},
    "zero_optimization.stage": {"choices": [0, 1, 2, 3]},
    "zero_optimization.zenflow.select_strategy": {"choices": ["auto", "step", "epoch"]},
    # Keys that the engine's own constructor reads.
    "zero_optimization.zenflow.steps_per_epoch": {"internal": True},
    "tensor_parallel.tp.mpu": {"internal": True},
    "tensor_parallel.tp.tp_group": {"internal": True},
    "tensor_parallel.injection_policy_tuple": {"type": "list"},
    "tensor_parallel.dtype": {"internal": True},
}
for _name in [
    "moe_layer_pattern",
    "expert_pattern",
    "router_pattern",
    "expert_w1",
    "expert_w2",
    "expert_w3",
    "num_experts_attr",
    "top_k_attr",
    "shared_experts_pattern",
    "shared_experts_gate_pattern",
    "expert_activation",
]:
    NOTES[f"expert_parallel.{_name}"] = {"type": "string", "null": True}
for _name in ("num_expert_groups", "num_limited_groups"):
    NOTES[f"expert_parallel.{_name}"] = {"type": "integer", "minimum": 1}
for _name in ("top_k", "routed_scaling_factor", "load_balance_coeff"):
    NOTES[f"expert_parallel.{_name}"] = {"type": "any"}
for _name in ("route_norm", "has_shared_experts"):
    NOTES[f"expert_parallel.{_name}"] = {"type": "boolean", "null": True}
NOTES |= {
    "expert_parallel.autoep_size": {"type": "integer", "minimum": 1},
    "expert_parallel.expert_tensor_parallel_size": {"type": "integer", "minimum": 1},
    "expert_parallel.score_func": _choice("auto", "softmax", "sigmoid", default="auto"),
    "expert_parallel.score_apply": _choice("auto", "pre", "post", default="auto"),
    "expert_parallel.combine_impl": _choice(
        "auto", "weighted_sum", "fused_weighted_sum", "legacy_bmm", default="auto"
    ),
    "expert_parallel.row_weighting_impl": _choice("auto", "eager", "fused", default="auto"),
    "expert_parallel.gate_up_impl": _choice("separate", "fused", default="separate"),
    "expert_parallel.comm_backend": _choice("comm", "deepep", default="comm"),
    "expert_parallel.preset_model": {
        "type": "string",
        "null": True,
        "choices": sorted(auto_ep_config.PRESET_MODELS),
    },
    "tensor_parallel.preset_model": {
        "choices": sorted(name for name in vars(AutoTPPresets) if AutoTPPresets.get_preset(name)),
        "any_case": True,
    },
    "pipeline.stages": {"type": "any"},
    "pipeline.activation_checkpoint_interval": {"type": "integer", "minimum": 0},
}

ELSEWHERE: dict[str, Note] = {
    # Keys that are only read if another key is set.
    "data_efficiency.data_sampling.dynamic_batching.max_tokens": {"type": "integer"},
    "optimizer.params": {"type": "section", "unknown": "free"},
    "scheduler.params": {"type": "section", "unknown": "free"},
    # Sections that are kept whole or read later, in runtime/data_pipeline and
    # runtime/checkpoint_engine.
    "data_efficiency.data_sampling.curriculum_learning.curriculum_metrics": {
        "type": "section",
        "unknown": "free",
    },
    "data_efficiency.data_sampling.curriculum_learning.data_cluster_path": {"type": "string"},
    "data_efficiency.data_sampling.dynamic_batching.metrics_path": {"type": "string"},
    # Keys that deepspeed/__init__.py reads before the loader.
    "sequence_parallel_size": {"type": "integer", "minimum": 1},
    "data_parallel_size": {"type": "integer", "minimum": 1},
    # runtime/zero/config.py reads these only with the old form `"zero_optimization": true`.
    "allgather_size": {"type": "integer", "minimum": 1, "replaced": "zero_optimization"},
}
"""Keys that are read before or after the loader."""

INSTEAD = {
    "nebula": "checkpoint",
    "amp": "bf16, fp16 or torch_autocast",
    "elasticity": "train_batch_size, train_micro_batch_size_per_gpu, gradient_accumulation_steps",
    "curriculum_learning": "data_efficiency.data_sampling.curriculum_learning",
    "zero_optimization.mics_shard_size": "zero_optimization.zero_hpz_partition_size, "
    "or trainctl's engine=fsdp2 zero_stage.shard_group_size=N",
    "zero_optimization.zeropp_loco_param": "zero_optimization.zero_quantized_gradients",
}
"""Replacements of removed keys."""

SCHEDULERS = lr_schedules.VALID_LR_SCHEDULES


class Recorder(dict):
    """Mapping that records each requested key with the default it is requested with."""

    def __init__(self, prefix: str, seen: dict[str, Any]) -> None:
        super().__init__()
        self.prefix, self.seen = prefix, seen
        for path in READ:
            parent, _, name = path.rpartition(".")
            if parent == prefix:
                super().__setitem__(name, Recorder(path, seen))

    def _note(self, name: str, default: Any) -> None:
        path = f"{self.prefix}.{name}" if self.prefix else name
        if self.seen.get(path) is None:
            self.seen[path] = default

    def __copy__(self) -> Recorder:
        return self

    def __bool__(self) -> bool:
        return True

    def get(self, name: str, default: Any = None) -> Any:
        self._note(name, default)
        return super().get(name, default)

    def __contains__(self, name: object) -> bool:
        self._note(str(name), None)
        return super().__contains__(name)

    def keys(self) -> Any:
        return self

    def __getitem__(self, name: str) -> Any:
        self._note(name, None)
        return super().__getitem__(name)


def recorded() -> dict[str, Any]:
    """Return every key that the loader reads from its sections, with its default."""
    seen: dict[str, Any] = {}
    config = Recorder("", seen)
    loader._reject_removed_config_keys(config)
    dict.__setitem__(config, "train_batch_size", 1)
    loader.DeepSpeedConfig(config)
    for name in loader.get_pipeline_config({}):
        seen[f"pipeline.{name}"] = loader.get_pipeline_config({})[name]
    return seen


KINDS = {bool: "boolean", int: "integer", float: "number", str: "string", list: "list"}


def from_default(value: Any) -> Note:
    """Derive type and default from the default that a key is read with."""
    for kind, name in KINDS.items():
        if type(value) is kind:
            return {"type": name, "default": value}
    if isinstance(value, dict):
        return {"type": "section", "unknown": "ignored"}
    return {}


def from_model(prefix: str, model: type[BaseModel]) -> Iterator[tuple[str, Note]]:
    """Return every key of a pydantic model, including those of nested models."""
    for name, field in model.model_fields.items():
        extra = field.json_schema_extra or {}
        note: Note = {"checked": True}
        kinds = list(typing.get_args(field.annotation) or [field.annotation])
        origin = typing.get_origin(field.annotation)
        if origin in (list, dict, typing.Literal):
            kinds = [field.annotation]
        if type(None) in kinds:
            note["null"] = True
        kinds = [each for each in kinds if each is not type(None)]
        nested = next((each for each in kinds if _is_model(each)), None)
        key = f"{prefix}.{field.alias or name}"
        if nested is not None:
            yield key, {"type": "section", "unknown": "refused", **note}
            if field.alias:
                yield f"{prefix}.{name}", {"type": "section", "unknown": "free", "same_as": key}
            yield from from_model(key, nested)
            continue
        note |= _kind(kinds)
        default = field.get_default(call_default_factory=True)
        if isinstance(default, (bool, int, float, str, list)):
            note["default"] = _plain(default)
        for bound in field.metadata:
            for theirs, ours in {
                "ge": "minimum",
                "gt": "above",
                "le": "maximum",
                "lt": "below",
            }.items():
                if hasattr(bound, theirs):
                    note[ours] = _plain(getattr(bound, theirs))
        if extra.get("deprecated"):
            note["replaced"] = " or ".join(
                f"{prefix}.{_alias(model, new)}" for new in extra["new_param"].split(" or ")
            )
            note["sets_replacement"] = extra.get("set_new_param", True)
        if field.alias:
            # populate_by_name: the attribute's own name is accepted as well.
            yield f"{prefix}.{name}", {**note, "same_as": key}
        yield key, note


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _alias(model: type[BaseModel], name: str) -> str:
    field = model.model_fields.get(name)
    return (field.alias or name) if field else name


def _kind(kinds: list[Any]) -> Note:
    first = kinds[0]
    if len(kinds) > 1:
        return {"type": "any"}
    if typing.get_origin(first) is typing.Literal:
        return {"type": "string", "choices": list(typing.get_args(first))}
    if typing.get_origin(first) in (list, tuple) or first in (list, tuple):
        inner = typing.get_args(first)
        choices = typing.get_args(inner[0]) if inner and typing.get_origin(inner[0]) else ()
        return {"type": "list", **({"items": list(choices)} if choices else {})}
    if typing.get_origin(first) is dict or first is dict:
        return {"type": "section", "unknown": "free"}
    if isinstance(first, type) and issubclass(first, enum.Enum):
        values = list(dict.fromkeys(member.value for member in first))
        return {"type": KINDS[type(values[0])], "choices": values}
    if first is Path:
        return {"type": "string"}
    return {"type": KINDS.get(first, "any")}


def _plain(value: Any) -> Any:
    """Convert subclasses of int, float and str, which only print differently, to the plain
    types.
    """
    if isinstance(value, enum.Enum):
        return value.value
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return kind(value)
    return value


def optimizers() -> dict[str, Any]:
    """Return the names of optimizers, and the keywords that each accepts as `optimizer.params`."""
    from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.ops.lamb import FusedLamb
    from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion

    engine = deepspeed.DeepSpeedEngine
    muon = {*engine._MUON_HALF_KEYS, *engine._ADAM_HALF_KEYS, "muon_lr", "adam_lr"}
    own = {"torch_adam", "adam_w_mode", "fp32_optimizer_states"}
    adam = _keywords(FusedAdam) | own
    table: dict[str, Any] = {
        "adam": {
            "device": adam,
            "offloaded": _keywords(DeepSpeedCPUAdam) | own,
            "torch": _keywords(torch.optim.AdamW) | own,
        },
        "lamb": {"device": _keywords(FusedLamb)},
        "lion": {"device": _keywords(FusedLion), "offloaded": _keywords(DeepSpeedCPULion)},
        "adagrad": {
            "device": _keywords(torch.optim.Adagrad),
            "offloaded": _keywords(DeepSpeedCPUAdagrad),
        },
        "muon": {"device": muon | own | {"per_head_muon"}},
    }
    table["adamw"] = table["adam"]
    for name in loader.DEEPSPEED_OPTIMIZERS:
        table.setdefault(name, {})
    return {
        name: {variant: sorted(names) for variant, names in variants.items()}
        for name, variants in sorted(table.items())
    }


def torch_optimizers() -> dict[str, list[str]]:
    """Return the classes of torch.optim that DeepSpeed accepts by name, with their keywords."""
    return {
        name: sorted(_keywords(cls))
        for name, cls in sorted(vars(torch.optim).items())
        if isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer) and name != "Optimizer"
    }


def schedulers() -> dict[str, Any]:
    """Return DeepSpeed's schedules with their keywords, and which keywords have no default."""
    table = {}
    for name in SCHEDULERS:
        signature = inspect.signature(getattr(lr_schedules, name).__init__)
        table[name] = _arguments(signature)
    return table


def torch_schedulers() -> dict[str, Any]:
    """Return the classes of torch.optim.lr_scheduler that DeepSpeed accepts by name."""
    module = torch.optim.lr_scheduler
    names = [name for name in module.__all__ if name not in ("LRScheduler", "ChainedScheduler")]
    return {
        name: _arguments(inspect.signature(getattr(module, name).__init__))
        for name in sorted(names)
    }


def _arguments(signature: inspect.Signature) -> Note:
    taken = [p for name, p in signature.parameters.items() if name not in ("self", "optimizer")]
    return {
        "names": [p.name for p in taken if p.kind is not p.VAR_KEYWORD],
        "required": [p.name for p in taken if p.default is p.empty and p.kind is not p.VAR_KEYWORD],
    }


def _keywords(cls: Any) -> set[str]:
    names = set(inspect.signature(cls.__init__).parameters)
    return names - {"self", "params", "model_params", "args", "kwargs"}


def schema() -> dict[str, Any]:
    """Return the whole schema as plain data."""
    keys: dict[str, Note] = {}
    for path, default in recorded().items():
        keys[path] = from_default(default)
    for section in READ:
        keys[section] = {"type": "section", "unknown": "ignored"}
    for section, model in MODELS.items():
        keys[section] = {"type": "section", "unknown": "refused", "checked": True}
        keys.update(from_model(section, model))
    keys["pipeline"] = {"type": "section", "unknown": "ignored"}
    removed = {**loader._REMOVED_TOP_LEVEL_CONFIG_KEYS}
    removed |= {f"zero_optimization.{k}": v for k, v in loader._REMOVED_ZERO_CONFIG_KEYS.items()}
    for key in removed:
        keys.pop(key, None)
    stale = [key for key in NOTES if key not in keys] + [key for key in ELSEWHERE if key in keys]
    if stale:
        raise SystemExit(f"DeepSpeed and these notes no longer agree: {', '.join(sorted(stale))}")
    keys |= ELSEWHERE
    for key, note in NOTES.items():
        keys[key] |= note
    # Keys that are read only to be refused or passed on; they are no settings.
    for key in [key for key, note in keys.items() if note.get("internal")]:
        del keys[key]
    untyped = [key for key, note in keys.items() if "type" not in note]
    if untyped:
        raise SystemExit(f"add to NOTES the type of: {', '.join(sorted(untyped))}")
    parents = {key.rpartition(".")[0] for key in keys} - {""}
    missing = parents - keys.keys()
    if missing:
        raise SystemExit(f"no section for: {', '.join(sorted(missing))}")
    return {
        "deepspeed": deepspeed.__version__,
        "torch": torch.__version__.partition("+")[0],
        "keys": {key: keys[key] for key in sorted(keys)},
        "removed": {key: INSTEAD.get(key, "") for key in sorted(removed)},
        "optimizers": optimizers(),
        "schedulers": schedulers(),
        "torch_optimizers": torch_optimizers(),
        "torch_schedulers": torch_schedulers(),
    }


def text_of(derived: dict[str, Any]) -> str:
    """Format the schema with one line per key, so that versions can be compared by diff."""
    lines = ["{"]
    for name, value in derived.items():
        last = name == list(derived)[-1]
        if isinstance(value, dict):
            lines.append(f"  {json.dumps(name)}: {{")
            items = [
                f"    {json.dumps(k)}: {json.dumps(v, sort_keys=True)}" for k, v in value.items()
            ]
            lines += [",\n".join(items), "  }" if last else "  },"]
        else:
            lines.append(f"  {json.dumps(name)}: {json.dumps(value)},")
    return "\n".join([*lines, "}", ""])


def path_of(version: str) -> Path:
    """Return the path of the schema file of a DeepSpeed version."""
    return FOLDER / f"{version}.json"


def differences(old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    """List new, removed and changed keys, one line each."""
    lines = []
    for part in new:
        was, now = old.get(part, {}), new[part]
        if not isinstance(now, dict):
            lines += [f"{part}: {was} -> {now}"] if was != now else []
            continue
        lines += [f"- {part}: {key}" for key in was if key not in now]
        lines += [f"+ {part}: {key} {json.dumps(now[key])}" for key in now if key not in was]
        lines += [
            f"~ {part}: {key} {json.dumps(was[key])} -> {json.dumps(now[key])}"
            for key in now
            if key in was and was[key] != now[key]
        ]
    return lines


def main(arguments: list[str]) -> int:
    """Write the schema of the installed version, and print how it differs from the newest one
    shipped.
    """
    with contextlib.redirect_stdout(sys.stderr):  # DeepSpeed prints to stdout
        derived = schema()
    target = path_of(derived["deepspeed"])
    known = target if target.is_file() else max(FOLDER.glob("*.json"), default=None)
    old = json.loads(known.read_text(encoding="utf-8")) if known else {}
    lines = differences(old, json.loads(json.dumps(derived)))
    print("\n".join(lines) if lines else f"{target.name} is up to date")
    if "--check" in arguments:
        return 1 if lines else 0
    target.write_text(text_of(derived), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
