"""DeepSpeed JSONs drawn from the schema by a seed: about half legal, the others deliberately
broken.

A legal JSON is a choice of stage, format, optimizer, schedule and batch, with further keys of the
schema set to legal values. A broken JSON adds one of BREAKS, which has an entry for each way to
break each rule, or a value that the schema does not allow.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping
from typing import Any

from trainctl.config.schema import Accelerator
from trainctl.rules.deepspeed.case import JsonContext
from trainctl.rules.deepspeed_schema import Key, load
from trainctl.rules.resolve import JSON_RULES
from trainctl.rules.rule import LEFT_OUT

RANKS = 2
Json = dict[str, Any]
Case = dict[str, Any]

Z = "zero_optimization."
CPU = {"device": "cpu", "pin_memory": False}
ZENFLOW = {"select_strategy": "step", "select_interval": 0, "update_interval": 1}
SPLIT = {
    "autotp_size": 2,
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [".*second.weight$"], "partition_type": "row"},
            {"patterns": [".*first.weight$"], "partition_type": "column"},
        ],
    },
}

# Rules that the tiny model, a CPU and two processes cannot show: compilers, packages, services,
# drives.
LEFT_ALONE = (
    "activation_checkpointing",
    "autotuning",
    "bfloat16",
    "checkpoint.writer",
    "comet.",
    "compile.",
    "csv_monitor.",
    "data_efficiency.",
    "data_types.",
    "datastates_ckpt",
    "expert_parallel",
    "flops_profiler.enabled",
    "hybrid_engine.",
    "tensor_parallel.",
    "tensorboard.",
    "wandb.",
    "weight_quantization",
    "zero_optimization.offload",
    "zero_optimization.zenflow",
    "zero_optimization.leaf_module",
    "optimizer",
    "scheduler",
    "fp16.enabled",
    "torch_autocast",
    # Whether a module is fine-grained depends on the model; all modules of the tiny one are.
    "zero_optimization.stage3_module_granularity_threshold",
)
CHOSEN = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
    "gradient_predivide_factor",
    "gradient_allreduce_op",
    "prescale_gradients",
    "managed_gradient_accumulation",
    "sequence_parallel_size",
    "data_parallel_size",
    "zero_allow_untested_optimizer",
    "zero_optimization.stage",
    "zero_optimization.legacy_stage1",
    "zero_optimization.compute_grad_norm",
    "zero_optimization.allgather_bucket_size",
    "zero_optimization.pipeline_loading_checkpoint",
    "zero_optimization.zero_hpz_partition_size",
    "zero_optimization.zero_quantized_weights",
    "zero_optimization.zero_quantized_gradients",
    "zero_optimization.zero_quantized_nontrainable_weights",
    "aio.use_gds",
    "bf16.enabled",
    "bf16.bf16_master_weights_and_grads",
    "bf16.bf16_optimizer_states",
    "fp16.auto_cast",
    "fp16.fp16_master_weights_and_grads",
    "fp16.initial_scale_power",
    "dump_state",
    "log_level",
    "allgather_size",
)
"""Keys that the sampler sets itself, in combinations."""

_BY_CODE = {rule.code: rule for rule in JSON_RULES}


def _own(code: str) -> tuple[str, Json]:
    """Return a rule with the example beside it."""
    return code, dict(_BY_CODE[code].example.json)


# A rule, and the keys that break it when added to a legal JSON.
BREAKS: list[tuple[str, Json]] = [
    _own("TC203"),
    ("TC203", {f"{Z}stagee": 2}),
    ("TC203", {f"{Z}offload_optimizer": {"devise": "cpu"}}),
    ("TC203", {"tensor_parallel.auto_tp_size": 1}),
    ("TC203", {"timers.throughput.enable": True}),
    _own("TC204"),
    ("TC204", {"zero_optimisation": {"stage": 3}}),
    ("TC204", {"checkpoint.tag_validatoin": "Fail"}),
    ("TC204", {"aio.que_depth": 8}),
    ("TC204", {"pipeline.stage": 2}),
    ("TC204", {"zero_optimization.stage": 1, "optimizer.parms": {}}),
    _own("TC205"),
    ("TC205", {"elasticity": {"enabled": False}}),
    ("TC205", {"curriculum_learning": {}}),
    ("TC205", {f"{Z}mics_shard_size": 2}),
    _own("TC206"),
    ("TC206", {"zero_optimization": True}),
    ("TC206", {f"{Z}stage": 3, f"{Z}stage3_gather_fp16_weights_on_model_save": True}),
    ("TC206", {"bf16": LEFT_OUT, "bfloat16": {"enabled": True}, "fp16": LEFT_OUT}),
    _own("TC207"),
    ("TC207", {f"{Z}max_live_parameters": 10, f"{Z}stage3_max_live_parameters": 10}),
    _own("TC208"),
    ("TC208", {"gradient_clipping": "auto"}),
    _own("TC227"),
    ("TC208", {"optimizer": {"type": "SGD", "params": {"lr": "auto"}}}),
    ("TC227", {"bf16.enabled": "auto"}),
    _own("TC210"),
    ("TC210", {f"{Z}overlap_comm": "maybe"}),
    ("TC210", {"fp16": None}),
    ("TC210", {f"{Z}reduce_scatter": None}),
    _own("TC211"),
    ("TC211", {"gradient_clipping": "1.0"}),
    ("TC211", {"prescale_gradients": "false"}),
    ("TC211", {"checkpoint": None}),
    ("TC211", {"optimizer": "AdamW"}),
    _own("TC212"),
    ("TC212", {f"{Z}offload_optimizer": {"device": "gpu"}}),
    ("TC212", {f"{Z}reduce_bucket_size": 0}),
    ("TC212", {"fp16.loss_scale": -1}),
    _own("TC213"),
    ("TC213", {"gradient_allreduce_op": "max"}),
    ("TC213", {"checkpoint.tag_validation": "loud"}),
    ("TC213", {"log_level": "loud"}),
    ("TC213", {"data_types.grad_accum_dtype": "fp99"}),
    ("TC213", {"gradient_clipping": -1}),
    ("TC213", {"train_batch_size": 0}),
    _own("TC214"),
    ("TC214", {f"{Z}overlap_comm": "no"}),
    _own("TC215"),
    ("TC215", {"stages": 2, f"{Z}stage": 3}),
    _own("TC216"),
    _own("TC217"),
    ("TC217", {"stages": 2, "managed_gradient_accumulation": False, f"{Z}stage": 1}),
    _own("TC219"),
    ("TC219", {"expert_parallel": {"enabled": True, "expert_tensor_parallel_size": 2}}),
    _own("TC220"),
    _own("TC221"),
    ("TC221", {"train_batch_size": 1}),
    ("TC221", {"train_batch_size": 12, "gradient_accumulation_steps": 4}),
    _own("TC222"),
    _own("TC223"),
    _own("TC224"),
    _own("TC225"),
    _own("TC226"),
    _own("TC228"),
    _own("TC229"),
    _own("TC230"),
    _own("TC231"),
    _own("TC232"),
    _own("TC233"),
    _own("TC234"),
    _own("TC235"),
    _own("TC236"),
    _own("TC237"),
    _own("TC238"),
    _own("TC239"),
    _own("TC240"),
    _own("TC241"),
    _own("TC242"),
    _own("TC243"),
    ("TC243", {"torch_autocast": {"enabled": True, "lower_precision_safe_modules": ["a.B"]}}),
    _own("TC244"),
    _own("TC245"),
    _own("TC246"),
    _own("TC247"),
    _own("TC248"),
    _own("TC249"),
    _own("TC250"),
    ("TC250", {"optimizer.type": "sgd"}),
    _own("TC251"),
    ("TC251", {"optimizer.params.bias_correction": True}),
    _own("TC252"),
    _own("TC253"),
    ("TC253", {"optimizer.params.lr": -1}),
    ("TC253", {"optimizer": {"type": "Adam", "params": {"torch_adam": True, "betas": [0.9, 1.5]}}}),
    _own("TC254"),
    _own("TC255"),
    _own("TC256"),
    _own("TC257"),
    _own("TC258"),
    _own("TC259"),
    _own("TC260"),
    _own("TC261"),
    ("TC261", {"optimizer": {"type": "LBFGS", "params": {}}, "scheduler": LEFT_OUT}),
    _own("TC262"),
    ("TC262", {"optimizer": {"params": {"lr": 0.1}}}),
    _own("TC263"),
    _own("TC265"),
    _own("TC266"),
    ("TC266", {"scheduler": {"type": "WarmupLR", "params": {"total_num_steps": 10}}}),
    ("TC266", {"scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10}}}),
    _own("TC267"),
    ("TC267", {"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "10"}}}),
    ("TC267", {"scheduler": {"type": "LRRangeTest", "params": {"lr_range_test_min_lr": "1e-3"}}}),
    _own("TC268"),
    _own("TC269"),
    _own("TC270"),
    _own("TC271"),
    _own("TC272"),
    _own("TC275"),
    ("TC275", {f"{Z}stage": 3, f"{Z}reduce_scatter": True, "gradient_predivide_factor": 2}),
    _own("TC276"),
    _own("TC277"),
    _own("TC278"),
    _own("TC279"),
    ("TC279", {f"{Z}stage": 1, f"{Z}compute_grad_norm": False, "gradient_clipping": 1.0}),
    _own("TC280"),
    _own("TC281"),
    ("TC281", {f"{Z}stage": 3, f"{Z}zero_quantized_gradients": True}),
    _own("TC282"),
    ("TC282", {f"{Z}stage": 0, f"{Z}reduce_bucket_size": 1000}),
    _own("TC283"),
    _own("TC284"),
    _own("TC285"),
    _own("TC286"),
    ("TC286", {f"{Z}stage": 0, f"{Z}offload_optimizer": CPU}),
    ("TC286", {f"{Z}stage": 1, f"{Z}offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}),
    _own("TC287"),
    ("TC287", {f"{Z}stage": 3, f"{Z}offload_optimizer": {**CPU, "ratio": 0.5}}),
    _own("TC288"),
    ("TC288", {f"{Z}stage": 3, f"{Z}offload_optimizer": {"device": "nvme"}}),
    _own("TC290"),
    _own("TC291"),
    _own("TC292"),
    _own("TC293"),
    (
        "TC293",
        {f"{Z}stage": 1, f"{Z}offload_optimizer": CPU, f"{Z}zenflow": {"select_interval": 4}},
    ),
    _own("TC294"),
    _own("TC295"),
    _own("TC296"),
    _own("TC297"),
    ("TC297", {"wandb.enabled": True}),
    _own("TC298"),
    ("TC298", {"data_efficiency": {"data_sampling": {"curriculum_learning": {"enabled": True}}}}),
    _own("TC431"),
    _own("TC432"),
    _own("TC433"),
    _own("TC434"),
    ("TC213", {"expert_parallel": {"enabled": True, "preset_model": "mixtrall"}}),
    ("TC250", {"optimizer.type": "OneBitAdam"}),
    _own("TC299"),
]


def sample(seed: int, count: int) -> list[Case]:
    """Draw cases by a seed; each break is used before any is repeated."""
    rng = random.Random(seed)
    breaks: list[tuple[str, Json]] = []
    cases = []
    for _ in range(count):
        kind = rng.random()
        case = _case(legal(rng))
        if kind < 0.42:
            pass
        elif kind < 0.86:
            if not breaks:
                breaks = rng.sample(BREAKS, len(BREAKS))
            rule, changes = breaks.pop()
            case = broken(case["json"], rule, changes)
        else:
            _spoil(rng, case)
        cases.append(case)
    return cases


def every_break(seed: int) -> list[Case]:
    """Return one case per break, on legal JSONs drawn by a seed."""
    rng = random.Random(seed)
    cases = []
    for rule, changes in BREAKS:
        cases.append(broken(legal(rng), rule, changes))
    return cases


def around(case: Case) -> JsonContext:
    """Return the environment of the real run: CPU processes, and a script without an optimizer."""
    return JsonContext(
        world_size=RANKS,
        devices_per_node=RANKS,
        accelerator=Accelerator.cpu,
        pipeline_stages=case.get("stages") or 1,
        has_optimizer=False,
    )


def legal(rng: random.Random) -> Json:
    """Draw a JSON that DeepSpeed trains with on two CPU processes."""
    stage = rng.choice([0, 1, 1, 2, 2, 3, 3])
    config: Json = {}
    _batch(rng, config)
    _set(config, f"{Z}stage", stage)
    config["gradient_clipping"] = rng.choice([0, 0.0, 0.5, 1.0])
    bf16 = rng.random() < 0.5
    if bf16 or rng.random() < 0.3:
        _set(config, "bf16.enabled", bf16)
    _optimizer(rng, config, stage)
    if rng.random() < 0.4:
        _schedule(rng, config, plain=stage == 0 and not bf16)
    if stage and rng.random() < 0.3:
        _set(config, f"{Z}offload_optimizer", dict(CPU))
    if stage == 3 and rng.random() < 0.3:
        _set(config, f"{Z}offload_param", dict(CPU))
    if stage and rng.random() < 0.2:
        _set(
            config, "data_types.grad_accum_dtype", rng.choice(["fp32", "bf16" if bf16 else "fp32"])
        )
    if not bf16 and rng.random() < 0.15:
        config["torch_autocast"] = {"enabled": True, "dtype": rng.choice(["bf16", "bfloat16"])}
    if stage in (1, 2) and rng.random() < 0.3:
        _set(config, f"{Z}allgather_bucket_size", 2 * rng.randrange(1, 10**8))
    if stage in (0, 1) and rng.random() < 0.2:
        config["prescale_gradients"] = True
    if stage < 3 and rng.random() < 0.1:
        config["gradient_allreduce_op"] = rng.choice(["sum", "MEAN"])
    for key in rng.sample(FREE, rng.randrange(0, 6)):
        _set(config, key.name, _legal_value(rng, key))
    return config


def _case(config: Json) -> Case:
    return {"json": config, "world_size": RANKS, "breaks": ""}


def _batch(rng: random.Random, config: Json) -> None:
    micro, steps = rng.choice([1, 2, 4]), rng.choice([1, 2])
    total = micro * steps * RANKS
    shape = rng.randrange(5)
    if shape != 0:
        config["train_batch_size"] = total
    if shape in (0, 1, 2):
        config["train_micro_batch_size_per_gpu"] = micro
    if shape in (0, 1, 3):
        config["gradient_accumulation_steps"] = steps


def _optimizer(rng: random.Random, config: Json, stage: int) -> None:
    kind = rng.choice(["AdamW", "AdamW", "adamw", "Adam", "SGD", "Adagrad", "NAdam", "RMSprop"])
    if kind.lower() in ("adam", "adamw"):
        params: Json = {"lr": 1e-3, "torch_adam": True}
        if rng.random() < 0.5:
            params |= {"betas": [0.9, 0.95], "eps": 1e-8, "weight_decay": 0.1}
    else:
        params = {"lr": 1e-3}
        if rng.random() < 0.3:
            params["weight_decay"] = 0.01
    if kind in ("SGD", "NAdam", "RMSprop") and stage:
        config["zero_allow_untested_optimizer"] = True
    if kind == "Adagrad":
        # Offloaded, it is DeepSpeed's own kernel, which would have to be compiled.
        kind, params = "Adam", {"lr": 1e-3, "torch_adam": True, "amsgrad": True}
    config["optimizer"] = {"type": kind, "params": params}


def _schedule(rng: random.Random, config: Json, *, plain: bool) -> None:
    config["scheduler"] = rng.choice(
        [
            {"type": "WarmupLR", "params": {"warmup_num_steps": 10, "warmup_type": "linear"}},
            {"type": "WarmupLR", "params": {}},
            {
                "type": "WarmupDecayLR",
                "params": {"total_num_steps": 5000, "warmup_max_lr": 1e-3},
            },
            {"type": "WarmupCosineLR", "params": {"total_num_steps": 100, "warmup_num_steps": 5}},
            {"type": "OneCycle", "params": {"cycle_min_lr": 1e-4, "cycle_max_lr": 1e-3}},
            {"type": "LRRangeTest", "params": {}},
            *([{"type": "StepLR", "params": {"step_size": 3}}] if plain else []),
        ]
    )


def broken(config: Json, rule: str, changes: Json) -> Case:
    """Change a JSON in place so that it breaks a rule."""
    case = {**_case(config), "breaks": rule}
    for key, value in changes.items():
        if key == "stages":
            case["stages"] = value
            config.pop("torch_autocast", None)
        elif value == LEFT_OUT:
            _drop(config, key)
        else:
            _set(config, key, json.loads(json.dumps(value)))
    if "stages" in changes:
        # A pipeline of two stages has one data-parallel rank.
        for key in ("train_batch_size", "gradient_accumulation_steps"):
            config.pop(key, None)
        config["train_micro_batch_size_per_gpu"] = 2
    return case


def _spoil(rng: random.Random, case: Case) -> None:
    """Set a key of the schema to a value of a wrong type or out of range."""
    key = rng.choice(FREE)
    _set(case["json"], key.name, rng.choice(list(_illegal_values(key))))
    case["breaks"] = "schema"


def _illegal_values(key: Key) -> Iterator[Any]:
    yield [1]
    yield {"a": 1}
    if key.type != "string":
        yield "many"
    if key.type in ("integer", "boolean"):
        yield 2.5
    if key.choices:
        yield "none of them" if key.type == "string" else 99
    if key.minimum is not None:
        yield key.minimum - 1
    if key.type == "string":
        yield 7


def _legal_value(rng: random.Random, key: Key) -> Any:
    if key.choices:
        return rng.choice(key.choices)
    if key.type == "boolean":
        return rng.random() < 0.5
    least = int(max(key.minimum or 0, (key.above or 0) + 1, 1))
    if key.type == "integer":
        return rng.choice([least, least + 1, 1000, 2 * 10**6])
    return rng.choice([1, 1.0, 0.5]) if key.maximum == 1 else 1.0


def _set(config: Json, key: str, value: Any) -> None:
    *parents, name = key.split(".")
    for parent in parents:
        inner = config.get(parent)
        if not isinstance(inner, dict):
            inner = config[parent] = {}
        config = inner
    config[name] = value


def _drop(config: Mapping[str, Any], key: str) -> None:
    *parents, name = key.split(".")
    for parent in parents:
        config = config.get(parent, {})
        if not isinstance(config, dict):
            return
    assert isinstance(config, dict)
    config.pop(name, None)


FREE = [
    key
    for key in load().keys.values()
    if key.type in ("boolean", "integer", "number", "string")
    and (key.type != "string" or key.choices)
    and not key.replaced
    and not key.same_as
    and key.name not in CHOSEN
    and not key.name.startswith(LEFT_ALONE)
]
"""Keys that may have any legal value, independent of the others."""
