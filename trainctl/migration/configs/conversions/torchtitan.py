"""Models, batches, schedules and sharding of torchtitan: its TOML, and the JSON of its newer form.

The older form counts sequences (`training.local_batch_size`), the newer one tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainctl.migration.configs.conversions.deepspeed import choose_engine, group_size
from trainctl.migration.configs.conversions.sections import set_shape
from trainctl.migration.configs.import_table import Conversion, is_number
from trainctl.migration.configs.result import Why

MODELS = {
    ("llama", "7B"): "llama-7b",
    ("llama2", "7B"): "llama-7b",
    ("llama2", "13B"): "llama-13b",
    ("llama3", "1B"): "llama-1b",
    ("llama3", "3B"): "llama-3b",
    ("llama3", "8B"): "llama-8b",
    ("llama3", "70B"): "llama-70b",
    ("llama3", "405B"): "llama-405b",
    ("qwen3", "0.6B"): "qwen3-0.6b",
    ("qwen3", "8B"): "qwen3-8b",
    ("qwen3", "32B"): "qwen3-32b",
}
"""Option of the group `model` for each architecture and size that is the same here."""

ASSETS = "model.hf_assets_path"


def model(source: Conversion) -> None:
    """Convert the model: an option by its size, the shape of a dump, or a directory."""
    section = "model_spec" if source.given("model_spec.name") else "model"
    name, flavor = source.get(f"{section}.name"), source.get(f"{section}.flavor")
    if source.given("hf_transformers.model"):
        source.set("model", "hf", f"{section}.name")
        source.set("model.path", source.get("hf_transformers.model"), "hf_transformers.model")
        return
    shape = source.get("model_spec.model")
    size = str(flavor).removesuffix("_flex").removesuffix("_varlen")
    option = MODELS.get((str(name), size))
    if isinstance(shape, Mapping) and name in ("llama3", "qwen3") and _is_dense(shape):
        set_shape(
            source, "llama" if name == "llama3" else "qwen3", _shape(shape), "model_spec.model"
        )
        source.set("model.name", f"{name}-{flavor}".lower(), "model_spec.flavor")
        _rope_scaling(source, shape)
    elif option is not None and shape is None:
        source.set("model", option, f"{section}.flavor")
    else:
        source.set("model", "hf")
        if source.name_of(ASSETS).endswith("hf_assets_path") and source.given(ASSETS):
            source.set("model.path", str(source.get(ASSETS)), ASSETS)
        for key in ("name", "flavor", "model"):
            if source.given(f"{section}.{key}"):
                source.leave(
                    f"{section}.{key}",
                    f"there is no closed form of {name} {flavor}",
                    "model=hf model.path=DIR",
                    value=f"{name} {flavor}",
                )


def _is_dense(shape: Mapping[str, Any]) -> bool:
    layers = shape.get("layers") or [{}]
    return all("feed_forward" in each and not each.get("moe") for each in layers)


def _shape(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of a dump's model; its layers are alike."""
    layer = model["layers"][0]
    attention = layer["attention"]
    heads = int(attention["n_heads"])
    rope = attention.get("rope") or {}
    return {
        "vocab_size": int(model["vocab_size"]),
        "hidden_size": int(model["dim"]),
        "intermediate_size": int(layer["feed_forward"]["w1"]["out_features"]),
        "num_layers": len(model["layers"]),
        "num_attention_heads": heads,
        "num_key_value_heads": int(attention.get("n_kv_heads") or heads),
        "head_dim": int(attention.get("head_dim") or model["dim"] // heads),
        "max_position_embeddings": int(rope.get("max_context_length") or 131072),
        "tie_word_embeddings": bool(model.get("enable_weight_tying")),
        "rope_theta": float(rope.get("theta") or 10000.0),
        "norm_epsilon": float(model["norm"]["eps"]),
    }


def _rope_scaling(source: Conversion, model: Mapping[str, Any]) -> None:
    rope = model["layers"][0]["attention"].get("rope") or {}
    if rope.get("scaling") not in (None, "none"):
        source.leave("model_spec.model", value=rope["scaling"])


def tokenizer(source: Conversion) -> None:
    """Convert the directory of tokenizer and weights."""
    is_loaded = source.is_on("checkpoint.initial_load_in_hf")
    directory = source.get(ASSETS)
    if source.converted.choices.get("model") == "hf":
        source.set("model.weights", "pretrained" if is_loaded else "random")
        source.set("tokenizer", "hf", ASSETS)
        if source.name_of(ASSETS).endswith("tokenizer_path"):
            source.leave(ASSETS, "the tokenizer is the model's", "model.path=DIR")
        return
    source.set("tokenizer", "hf", ASSETS)
    if directory is not None:
        path = str(directory).removesuffix("/tokenizer.model").removesuffix("/original")
        source.set("tokenizer.path", path, ASSETS)
    if is_loaded and directory is not None:
        source.set("model.initial_weights", directory, "checkpoint.initial_load_in_hf")
        source.set("model.weights", "pretrained")


def loss(source: Conversion) -> None:
    """Convert the loss in chunks."""
    if source.count("loss.num_chunks"):
        source.set("kernels.cross_entropy", "chunked", "loss.num_chunks")


MICROBATCH = "training.num_tokens_per_microbatch_per_dp_rank"
WHOLE = "training.num_tokens_per_train_step"


def batch(source: Conversion) -> None:
    """Convert length, micro-batch and whole batch; a pipeline's micro-batches are accumulated."""
    stages = source.count("parallelism.pipeline_parallel_degree")
    if source.count("training.max_context_length"):
        _token_batch(source, stages)
        return
    local, whole = source.count("training.local_batch_size"), "training.global_batch_size"
    source.set("training.sequence_length", source.count("training.seq_len"), "training.seq_len")
    size = local
    if stages > 1:
        count = source.count("parallelism.pipeline_parallel_microbatches")
        size = source.count("parallelism.pipeline_parallel_microbatch_size")
        size = max(1, local // count) if count else size
    source.set("training.micro_batch_size", size, "training.local_batch_size")
    if source.count(whole):
        source.set("training.global_batch_size", source.count(whole), whole)
    else:
        source.set("training.gradient_accumulation_steps", max(1, local // size))


def _token_batch(source: Conversion, stages: int) -> None:
    context = source.count("training.max_context_length")
    source.set("training.sequence_length", context, "training.max_context_length")
    tokens = source.count(MICROBATCH)
    count = source.count("parallelism.num_pp_microbatches") if stages > 1 else 1
    if tokens and tokens % context == 0:
        source.set("training.micro_batch_size", tokens // context, MICROBATCH)
    elif tokens:
        source.leave(
            MICROBATCH, f"it is no multiple of the length {context}", "training.micro_batch_size=1"
        )
        source.set("training.micro_batch_size", 1)
    if source.count(WHOLE):
        source.set("training.global_batch_tokens", source.count(WHOLE), WHOLE)
    else:
        source.set("training.gradient_accumulation_steps", count)


OPTIMIZERS = {"AdamW": "adamw", "Adam": "adam"}


def optimizer(source: Conversion) -> None:
    """Convert the optimizer, or the last of the parameter groups with those before it."""
    groups = source.get("optimizer.param_groups")
    if isinstance(groups, list) and groups and all(isinstance(each, dict) for each in groups):
        _optimizer_groups(source, groups)
        return
    name = str(source.get("optimizer.name"))
    _set_optimizer(source, "optimizer.name", name)
    for ours in ("lr", "beta1", "beta2", "epsilon", "weight_decay"):
        key = "optimizer.eps" if ours == "epsilon" else f"optimizer.{ours}"
        source.set(f"optimizer.{ours}", source.number(key), key)
    source.set("optimizer.decay_embeddings", True)


def _set_optimizer(source: Conversion, key: str, name: str) -> None:
    if name not in OPTIMIZERS:
        source.leave(key, f"there is no optimizer {name}", "optimizer=adamw, or optimizer=muon")
    source.set("optimizer", OPTIMIZERS.get(name, "adamw"), key)


def _optimizer_groups(source: Conversion, groups: list[Mapping[str, Any]]) -> None:
    key = "optimizer.param_groups"
    last = groups[-1]
    values = dict(last.get("optimizer_kwargs") or {})
    _set_optimizer(source, key, str(last.get("optimizer_name")))
    source.set("optimizer.decay_embeddings", True, key)
    for theirs, ours in (("lr", "lr"), ("eps", "epsilon"), ("weight_decay", "weight_decay")):
        if is_number(values.get(theirs)):
            source.set(f"optimizer.{ours}", float(values[theirs]), key)
    for ours, value in zip(("beta1", "beta2"), values.get("betas") or (), strict=False):
        source.set(f"optimizer.{ours}", float(value), key)
    if len(groups) > 1:
        source.leave(key, value=[each.get("pattern") for each in groups[:-1]])


SHAPES = {"linear": "linear", "cosine": "cosine", "sqrt": "one_minus_sqrt"}


def schedule(source: Conversion) -> None:
    """Convert warmup, stable part and decay (torchtitan, components/optimizer/lr_scheduler.py)."""
    kind = str(source.get("lr_scheduler.decay_type"))
    part, lowest = (
        source.number(f"lr_scheduler.{key}") for key in ("decay_ratio", "min_lr_factor")
    )
    if part is None and kind in ("linear", "cosine"):
        source.set("schedule", kind, "lr_scheduler.decay_type")
    elif part == 0:
        source.set("schedule", "constant", "lr_scheduler.decay_ratio")
    else:
        source.set("schedule", "wsd", "lr_scheduler.decay_ratio")
        source.set("schedule.decay_shape", SHAPES.get(kind, "linear"), "lr_scheduler.decay_type")
        steps = source.count("training.steps")
        most = max(0, steps - source.count("lr_scheduler.warmup_steps"))
        decay = most if part is None else min(most, round(steps * part))
        source.set("schedule.decay_steps", decay, "lr_scheduler.decay_ratio")
    if part != 0:
        source.set("schedule.floor_ratio", lowest, "lr_scheduler.min_lr_factor")
        source.set("schedule.floor_after_end", True)
    if not source.given("training.warmup_pct"):
        warmup = source.number("lr_scheduler.warmup_steps") or 0
        source.set("schedule.warmup_steps", max(0, int(warmup)), "lr_scheduler.warmup_steps")
    end = source.get("lr_scheduler.total_steps")
    if end is not None and end != source.get("training.steps"):
        source.leave("lr_scheduler.total_steps")


FLOAT8 = (
    "training.enable_float8_linear",
    "training.enable_fp8_linear",
    "training.fp8_linear",
    "float8.enable_float8_linear",
)
SCALES = tuple(
    f"{section}float8.recipe_name" for section in ("", "quantize.linear.", "quantize.dense.")
)
EMULATED = ("float8.emulate", "quantize.linear.float8.emulate", "quantize.dense.float8.emulate")


def precision(source: Conversion) -> None:
    """Convert the formats of weights, products and sums."""
    weights, products = source.get("training.dtype"), source.get("training.mixed_precision_param")
    converters = source.texts("model.converters")
    switches = [name for name in FLOAT8 if source.get(name) not in (None, False, "")]
    is_float8 = bool(switches) or any("float8" in each for each in converters)
    name = switches[0] if switches else "model.converters"
    if is_float8 and source.count("parallelism.tensor_parallel_degree") > 1:
        source.set("precision", "bf16")
        source.leave(name, "layers that tensor ranks share are not in fp8", "precision=bf16")
    elif is_float8:
        source.set("precision", "fp8", name)
        for name in EMULATED:
            if source.is_on(name):
                source.set("precision.emulate_fp8", True, name)
        for name in SCALES:
            if source.get(name) == "rowwise":
                source.set("precision.fp8_scales", "rowwise", name)
            elif source.get(name) not in (None, "", "tensorwise"):
                source.leave(name, "scales are of whole tensors or of rows", "precision=fp8")
    elif weights == "bfloat16":
        source.set("precision", "bf16-low-memory", "training.dtype")
    elif products == "float32":
        source.set("precision", "fp32", "training.mixed_precision_param")
    else:
        source.set("precision", "bf16", "training.mixed_precision_param")
    for name in converters:
        if "float8" not in name:
            source.leave("model.converters", f"there is no {name}", "precision=fp8", value=name)


def compiler(source: Conversion) -> None:
    """Convert the compilation of blocks."""
    if not source.is_on("compile.enable"):
        return
    if source.count("parallelism.tensor_parallel_degree") > 1:
        source.leave("compile.enable", "blocks of tensor ranks are not compiled", "kernels=plain")
    else:
        source.set("kernels.compile", "blocks", "compile.enable")


RECOMPUTATION = "activation_checkpoint"


def recomputation(source: Conversion) -> None:
    """Convert the recomputation. A dump does not name its kind: the keys of each differ."""
    name = f"{RECOMPUTATION}.mode"
    mode, option = source.get(name), str(source.get(f"{RECOMPUTATION}.selective_ac_option"))
    if "model_spec" in source.document:
        section = source.document.get(RECOMPUTATION)
        name = f"{RECOMPUTATION}.force_recompute_mm_shapes_by_fqns"
        mode = "none" if section is None else "full"
        mode = "selective" if source.given(name) else mode
    if source.given(f"{RECOMPUTATION}.memory_budget") and mode in ("full", "memory_budget"):
        mode = "selective"
        source.leave(f"{RECOMPUTATION}.memory_budget")
    if mode == "selective" and option.isdigit() and int(option) > 0:
        source.set("activation_checkpointing", "full", name)
        key = "activation_checkpointing.every_kth_block"
        source.set(key, int(option), f"{RECOMPUTATION}.selective_ac_option")
    elif mode in ("none", "full", "selective"):
        source.set("activation_checkpointing", mode, name)
    else:
        source.leave(name, f"there is no {mode}", "activation_checkpointing=selective")


EXPERT = "parallelism.expert_parallel_degree"


def axes(source: Conversion) -> None:
    """Convert tensor and pipeline ranks; with tensor ranks, norms are sharded over the sequence."""
    tensor = source.count("parallelism.tensor_parallel_degree")
    pipeline = source.count("parallelism.pipeline_parallel_degree")
    source.set("parallelism.tensor", tensor, "parallelism.tensor_parallel_degree")
    source.set("parallelism.pipeline", pipeline, "parallelism.pipeline_parallel_degree")
    # There the expert ranks contain the tensor ranks.
    expert, rest = divmod(source.count(EXPERT), tensor)
    source.set("parallelism.expert", max(1, expert), EXPERT)
    if expert and rest:
        source.leave(EXPERT, "tensor ranks divide it", f"parallelism.expert={expert}")
    if tensor > 1 and source.is_on("parallelism.enable_sequence_parallel"):
        name = "parallelism.enable_sequence_parallel"
        source.set("parallelism.sequence_sharded_norms", True, name)


SHARD = "parallelism.data_parallel_shard_degree"
COPIES = "parallelism.data_parallel_replicate_degree"
RESHARD = "parallelism.fsdp_reshard_after_forward"


def sharding(source: Conversion) -> None:
    """Convert FSDP2: shards over all data-parallel ranks, or in groups, or copies."""
    shards, copies = source.get(SHARD), source.count(COPIES)
    pipeline = source.count("parallelism.pipeline_parallel_degree")
    strategy = "SHARD_GRAD_OP" if source.get(RESHARD) == "never" else "FULL_SHARD"
    if shards in (0, 1) or source.get("training.data_parallel_type") == "ddp":
        strategy = "NO_SHARD"
    is_hybrid = copies > 1 and strategy != "NO_SHARD"
    choose_engine(
        source,
        strategy,
        name=SHARD if source.given(SHARD) or not is_hybrid else COPIES,
        to_host=source.is_on("training.enable_cpu_offload"),
        group=group_size(shards, copies, source.world_size) if is_hybrid else None,
    )
    if pipeline > 1 and source.converted.choices["zero_stage"] in ("2", "3"):
        source.set("zero_stage", "1", SHARD)
        source.leave(SHARD, "with a pipeline, optimizer states alone are sharded", "zero_stage=1")
    if source.given(COPIES) and copies > 1 and strategy == "NO_SHARD":
        source.leave(COPIES, "derived from the number of ranks", why=Why.ignored)


C4 = "hf://datasets/allenai/c4/en/c4-{}.*.json.gz"


def data(source: Conversion) -> None:
    """Convert the data set: C4 has a place; others must be given."""
    name = source.get("training.dataset")
    loader = source.document.get("dataloader")
    key = "training.dataset" if name is not None else "dataloader.*"
    found = name if name is not None else _dataset(loader)
    source.set("data", "files")
    if found in ("c4", "allenai/c4"):
        source.set("data.paths", [C4.format("train")], key)
        return
    reason, nearest = f"where {found} lies is not known here", "data.paths=[FILE.jsonl, ...]"
    if source.given("training.dataset_path"):
        source.leave("training.dataset_path", "it is a data set of its own format", nearest)
    for each, value in source.leaves.items():
        is_described = each.startswith("dataloader.") and source.table.find(each) == "dataloader.*"
        if each == "training.dataset" or is_described:
            source.leave(each, reason, nearest, Why.left if value else Why.ignored)


def _dataset(section: Any) -> Any:
    """Return the first `source.path` in a dump's section."""
    if not isinstance(section, Mapping):
        return None
    found = section.get("source")
    if isinstance(found, Mapping):
        return found.get("path")
    return _dataset(section.get("dataset"))


def evaluation(source: Conversion) -> None:
    """Convert the held-out evaluation."""
    if not source.is_on("validation.enable"):
        source.set("training.evaluation_samples", 0, "validation.enable")
        source.set("data.held_out_fraction", 0.0)
        keys = source.keys_of("torchtitan.evaluation", but=["validation.enable"])
        source.ignore("evaluation is off", *keys)
        return
    every = source.count("validation.freq")
    source.set("training.evaluate_every_steps", every, "validation.freq")
    dataset = source.get("validation.dataset")
    dumped = source.document.get("validator")
    found = dataset or _dataset((dumped or {}).get("dataloader"))
    if found in ("c4_validation", "allenai/c4"):
        source.set("data.held_out_paths", [C4.format("validation")], "validation.dataset")
    elif dataset is not None:
        source.leave("validation.dataset")
    source.leave("validation.steps")


def saving(source: Conversion) -> None:
    """Convert the checkpoints; without `checkpoint.enable` there are none."""
    source.set("checkpoint.every_minutes", None)
    if not source.is_on("checkpoint.enable"):
        source.set("checkpoint.every_steps", None)
        source.set("checkpoint.at_end", False, "checkpoint.enable")
        keys = source.keys_of("torchtitan.saving", but=["checkpoint.enable"])
        source.ignore("checkpoints are off", *keys)
        return
    source.set("checkpoint.at_end", True, "checkpoint.enable")
    interval = source.count("checkpoint.interval")
    if source.get("checkpoint.interval_type") == "seconds":
        source.set("checkpoint.every_minutes", interval / 60, "checkpoint.interval")
    else:
        source.set("checkpoint.every_steps", interval, "checkpoint.interval")
    keep = "checkpoint.keep_latest_k"
    if source.get(keep) != 0:
        source.set("checkpoint.keep", source.count(keep), keep)
    else:
        source.leave(keep, "a number is kept", "checkpoint.keep=1000000")
    is_late = source.get("checkpoint.async_mode") != "disabled"
    source.set("checkpoint.asynchronous", is_late, "checkpoint.async_mode")


def trackers(source: Conversion) -> None:
    """Convert the loggers that are switched on."""
    names = [name for name in ("tensorboard", "wandb") if source.is_on(f"metrics.enable_{name}")]
    source.set(
        "logging.to",
        names,
        "metrics.enable_wandb" if "wandb" in names else "metrics.enable_tensorboard",
    )
