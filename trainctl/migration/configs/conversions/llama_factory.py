"""LLaMA-Factory's keys that only together mean something here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainctl.config.reading import read_json
from trainctl.errors import TrainctlError
from trainctl.migration.configs.conversions import trainer
from trainctl.migration.configs.conversions.deepspeed import convert_file
from trainctl.migration.configs.conversions.sections import (
    DataPart,
    choose_data,
    choose_optimizer,
    join,
    place,
)
from trainctl.migration.configs.import_file import read_document
from trainctl.migration.configs.import_table import SIZES, Conversion
from trainctl.models.local_path import is_there

BASE = ("quantization_bit", "quantization_method", "quantization_type", "double_quantization")

LAST_NORM = r"(?:^|\.)(?:norm|ln_f|final_layernorm)\."


def method(source: Conversion) -> None:
    """Convert what is trained: an adapter, the last blocks, or all weights."""
    kind = str(source.get("finetuning_type"))
    source.set("adapter", "none", "finetuning_type")
    if kind == "lora":
        _lora(source)
        _base_weights(source)
    elif kind == "freeze":
        _frozen(source)
    elif kind != "full":
        source.leave("finetuning_type", f"there is no {kind}", "adapter=lora")
    for name in source.keys_of("llama_factory.method", but=["finetuning_type"]):
        if kind != ("freeze" if name.startswith("freeze_") else "lora"):
            source.ignore(f"of another finetuning_type than {kind}", name)


def _lora(source: Conversion) -> None:
    option = "dora" if source.is_on("use_dora") else "lora"
    if source.is_on("use_rslora"):
        if option == "dora":
            source.leave("use_rslora", "there is no adapter that does both", "adapter=rslora")
        else:
            option = "rslora"
    source.set("adapter", option, "finetuning_type")
    rank = source.number("lora_rank") or 8
    source.set("adapter.rank", int(rank), "lora_rank")
    source.set("adapter.alpha", float(source.number("lora_alpha") or 2 * rank), "lora_alpha")
    source.set("adapter.dropout", float(source.number("lora_dropout") or 0), "lora_dropout")
    targets = _names(source, "lora_target")
    trainer.set_targets(source, [] if targets == ["all"] else targets, "lora_target")
    if source.given("additional_target"):
        also = [
            trainer.ALSO_TRAINED.get(name, name) for name in _names(source, "additional_target")
        ]
        source.set("adapter.also_train", also, "additional_target")


def _names(source: Conversion, name: str) -> list[str]:
    """Return the names in a text with commas, or in a list."""
    texts = (part for text in source.texts(name) for part in text.split(","))
    return [text.strip() for text in texts if text.strip()]


def _base_weights(source: Conversion) -> None:
    """Convert the format of the frozen base."""
    bits, how = source.get("quantization_bit"), str(source.get("quantization_method")).lower()
    weights = "compute"
    if bits is None:
        source.ignore("of quantization_bit", *BASE)
    elif how not in ("bnb", "bitsandbytes"):
        source.leave("quantization_method", f"a base is not quantised by {how}", NF4)
    elif bits == 8:
        weights = "int8"
    elif bits == 4 and source.get("quantization_type") == "nf4":
        weights = "nf4_double" if source.get("double_quantization") is not False else "nf4"
    else:
        source.leave("quantization_bit", "a base has int8 or nf4", NF4)
    source.set("adapter.base_weights", weights, *BASE)


NF4 = "adapter.base_weights=nf4"


def _frozen(source: Conversion) -> None:
    """Convert the blocks that alone are trained: the last ones, if the number is positive."""
    blocks = int(source.number("freeze_trainable_layers") or 0)
    if blocks > 0:
        kept = [f"all_but_last_blocks:{blocks}", "head", LAST_NORM]
        source.set("training.freeze", kept, "freeze_trainable_layers")
    else:
        source.leave("freeze_trainable_layers")
    if _names(source, "freeze_trainable_modules") != ["all"]:
        source.leave("freeze_trainable_modules", "whole blocks are trained", "training.freeze")
    if source.given("freeze_extra_modules"):
        source.leave("freeze_extra_modules", "expressions name what is frozen", "training.freeze")


KTO = {"kto_chosen_weight": "desirable_weight", "kto_rejected_weight": "undesirable_weight"}


def stage(source: Conversion) -> None:
    """Convert the objective: of tokens, of single answers, or of pairs by `pref_loss`."""
    kind, loss = str(source.get("stage")), str(source.get("pref_loss"))
    beta = source.number("pref_beta") or 0.1
    if kind == "kto":
        source.set("objective", "kto", "stage")
        source.set("objective.beta", beta, "pref_beta")
        for name, key in KTO.items():
            source.set(f"objective.{key}", source.number(name), name)
    elif kind == "rm":
        source.set("objective", "reward", "stage")
    elif kind != "dpo":
        source.set("objective", "next_token", "stage")
        if kind not in ("sft", "pt"):
            nearest = "objective=grpo" if kind == "ppo" else "objective=dpo"
            source.leave("stage", f"there is no objective {kind}", nearest)
    elif loss == "orpo":
        source.set("objective", "orpo", "stage", "pref_loss")
        source.set("objective.weight", beta, "pref_beta")
    elif loss == "simpo":
        source.set("objective", "simpo", "stage", "pref_loss")
        source.set("objective.beta", beta, "pref_beta")
        gamma = source.number("simpo_gamma") or 0.0
        source.set("objective.gamma_ratio", gamma / beta, "simpo_gamma")
    else:
        source.set("objective", "dpo", "stage")
        source.set("objective.beta", beta, "pref_beta")
        if loss in ("sigmoid", "hinge", "ipo"):
            source.set("objective.loss", loss, "pref_loss")
        else:
            source.leave("pref_loss", f"there is no loss {loss}", "objective.loss=sigmoid")
        if loss == "sigmoid":
            smoothing = source.number("dpo_label_smoothing") or 0.0
            source.set("objective.label_smoothing", smoothing, "dpo_label_smoothing")
    unused = source.unused_keys_of("llama_factory.stage", but=["stage"])
    source.ignore(f"stage={kind} does not use it", *unused)


def data(source: Conversion) -> None:
    """Convert the datasets, by the entries that `dataset_info.json` has for their names."""
    pairs = dict.fromkeys(("dpo", "rm"), "preferences")
    kind = ({"pt": "files", "kto": "answers"} | pairs).get(str(source.get("stage")), "chat")
    info = _dataset_info(source)
    parts: dict[str, DataPart] = {}
    for key, names in (("paths", "dataset"), ("held_out", "eval_dataset")):
        for name in _names(source, names):
            columns = _columns(source, names, info.get(name), kind)
            part = parts.setdefault(str(columns), DataPart(kind=kind))
            part.keys |= {"columns": columns} if columns else {}
            getattr(part, key).extend(_places(source, info, name))
    used = [part for part in parts.values() if part.paths] or [DataPart(kind=kind)]
    for name in ("dataset", "eval_dataset"):
        absent = [each for each in _names(source, name) if not _places(source, info, each)]
        if absent:
            source.leave(name, value=absent)
    if kind == "chat":
        learn = "last" if source.is_on("mask_history") else "assistant"
        for part in used:
            part.keys["learn"] = "all" if source.is_on("train_on_prompt") else learn
            if source.given("enable_thinking"):
                part.keys["template_arguments"] = {"enable_thinking": source.get("enable_thinking")}
    else:
        source.ignore("of conversations", "mask_history", "train_on_prompt", "enable_thinking")
    if any(part.held_out and not part.paths for part in parts.values()):
        source.leave("eval_dataset", "its columns have other names", "data.held_out_paths=[FILE]")
    choose_data(source, used, epochs="num_train_epochs")
    source.set("data.on_too_long", "drop" if kind in ("preferences", "answers") else "cut")
    is_packed = source.get("packing")
    is_packed = kind == "files" if is_packed is None else is_packed is True
    if kind == "chat":
        is_whole = source.is_on("neat_packing") or not is_packed
        source.set("data.mask_documents", is_whole, "neat_packing", "packing")
    if kind == "chat" and not is_packed:
        source.leave("packing", value=False)


_NAMES = {
    "alpaca": {"prompt": "instruction", "query": "input", "response": "output"},
    "sharegpt": {"messages": "conversations"},
}
"""Names that records are read by, for the keys of `columns`; the others are equal."""
_SHARED = ("system", "history", "tools", "chosen", "rejected")
_TAGS = {"role_tag": "from", "content_tag": "value"}


def _columns(source: Conversion, names: str, entry: Any, kind: str) -> dict[str, str]:
    """Return `data.columns` of a dataset, by the `columns` and `tags` that its entry has."""
    if not isinstance(entry, Mapping) or kind == "files":
        return {}
    shape = str(entry.get("formatting") or "alpaca")
    read_by = _NAMES.get(shape, {}) | {each: each for each in _SHARED} | {"kto_tag": "label"}
    if kind != "chat":
        read_by |= {"prompt": "prompt", "messages": "prompt"}
        read_by |= {"response": "completion"} if kind == "answers" else {}
        read_by.pop("query", None)
    told = dict(entry["columns"]) if isinstance(entry.get("columns"), Mapping) else {}
    tags = dict(entry["tags"]) if isinstance(entry.get("tags"), Mapping) else {}
    defaults = {"prompt": "instruction", "response": "output"} if shape == "alpaca" else {}
    defaults |= {"kto_tag": "kto_tag"} if kind == "answers" and shape == "alpaca" else {}
    columns = {key: value for key, value in (defaults | told).items() if isinstance(value, str)}
    found = {read_by[key]: value for key, value in columns.items() if key in read_by}
    found |= {_TAGS[key]: str(value) for key, value in tags.items() if key in _TAGS}
    left = [*sorted({*told} - {*read_by}), *sorted({*tags} - {*_TAGS})]
    if left:
        source.leave(names, f"no counterpart of {', '.join(left)} of dataset_info.json")
    return {name: value for name, value in found.items() if name != value}


def _dataset_info(source: Conversion) -> Mapping[str, Any]:
    """Return the content of `dataset_info.json`; empty if it cannot be read."""
    path = source.locate(str(source.get("dataset_dir"))) / "dataset_info.json"
    try:
        info = read_json(path)
    except (OSError, ValueError):
        return {}
    return info if isinstance(info, Mapping) else {}


def _places(source: Conversion, info: Mapping[str, Any], name: str) -> list[str]:
    """Return the paths or URLs of a named dataset; empty if nothing says them."""
    entry = info.get(name)
    if not isinstance(entry, Mapping):
        return [name] if is_there(source.locate(name)) else []
    if entry.get("hf_hub_url"):
        return place(source, entry["hf_hub_url"])
    file = entry.get("file_name")
    return [join(str(source.get("dataset_dir")), file)] if isinstance(file, str) else []


def held_out(source: Conversion) -> None:
    """Convert the share of the data that is held out."""
    trainer.convert_held_out(source, "val_size", has_files=source.given("eval_dataset"))


def optimizer(source: Conversion) -> None:
    """Convert the name of the optimizer."""
    if source.is_on("use_muon"):
        source.set("optimizer", "muon", "use_muon")
        source.set("optimizer.matrix_lr", None)
        source.ignore("use_muon replaces it", "optim")
    else:
        choose_optimizer(source, "optim")


def precision(source: Conversion) -> None:
    """Convert the formats; `pure_bf16` has master weights and states of 16 bits too."""
    is_bf16 = source.is_on("bf16")
    if source.is_on("fp8"):
        source.set("precision", "fp8", "fp8")
    elif source.is_on("pure_bf16"):
        trainer.set_pure_bf16(source, "pure_bf16")
    elif is_bf16 or not source.is_on("fp16"):
        source.set("precision", "bf16" if is_bf16 else "fp32", "bf16")
    elif source.get("finetuning_type") == "lora":
        source.set("precision", "bf16")
        source.leave("fp16", "adapters are trained in bf16 or fp32", "precision=bf16")
    else:
        source.set("precision", "fp16", "fp16")


def recomputation(source: Conversion) -> None:
    """Convert recomputation, which is on unless it is disabled."""
    is_off = source.is_on("disable_gradient_checkpointing")
    names = (
        "disable_gradient_checkpointing",
        "activation_checkpointing",
        "fsdp_config.activation_checkpointing",
    )
    if not source.given("recompute_granularity"):
        source.set("activation_checkpointing", "none" if is_off else "full", *names)


def sharding(source: Conversion) -> None:
    """Convert DeepSpeed's JSON; without one, and without FSDP, all states are on every rank."""
    sizes = (source.converted.settings.get(size) for size in SIZES)
    is_megatron = source.given("use_distributed_optimizer") or any(sizes)
    if source.given("deepspeed"):
        convert_file(source, "deepspeed")
    elif not is_megatron and "zero_stage" not in source.converted.choices:
        source.set("zero_stage", trainer.least_stage(source))


