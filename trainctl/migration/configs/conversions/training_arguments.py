"""Optimizer, memory and checkpoints of transformers' TrainingArguments."""

from __future__ import annotations

from trainctl.migration.configs.conversions.deepspeed import choose_engine, convert_file, group_size
from trainctl.migration.configs.conversions.sections import WHY_NO_OPTIMIZER, choose_optimizer
from trainctl.migration.configs.import_table import Conversion


def optimizer(source: Conversion) -> None:
    """Convert `optim`; before 4.20 a switch chose Adafactor."""
    if source.is_on("adafactor"):
        source.leave("adafactor", WHY_NO_OPTIMIZER["adafactor"], "optimizer=adafactor")
        source.set("optimizer", "adamw")
    elif source.table.keys["optim"].convert == "training_arguments.optimizer":
        choose_optimizer(source, "optim")  # a table that extends this one may read it otherwise


def recomputation(source: Conversion) -> None:
    """Convert the recomputation of blocks, by the model or by FSDP."""
    names = ("activation_checkpointing", "fsdp_config.activation_checkpointing")
    asked = [name for name in names if source.is_on(name)]
    if asked or "activation_checkpointing" not in source.converted.choices:
        source.set("activation_checkpointing", "full" if asked else "none", *(asked or names))


def deepspeed(source: Conversion) -> None:
    """Convert the JSON that `deepspeed` holds or names."""
    if source.given("deepspeed") and source.get("deepspeed") != "":
        source.set("engine", "deepspeed", "deepspeed")
        convert_file(source, "deepspeed")


STRATEGIES = ("full_shard", "shard_grad_op", "no_shard", "hybrid_shard", "hybrid_shard_zero2")


def sharding(source: Conversion) -> None:
    """Convert `fsdp`, a switch or words such as `full_shard auto_wrap offload`."""
    words = {word for text in source.texts("fsdp") for word in text.lower().split()}
    section, sizes = "fsdp_config", "parallelism_config"
    names = (
        f"{section}.reshard_after_forward",
        f"{section}.offload_params",
        f"{sizes}.dp_replicate_size",
        f"{sizes}.dp_shard_size",
    )
    if not words - {"false", "none"} or source.given("deepspeed"):
        source.ignore("FSDP is not used", "fsdp", *names)
        return
    reshard = source.get(names[0])
    strategy = next((word for word in STRATEGIES if word in words), None)
    if strategy is None and reshard in (False, "shard_grad_op"):
        strategy = "shard_grad_op"
    to_host = "offload" in words or source.is_on(names[1])
    copies = source.count(names[2])
    group = group_size(source.get(names[3]), copies, source.world_size) if copies > 1 else None
    choose_engine(source, strategy, name="fsdp", to_host=to_host, group=group)
    if isinstance(source.get(section), str):
        source.leave(section, "it is a file of its own", "its keys in this file")


def kept(source: Conversion) -> None:
    """Convert the number of checkpoints that are kept: all of them, unless it is given."""
    if source.count("save_total_limit"):
        source.set("checkpoint.keep", source.count("save_total_limit"), "save_total_limit")
    elif str(source.get("save_strategy")) not in ("no", "False"):
        source.leave("save_total_limit", "all are kept there, and three here", "checkpoint.keep=N")


def best(source: Conversion) -> None:
    """Convert the checkpoint that is kept for its held-out loss."""
    metric = "metric_for_best_model"
    if not source.is_on("load_best_model_at_end"):
        source.ignore("load_best_model_at_end is off", metric, "greater_is_better")
    elif source.get(metric) in (None, "loss", "eval_loss"):
        source.set("checkpoint.best_of", "loss", "load_best_model_at_end")
    else:
        for name in (metric, "load_best_model_at_end"):
            source.leave(name, "the best is by the held-out loss", "checkpoint.best_of=loss")


def ranks(source: Conversion) -> None:
    """Convert the number of processes that a pickle tells: the whole batch follows from it."""
    processes = source.count("distributed_state.num_processes")
    if processes:
        names = ("per_device_train_batch_size", "gradient_accumulation_steps")
        size = processes * source.count(names[0]) * source.count(names[1])
        source.converted.settings.pop("training.gradient_accumulation_steps", None)
        source.set("training.global_batch_size", size, "distributed_state.num_processes")


def project(source: Conversion) -> None:
    """Convert the project of trackio, which has a value for every tracker there."""
    if "trackio" in (source.converted.settings.get("logging.to") or []):
        source.set("logging.trackio.project", source.get("project"), "project")
    else:
        source.ignore("trackio alone has it", "project")


def devices(source: Conversion) -> None:
    """Convert the switch to the CPU; without it, devices are those that there are."""
    if source.is_on("use_cpu"):
        source.set("hardware", "cpu", "use_cpu")
    else:
        source.ignore("devices are those that there are", "use_cpu")
