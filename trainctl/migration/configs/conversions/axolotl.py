"""Axolotl's keys that only together mean something here."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trainctl.migration.configs.conversions import trainer
from trainctl.migration.configs.conversions.deepspeed import choose_engine, convert_file
from trainctl.migration.configs.conversions.sections import (
    DataPart,
    choose_data,
    choose_optimizer,
    place,
)
from trainctl.migration.configs.import_table import Conversion, is_number
from trainctl.migration.configs.result import Why


def length(source: Conversion) -> None:
    """Convert `max_steps`, which replaces the epochs if it is above 0."""
    trainer.convert_length(source, "num_epochs")


def batch(source: Conversion) -> None:
    """Convert the accumulation, which `batch_size` over the micro-batch implies if it is absent."""
    steps, total = source.number("gradient_accumulation_steps"), source.number("batch_size")
    micro = source.number("micro_batch_size") or 1
    if steps is None:
        steps = max(1, (total or micro) // micro)
        source.set("training.gradient_accumulation_steps", int(steps), "batch_size")
        return
    source.set("training.gradient_accumulation_steps", int(steps), "gradient_accumulation_steps")
    source.ignore("gradient_accumulation_steps replaces it", "batch_size")


def adapter(source: Conversion) -> None:
    """Convert the adapter, its layers, and the format of the frozen base."""
    kind = str(source.get("adapter") or "")
    if kind not in ("lora", "qlora"):
        source.set("adapter", "none")
        if kind:
            source.leave("adapter", f"there is no adapter {kind}", "adapter=lora")
        what = f"adapter: {kind}" if kind else "without an adapter"
        names = source.keys_of("axolotl.adapter", but=["adapter"])
        source.ignore(f"{what} it has no effect here", *names)
        return
    both = [name for name in ("peft_use_dora", "peft_use_rslora") if source.is_on(name)]
    options = {"peft_use_dora": "dora", "peft_use_rslora": "rslora"}
    option = options[both[0]] if both else "lora"
    source.set("adapter", option, "adapter")
    if len(both) > 1:
        source.leave(both[1], f"there is no adapter that does both; {both[0]} is", "adapter=rslora")
    source.set("adapter.rank", int(source.number("lora_r") or 8), "lora_r")
    source.set("adapter.alpha", float(source.number("lora_alpha") or 8), "lora_alpha")
    source.set("adapter.dropout", float(source.number("lora_dropout") or 0), "lora_dropout")
    _base_weights(source, kind)
    _layers(source)


def _base_weights(source: Conversion, kind: str) -> None:
    double = "bnb_config_kwargs.bnb_4bit_use_double_quant"
    weights = "compute"
    if kind == "qlora" and source.is_on("load_in_4bit"):
        weights = "nf4_double" if source.get(double) is not False else "nf4"
    elif kind == "lora" and source.is_on("load_in_8bit"):
        weights = "int8"
    elif source.is_on("load_in_4bit"):
        source.leave("load_in_4bit")
    source.set("adapter.base_weights", weights, "load_in_4bit", "load_in_8bit", double)
    if source.given(double) and not weights.startswith("nf4"):
        source.leave(double, "the base has no 4 bits", why=Why.ignored)


def _layers(source: Conversion) -> None:
    """Convert the names of the layers with adapters, and of those that train as they are."""
    targets = source.get("lora_target_modules")
    if source.is_on("lora_target_linear"):
        targets = trainer.with_experts(source, [])
        source.set("adapter.targets", targets, "lora_target_linear")
    elif isinstance(targets, list) and all(_is_name(each) for each in targets):
        names = "lora_target_modules", "lora_target_parameters"
        trainer.set_targets(source, trainer.with_experts(source, targets), *names)
    elif source.given("lora_target_modules"):
        source.leave("lora_target_modules")
    saved = source.texts("lora_modules_to_save")
    known = [trainer.ALSO_TRAINED[each] for each in saved if each in trainer.ALSO_TRAINED]
    if known:
        source.set("adapter.also_train", known, "lora_modules_to_save")
    if len(known) < len(saved):
        rest = [each for each in saved if each not in trainer.ALSO_TRAINED]
        source.leave(
            "lora_modules_to_save",
            "embeddings and head are named here; others by expressions",
            f"adapter.also_train=[{','.join(rest)}]",
            value=rest,
        )


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[\w.]+", value) is not None


def frozen(source: Conversion) -> None:
    """Convert the parameters that alone are trained to the expression of those that are not."""
    patterns = source.texts("unfrozen_parameters")
    if not patterns:
        return
    if source.get("adapter"):
        source.leave("unfrozen_parameters")
        return
    if any(re.search(r"\[\d*:\d*\]$", each) for each in patterns):
        source.leave(
            "unfrozen_parameters", "rows of a matrix are not frozen apart", "training.freeze"
        )
        return
    kept = "|".join(f"(?:{each})" for each in patterns)
    source.set("training.freeze", [f"^(?!.*(?:{kept}))"], "unfrozen_parameters")


RECORDS = {
    **dict.fromkeys(("dpo", "orpo", "simpo", "reward"), "preferences"),
    "kto": "answers",
    "process_reward": "steps",
}
"""Kind of data for each objective of records."""


def objective(source: Conversion) -> None:
    """Convert the objective of `rl` and its strengths (TRL's defaults)."""
    kind = str(source.get("rl") or "")
    beta = source.number("rl_beta") or 0.1
    if kind in ("dpo", "ipo"):
        source.set("objective", "dpo", "rl")
        source.set("objective.beta", beta, "rl_beta")
        source.set("objective.loss", "ipo" if kind == "ipo" else "sigmoid")
        if kind == "dpo":
            _loss_of_pairs(source)
    elif kind == "orpo":
        source.set("objective", "orpo", "rl")
        name = "rl_beta" if source.given("rl_beta") else "orpo_alpha"
        source.set("objective.weight", source.number(name) or 0.1, "rl_beta", "orpo_alpha")
    elif kind == "simpo":
        source.set("objective", "simpo", "rl")
        source.set("objective.beta", beta, "rl_beta")
        gamma = source.number("simpo_gamma")
        source.set("objective.gamma_ratio", (0.5 if gamma is None else gamma) / beta, "simpo_gamma")
        alpha = source.number("cpo_alpha")
        if alpha is None or alpha:
            source.leave("cpo_alpha")
        else:
            source.set("objective", "simpo", "rl", "cpo_alpha")
    elif kind == "kto":
        source.set("objective", "kto", "rl")
        source.set("objective.beta", beta, "rl_beta")
        for name in filter(source.given, ("kto_desirable_weight", "kto_undesirable_weight")):
            key = name.replace("kto_", "objective.")
            source.set(key, source.number(name), name)
    elif kind:
        is_sampled = kind in ("grpo", "gdpo")
        reason = "rewards are set up anew" if is_sampled else f"there is no objective {kind}"
        source.set("objective", "next_token")
        source.leave("rl", reason, "objective=grpo" if is_sampled else "objective=dpo")
    elif source.is_on("reward_model"):
        source.set("objective", "reward", "reward_model")
        centering = source.number("center_rewards_coefficient") or 0.0
        source.set("objective.centering", centering, "center_rewards_coefficient")
    elif source.is_on("process_reward_model"):
        source.set("objective", "process_reward", "process_reward_model")
    elif source.get("kd_trainer"):
        _distillation(source)
    else:
        source.set("objective", "next_token")
    unused = source.unused_keys_of("axolotl.objective", but=["rl"])
    source.ignore(f"rl: {kind or 'none'} does not use it", *unused)


def _distillation(source: Conversion) -> None:
    """Convert the distillation of Axolotl's plugin.

    Its loss is kd_alpha T^2 divergence + kd_ce_alpha cross entropy (integrations/kd): ours is that
    divided by the sum of both weights.
    """
    source.set("objective", "distill", "kd_trainer")
    temperature = source.number("kd_temperature") or 1.0
    source.set("objective.temperature", temperature, "kd_temperature")
    soft, hard = source.number("kd_alpha") or 0.0, source.number("kd_ce_alpha") or 0.0
    soft *= temperature**2
    weight = hard / (soft + hard) if soft + hard else 0.0
    source.set("objective.label_weight", round(weight, 6), "kd_alpha", "kd_ce_alpha")
    trainer.convert_teacher(source, "kd_online_server_model", "kd_beta", default_beta=0.0)
    source.copy("objective.top_k", "kd_online_topk")


def _loss_of_pairs(source: Conversion) -> None:
    losses = source.texts("dpo_loss_type") or ["sigmoid"]
    if losses in (["sigmoid"], ["hinge"], ["ipo"]):
        source.set("objective.loss", losses[0], "dpo_loss_type")
    else:
        source.leave("dpo_loss_type", "there is no such loss of pairs", "objective.loss=sigmoid")
    smoothing = source.number("dpo_label_smoothing") or 0.0
    source.set("objective.label_smoothing", smoothing, "dpo_label_smoothing")


def optimizer(source: Conversion) -> None:
    """Convert the name of the optimizer."""
    choose_optimizer(source, "optimizer")


def learning_rates(source: Conversion) -> None:
    """Convert learning rates of groups of parameters to factors of the learning rate."""
    peak = source.number("learning_rate") or 0.0
    factor, rate = source.number("embedding_lr_scale"), source.number("embedding_lr")
    names = [name for name in ("embedding_lr", "embedding_lr_scale") if source.given(name)]
    groups: list[dict[str, Any]] = []
    if factor is None and rate and peak:
        factor = rate / peak
    if factor and names:
        groups.append({"match": "embed|wte|lm_head", "lr_factor": factor})
    for index, group in enumerate(_entries(source, "lr_groups")):
        modules, value = group.get("modules"), group.get("lr")
        value = value if is_number(value) else 0
        if isinstance(modules, list) and value and value > 0 and peak:
            match = "|".join(re.escape(str(each)) for each in modules)
            groups.append({"match": match, "lr_factor": value / peak})
        else:
            for key in source.leaves:
                if key.startswith(f"lr_groups[{index}]"):
                    source.leave(key, "a group has modules and lr", "optimizer.groups")
    if groups:
        source.set("optimizer.groups", groups)


def schedule(source: Conversion) -> None:
    """Convert the schedule and its warmup; without one it is 3 % of the run."""
    kind = str(source.get("lr_scheduler"))
    if kind in ("one_cycle", "rex"):
        source.leave(
            "lr_scheduler", f"there is no schedule {kind} as there", f"schedule={NEAR[kind]}"
        )
        source.set("schedule", NEAR[kind])
        source.set("schedule.floor_ratio", 0.0)
        trainer.set_ends(source)
        trainer.warmup(source)
        source.ignore(f"of {kind}", "lr_scheduler_kwargs")
    else:
        trainer.convert_schedule(source, "lr_scheduler")
    floor = source.number("cosine_min_lr_ratio")
    if floor is not None and kind == "cosine":
        source.set("schedule.floor_ratio", floor, "cosine_min_lr_ratio")
    elif floor is not None:
        source.leave("cosine_min_lr_ratio", f"{kind} does not use it", why=Why.ignored)
    constant = source.number("cosine_constant_lr_ratio")
    if constant and floor:
        source.leave("cosine_constant_lr_ratio")
    else:
        source.ignore("0 changes nothing", "cosine_constant_lr_ratio")
    if kind != "constant" and not source.given("warmup_steps") and not source.given("warmup_ratio"):
        source.set("schedule.warmup_fraction", 0.03)
        source.leave("warmup_steps")


NEAR = {"one_cycle": "one_cycle", "rex": "polynomial"}
"""Nearest schedules of Axolotl's own."""


def precision(source: Conversion) -> None:
    """Convert the formats: `bf16: auto` is bf16 on every device that has it."""
    wanted = {name: source.get(name) for name in ("fp8", "bf16", "fp16", "bfloat16", "float16")}
    is_bf16 = wanted["bf16"] not in (False, None) and not (
        wanted["fp16"] is True and wanted["bf16"] == "auto"
    )
    if wanted["fp8"] is True:
        source.set("precision", "fp8", "fp8")
    elif wanted["bfloat16"] is True and wanted["bf16"] in (False, "auto"):
        trainer.set_pure_bf16(source, "bfloat16")
    elif is_bf16:
        source.set("precision", "bf16", "bf16")
    elif wanted["fp16"] is True or wanted["float16"] is True:
        name = "fp16" if wanted["fp16"] is True else "float16"
        source.set("precision", "fp16", name)
        if source.get("adapter"):
            source.set("precision", "bf16")
            source.leave(name, "adapters are trained in bf16 or fp32", "precision=bf16")
    else:
        source.set("precision", "fp32")


def recomputation(source: Conversion) -> None:
    """Convert recomputation, of all activations or without those of the costly operations."""
    mode, offload = source.get("gradient_checkpointing"), source.get("activation_offloading")
    selective = [name for name in source.leaves if name.startswith("selective_checkpointing")]
    is_off = source.leaves.get("selective_checkpointing") in (False, None)
    is_selective = any("." in name for name in selective) or not is_off
    option = "none"
    if mode in ("offload", "offload_disk") or (mode and offload):
        option = "offloaded"
    elif mode is True:
        option = "selective" if is_selective else "full"
    elif offload:
        option = "offloaded"
    source.set("activation_checkpointing", option, "gradient_checkpointing")
    if mode == "offload_disk" or offload == "disk":
        name = "gradient_checkpointing" if mode == "offload_disk" else "activation_offloading"
        source.leave(name)
    for name in selective:
        if "." in name:
            source.leave(name)


def sharding(source: Conversion) -> None:
    """Convert DeepSpeed's JSON or torch's FSDP; without either all states are on every rank."""
    parts = [name for name in source.leaves if re.match(r"fsdp(_config)?(\.|$)", name)]
    if source.given("deepspeed"):
        convert_file(source, "deepspeed")
    elif any(source.leaves[name] not in (None, [], "") for name in parts):
        fsdp_section(source, parts)
        return
    else:
        source.set("zero_stage", trainer.least_stage(source))
    for name in parts:
        source.leave(name, "there is no FSDP", why=Why.ignored)


def fsdp_section(source: Conversion, parts: list[str]) -> None:
    """Convert FSDP's section: how weights are sharded, offloaded and recomputed."""
    values = {name.rpartition(".")[2].removeprefix("fsdp_"): name for name in parts}
    names = [values[n] for n in ("sharding_strategy", "reshard_after_forward") if n in values]
    strategy = source.leaves.get(values.get("sharding_strategy", ""))
    if strategy is None and source.leaves.get(values.get("reshard_after_forward", "")) is False:
        strategy = "SHARD_GRAD_OP"
    offload = source.leaves.get(values.get("offload_params", "")) is True
    choose_engine(source, strategy, name=(names or parts)[0], to_host=offload, has_axes=True)
    used = {"sharding_strategy", "reshard_after_forward", "offload_params", "fsdp"}
    if source.leaves.get(values.get("activation_checkpointing", "")) is True:
        source.set("activation_checkpointing", "full", values["activation_checkpointing"])
        used.add("activation_checkpointing")
    for short, name in values.items():
        if short not in used:
            source.leave(name, "of torch's FSDP", why=Why.ignored)


def kernels(source: Conversion) -> None:
    """Convert kernels; what a plugin does is asked for by its own keys."""
    liger = ("liger_rope", "liger_rms_norm", "liger_glu_activation", "liger_layer_norm")
    if any(source.is_on(name) for name in liger):
        source.set("kernels.liger", True, *liger)
    fused, chunked = (
        "liger_fused_linear_cross_entropy",
        ("cut_cross_entropy", "chunked_cross_entropy"),
    )
    if source.is_on(fused):
        source.set("kernels.cross_entropy", "liger_fused", fused)
    elif any(source.is_on(name) for name in chunked):
        source.set("kernels.cross_entropy", "chunked", *chunked)
    tiles = source.number("tiled_mlp_num_shards")
    if source.is_on("tiled_mlp") and tiles and tiles >= 1:
        source.set("kernels.mlp_tiles", int(tiles), "tiled_mlp_num_shards")
    elif source.is_on("tiled_mlp"):
        source.leave("tiled_mlp", "the number of tiles is a key", "kernels.mlp_tiles=4")
    if source.is_on("deepcompile"):
        source.set("kernels.compile", "deepcompile", "deepcompile")
    elif source.get("torch_compile") in (True, "auto"):
        source.set("kernels.compile", "blocks", "torch_compile")
    others = [
        each
        for each in source.texts("plugins")
        if not re.search(r"liger|cut_cross_entropy|kernels|llm_compressor|lm_eval", each)
    ]
    if others:
        source.leave("plugins", value=others)


def saving(source: Conversion) -> None:
    """Convert the intervals between checkpoints; epochs have no counterpart."""
    strategy = "steps" if source.get("save_steps") else source.get("save_strategy") or "epoch"
    if source.given("saves_per_epoch"):
        source.leave("saves_per_epoch")
        strategy = "steps" if strategy == "steps" else "none"
    trainer.convert_saving(source, str(strategy))


def evaluation(source: Conversion) -> None:
    """Convert the intervals between evaluations; epochs have no counterpart."""
    has_data = source.number("val_set_size") or source.document.get("test_datasets")
    names = ("eval_steps", "evals_per_epoch", "eval_strategy")
    if not has_data:
        source.ignore("there is no held-out data", *names)
        return
    if source.given("evals_per_epoch"):
        source.leave("evals_per_epoch")
    strategy = "steps" if source.get("eval_steps") else source.get("eval_strategy") or "end"
    trainer.convert_evaluation(source, str(strategy))


def held_out(source: Conversion) -> None:
    """Convert the share of the data that is held out."""
    has_files = bool(source.document.get("test_datasets"))
    trainer.convert_held_out(source, "val_set_size", has_files=has_files)


def datasets(source: Conversion) -> None:
    """Convert what is trained on: files, their form, and the template of conversations."""
    records = RECORDS.get(source.converted.choices["objective"])
    parts = [
        _data_part(source, f"{name}[{index}].", entry, records=records)
        for name in ("datasets", "pretraining_dataset")
        for index, entry in enumerate(_entries(source, name))
    ]
    for index, entry in enumerate(_entries(source, "test_datasets")):
        part = _data_part(source, f"test_datasets[{index}].", entry, records=records)
        for each in parts[:1]:
            each.held_out += part.paths
    learn = "all" if source.is_on("train_on_inputs") else "assistant"
    for part in parts:
        if part.kind == "chat":
            part.keys.setdefault("learn", learn)
    choose_data(source, parts, epochs="num_epochs")
    _template(source)
    how = {"drop": "drop", "truncate": "cut", "raise": "error"}
    strategy = str(source.get("excess_length_strategy"))
    if records and strategy == "truncate":
        strategy = "drop"
    if any(part.kind in ("chat", records) for part in parts):
        source.set("data.on_too_long", how.get(strategy, "drop"), "excess_length_strategy")
    if not source.is_on("sample_packing") and not records:
        source.leave("sample_packing", value=False)


def _entries(source: Conversion, name: str) -> list[Mapping[str, Any]]:
    listed = source.document.get(name)
    listed = listed if isinstance(listed, list) else []
    return [each for each in listed if isinstance(each, Mapping)]


def _data_part(
    source: Conversion, prefix: str, entry: Mapping[str, Any], *, records: str | None
) -> DataPart:
    """Return an entry of `datasets`; its keys that are not carried over are left out.

    Args:
        records: Kind of its data if an objective of records is trained.
    """
    part = DataPart(kind="chat")
    kind = str(entry.get("type") or "")
    part.paths = place(source, entry.get("path"), entry.get("data_files"), entry.get("revision"))
    used = {"path", "data_files", "type", "ds_type", "revision"}
    if records:
        part.kind = records
    elif kind.startswith("completion") or kind == "pretrain" or prefix.startswith("pretraining"):
        part.kind = "files"
        column = "text_column" if entry.get("text_column") else "field"
        part.keys["text_key"] = str(entry.get(column) or "text")
        used |= {"field", "text_column"}
    elif "alpaca" in kind:
        part.keys["shape"] = "alpaca"
        source.leave(
            f"{prefix}type",
            "an instruction is the user's message in the tokenizer's chat template",
            "data.chat_template=FILE",
        )
    elif not kind.startswith(("chat_template", "sharegpt")) and kind:
        source.leave(
            f"{prefix}type", f"there is no format {kind[:40]}", "data.shape, or data.factory"
        )
    _chat_keys(source, part, prefix, entry, used)
    for key in source.leaves:
        name = key.removeprefix(prefix)
        if key.startswith(prefix) and name.partition(".")[0] not in used:
            _leave_of_dataset(source, key, name)
    return part


FIELDS = {"messages": "messages", "conversations": "sharegpt", "conversation": "sharegpt"}
"""Shapes of `data=chat` by the record's key with the turns."""


def _chat_keys(
    source: Conversion, part: DataPart, prefix: str, entry: Mapping[str, Any], used: set[str]
) -> None:
    """Convert the names of a conversation's keys, and which turns are learnt."""
    if part.kind != "chat":
        return
    field = entry.get("field_messages")
    if isinstance(field, str) and field in FIELDS and "conversations" not in (field, ""):
        part.keys.setdefault("shape", FIELDS[field])
    columns = {"messages": field} if isinstance(field, str) and field not in FIELDS else {}
    mapped = entry.get("message_property_mappings")
    mapped = dict(mapped) if isinstance(mapped, Mapping) else {}
    for name in ("role", "content"):
        own = mapped.get(name, entry.get(f"message_field_{name}"))
        if isinstance(own, str) and (name, own) not in KNOWN_MAPPINGS:
            columns[name] = own
            used |= {"message_property_mappings", f"message_field_{name}"}
    if columns:
        part.keys["columns"] = columns
    used |= {"field_messages"} if field is None or isinstance(field, str) else set()
    if isinstance(entry.get("message_field_training"), str):
        part.keys["learn_key"] = str(entry["message_field_training"])
        used.add("message_field_training")
    roles = entry.get("roles_to_train")
    if roles in (["assistant"], ["gpt"], ["assistant", "gpt"], None):
        used.add("roles_to_train")
    elif isinstance(roles, list) and {"user", "human"} & {*map(str, roles)}:
        part.keys["learn"] = "all"
        used.add("roles_to_train")


KNOWN_MAPPINGS = {("role", "from"), ("content", "value"), ("role", "role"), ("content", "content")}
"""Names in a turn that are read without being told."""


AS_IT_IS = (("split", "train"), ("field_chosen", "chosen"), ("field_rejected", "rejected"))
"""Keys of a dataset with the values that files are read with."""


def _leave_of_dataset(source: Conversion, key: str, name: str) -> None:
    """Leave a key of a dataset out, with the reason; or note that it is read in any case."""
    value = source.leaves[key]
    last = name.rpartition(".")[2]
    if value is None or (name, value) in AS_IT_IS:
        source.leave(key, "all of it is read", why=Why.ignored)
    elif name in ("message_field_role", "message_field_content") or "mappings" in name:
        plain = last.removeprefix("message_field_")
        if (plain, str(value)) in KNOWN_MAPPINGS:
            source.leave(key, "turns are read with either name", why=Why.ignored)
        else:
            source.leave(key, "turns have role and content, or from and value", "data.factory")
    elif name.startswith("roles."):
        source.leave(key, "these roles have these names", why=Why.ignored)
    else:
        reason, nearest = LEFT_OF_DATASETS.get(name.partition(".")[0], ("there is no such key", ""))
        source.leave(key, reason, nearest)


LEFT_OF_DATASETS = {
    "split": (
        "files are read whole",
        "data.max_bytes=100000000, or the split's files in data.paths",
    ),
    "name": ("a configuration of a dataset is a folder of its files", "data.paths"),
    "field_messages": ("the turns are under messages or conversations", "data.factory"),
    "field_chosen": ("the answers are under chosen and rejected", "data.factory"),
    "field_rejected": ("the answers are under chosen and rejected", "data.factory"),
    "field_thinking": ("a reasoning is a part of the message", "data.template_arguments"),
    "template_thinking_key": ("a reasoning is a part of the message", "data.template_arguments"),
    "chat_template": ("one template is of all data", "data.chat_template=FILE"),
    "chat_template_jinja": ("one template is of all data", "data.chat_template=FILE"),
    "drop_system_message": ("system messages stay", "data.factory"),
    "train_on_eos": ("the end of a learnt turn is learnt", ""),
    "train_on_eot": ("the end of a learnt turn is learnt", ""),
    "roles_to_train": ("assistant's turns are learnt, or all", "data.learn=all"),
    "shards": ("all files are read", "data.paths"),
}
"""Reasons, each with the nearest, for keys of a dataset."""


def _template(source: Conversion) -> None:
    """Convert the chat template, which is the tokenizer's own unless a file is named."""
    named, text = source.get("chat_template"), source.get("chat_template_jinja")
    own = "the template is the tokenizer's own"
    if named == "tokenizer_default":
        source.leave("chat_template", own, why=Why.ignored)
    elif named == "jinja":
        source.leave("chat_template", "chat_template_jinja says it", why=Why.ignored)
    elif source.given("chat_template"):
        source.leave("chat_template", own, "data.chat_template=FILE")
    if isinstance(text, str) and "{" not in text:
        source.set("data.chat_template", text, "chat_template_jinja")
    elif source.given("chat_template_jinja"):
        source.leave("chat_template_jinja", "a template is a file", "data.chat_template=FILE")
    if isinstance(source.get("chat_template_kwargs"), Mapping):
        source.set(
            "data.template_arguments", source.get("chat_template_kwargs"), "chat_template_kwargs"
        )


def trackers(source: Conversion) -> None:
    """Convert the loggers and their projects."""
    wanted = {
        "wandb": source.is_on("use_wandb") or bool(source.get("wandb_project")),
        "tensorboard": source.is_on("use_tensorboard"),
        "mlflow": source.is_on("use_mlflow"),
        "trackio": source.is_on("use_trackio") or bool(source.get("trackio_project_name")),
    }
    if source.get("wandb_mode") == "disabled":
        wanted["wandb"] = False
    names = [name for name, is_wanted in wanted.items() if is_wanted]
    source.set("logging.to", names)
    projects = {
        "wandb_project": "logging.wandb.project",
        "wandb_entity": "logging.wandb.entity",
        "mlflow_tracking_uri": "logging.mlflow.tracking_uri",
        "mlflow_experiment_name": "logging.mlflow.experiment",
        "trackio_project_name": "logging.trackio.project",
    }
    for theirs, ours in projects.items():
        if ours.split(".")[1] not in names:
            source.ignore("its logger is not used", theirs)
        elif source.given(theirs):
            source.set(ours, str(source.get(theirs)), theirs)
    if source.get("wandb_mode") == "offline" and "wandb" in names:
        source.set("logging.wandb.mode", "offline", "wandb_mode")
    for name in ("use_comet", "use_swanlab", "use_otel_metrics"):
        if source.is_on(name):
            nearest = "prometheus" if "otel" in name else "wandb"
            source.leave(name, "there is no such logger", f"logging.to=[{nearest}]")


def profiler(source: Conversion) -> None:
    """Convert the profiled steps, counted from 0 there and from 1 here."""
    steps, first = source.number("profiler_steps"), source.number("profiler_steps_start") or 0
    if steps and steps >= 1:
        begin, end = int(first) + 1, int(first) + int(steps)
        source.set("logging.profile_steps", [begin, end], "profiler_steps")
    else:
        source.ignore("of profiler_steps", "profiler_steps_start")