def v1_data(source: Conversion) -> None:
    """Convert the data: a file or a name on the hub, or a YAML with an entry for each dataset."""
    trained = _v1_entries(source, "train_dataset")
    part = DataPart(kind="chat")
    if any(entry.get("converter") == "pair" for entry in trained):
        part.kind = "preferences"
        source.set("objective", "dpo", "train_dataset")
    for entry in trained:
        part.paths += place(source, entry.get("path"))
    for entry in _v1_entries(source, "eval_dataset"):
        part.held_out += place(source, entry.get("path"))
    choose_data(source, [part], epochs="num_train_epochs")


def _v1_entries(source: Conversion, name: str) -> list[Mapping[str, Any]]:
    """Return the entries of a description of data; keys that cut or weight them are left out."""
    if not source.given(name):
        return []
    value = str(source.get(name))
    if not value.endswith((".yaml", ".yml")):
        return [{"path": value}]
    try:
        described = read_document(source.locate(value))
    except TrainctlError:
        source.leave(name, "its description of data is not here", NEAREST_DATA[name])
        return []
    entries = [entry for entry in described.values() if isinstance(entry, Mapping)]
    cut = [key for entry in entries for key in ("split", "size", "weight") if key in entry]
    if cut:
        what = ", ".join(dict.fromkeys(cut))
        source.leave(name, f"files are read whole: no {what} of a dataset", "data.sources")
    return entries


NEAREST_DATA = {"train_dataset": "data.paths=[FILE]", "eval_dataset": "data.held_out_paths=[FILE]"}


def v1_batching(source: Conversion) -> None:
    """Convert how samples are put together, and the batch: one micro-batch a rank by default."""
    strategy = str(source.get("batching_strategy"))
    source.set("data.mask_documents", True, "batching_strategy")
    if "padding_free" not in strategy:
        source.leave("batching_strategy")
    total = source.number("global_batch_size")
    if total and total >= 1:
        source.set("training.global_batch_size", int(total), "global_batch_size")
    else:
        source.set("training.gradient_accumulation_steps", 1)


def v1_optimizer(source: Conversion) -> None:
    """Convert the optimizer: torch's AdamW, which decays all parameters, or Muon."""
    name, part = str(source.get("optim_config.name") or "adamw"), "optim_config."
    if name not in ("adamw", "muon"):
        source.leave("optim_config.name", f"there is no optimizer {name}", "optimizer=adamw")
    is_muon = name == "muon"
    source.set("optimizer", "muon" if is_muon else "adamw", "optim_config.name")
    decay = source.number(f"{part}wd")
    decay = (0.1 if is_muon else TORCH_DECAY) if decay is None else decay
    source.set("optimizer.weight_decay", decay, f"{part}wd")
    betas = source.get(f"{part}adamw_betas")
    betas = betas if isinstance(betas, list) and len(betas) == 2 and is_muon else None
    first, second = betas or ([0.9, 0.95] if is_muon else [0.9, 0.999])
    source.set("optimizer.beta1", first, f"{part}adamw_betas")
    source.set("optimizer.beta2", second, f"{part}adamw_betas")
    source.set("optimizer.epsilon", source.number(f"{part}adamw_eps") or 1e-8, f"{part}adamw_eps")
    if is_muon:
        source.set("optimizer.matrix_lr", None)
        momentum = source.number(f"{part}momentum")
        source.set("optimizer.momentum", 0.95 if momentum is None else momentum, f"{part}momentum")
    else:
        source.set("optimizer.groups", [{"match": ".", "weight_decay": decay}])
    source.set("schedule", "constant")
    source.set("schedule.warmup_fraction", 0.0)


TORCH_DECAY = 0.01
"""Weight decay of torch.optim.AdamW's default."""


def v1_method(source: Conversion) -> None:
    """Convert what is trained: an adapter, the last blocks, or all weights."""
    part, kind = "peft_config.", source.get("peft_config.name")
    source.set("adapter", "none")
    if kind == "lora":
        is_dora, is_rslora = (source.is_on(f"{part}use_{each}") for each in ("dora", "rslora"))
        option = "dora" if is_dora else "rslora" if is_rslora else "lora"
        source.set("adapter", option, f"{part}name")
        source.set("adapter.rank", int(source.number(f"{part}r") or 8), f"{part}r")
        alpha = float(source.number(f"{part}lora_alpha") or 16)
        source.set("adapter.alpha", alpha, f"{part}lora_alpha")
        dropout = float(source.number(f"{part}lora_dropout") or 0)
        source.set("adapter.dropout", dropout, f"{part}lora_dropout")
        targets = source.texts(f"{part}target_modules")
        targets = [] if targets == ["all"] else targets
        trainer.set_targets(source, targets, f"{part}target_modules")
        saved = source.texts(f"{part}modules_to_save")
        also = [trainer.ALSO_TRAINED.get(name, name) for name in saved]
        source.set("adapter.also_train", also, f"{part}modules_to_save")
        bits = source.get("quant_config.quantization_bit")
        weights = {4: "nf4_double", 8: "int8"}.get(bits if isinstance(bits, int) else 0, "compute")
        source.set("adapter.base_weights", weights, "quant_config.quantization_bit")
    elif kind == "freeze":
        blocks = int(source.number(f"{part}freeze_trainable_layers") or 2)
        kept = [f"all_but_last_blocks:{blocks}", "head", LAST_NORM]
        source.set("training.freeze", kept, f"{part}freeze_trainable_layers")
    elif kind is not None:
        source.leave(f"{part}name", f"there is no {kind}", "adapter=lora")


def v1_kernels(source: Conversion) -> None:
    """Convert the kernels: Liger's by their name; `auto` takes any of the same mathematics."""
    if "liger_kernel" in _names(source, "kernel_config.name"):
        source.set("kernels.liger", True, "kernel_config.name")


def v1_sharding(source: Conversion) -> None:
    """Convert DeepSpeed's JSON or FSDP2; without either all states are on every rank."""
    kind, part = source.get("dist_config.name"), "dist_config."
    if kind == "deepspeed" and source.given(f"{part}config_file"):
        convert_file(source, f"{part}config_file")
    elif kind in ("fsdp2", "fsdpturbo"):
        is_kept = source.get(f"{part}reshard_after_forward") is False
        source.set("zero_stage", "2" if is_kept else "3", f"{part}name")
        if source.is_on(f"{part}offload_params"):
            source.set("offload", "cpu" if is_kept else "cpu-all", f"{part}offload_params")
    else:
        source.set("zero_stage", trainer.least_stage(source), f"{part}name")
