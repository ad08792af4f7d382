"""Model, adapter, data and objective of TRL's configurations."""

from __future__ import annotations

import re
from collections.abc import Mapping
from itertools import islice
from pathlib import Path
from typing import Any

from trainctl.migration.configs.conversions import grpo, trainer
from trainctl.migration.configs.conversions.sections import FILE_ENDINGS, join
from trainctl.migration.configs.import_table import Conversion, is_number
from trainctl.migration.configs.result import Why
from trainctl.models.directory import is_hub_name
from trainctl.models.local_path import is_folder, is_there


def precision(source: Conversion) -> None:
    """Convert `bf16`, which TRL switches on unless `fp16` is, and the type of the weights."""
    bf16, fp16 = source.get("bf16"), source.get("fp16")
    weights = str(source.get("dtype")).removeprefix("torch.")
    if fp16 is True:
        source.set("precision", "fp16", "fp16")
    elif bf16 is not False:
        source.set("precision", "bf16", "bf16")
    elif weights in ("bfloat16", "bf16"):
        source.set("precision", "bf16-low-memory", "dtype")
    else:
        source.set("precision", "fp32", "bf16")
    is_low = source.converted.choices["precision"] == "bf16" and weights == "bfloat16"
    if is_low and not any(source.get(name) for name in ("deepspeed", "fsdp", "use_peft")):
        source.leave("dtype")


def offloading(source: Conversion) -> None:
    """Convert activations in host memory, which are the inputs of recomputed blocks here."""
    if source.is_on("activation_offloading"):
        source.set("activation_checkpointing", "offloaded", "activation_offloading")


TARGETS = ("lora_target_modules", "lora_target_parameters")


def adapter(source: Conversion) -> None:
    """Convert the adapter with the format of the frozen base."""
    if not source.is_on("use_peft"):
        source.set("adapter", "none", "use_peft")
        source.ignore("use_peft is off", *source.keys_of("trl.adapter", but=["use_peft"]))
        return
    switches = [name for name in ("use_dora", "use_rslora") if source.is_on(name)]
    source.set("adapter", switches[0].removeprefix("use_") if switches else "lora", "use_peft")
    if len(switches) > 1:
        source.leave("use_rslora", "no adapter does both", "adapter=rslora")
    source.set("adapter.rank", source.count("lora_r"), "lora_r")
    source.set("adapter.alpha", float(source.count("lora_alpha")), "lora_alpha")
    source.set("adapter.dropout", source.number("lora_dropout"), "lora_dropout")
    targets = source.texts("lora_target_modules")
    if targets == ["all-linear"]:
        targets = []
    elif not targets:
        source.leave("lora_target_modules")
    trainer.set_targets(source, trainer.with_experts(source, targets), *TARGETS)
    also = [trainer.ALSO_TRAINED.get(name, name) for name in source.texts("lora_modules_to_save")]
    source.set("adapter.also_train", also, "lora_modules_to_save")
    _base_weights(source)


def _base_weights(source: Conversion) -> None:
    names = ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "use_bnb_nested_quant")
    weights = "int8" if source.is_on("load_in_8bit") else "compute"
    if source.is_on("load_in_4bit"):
        weights = "nf4_double" if source.is_on("use_bnb_nested_quant") else "nf4"
        if source.get("bnb_4bit_quant_type") != "nf4":
            source.leave("bnb_4bit_quant_type", "4 bits are NF4", "adapter.base_weights=nf4")
    source.set("adapter.base_weights", weights, *names)


PAIRS = ("dpo", "orpo", "reward", "simpo")
RECORDS = {**dict.fromkeys(PAIRS, "preferences"), "grpo": "prompts", "kto": "answers"}
"""Kind of data for each objective that does not learn from conversations."""

PARQUET = "hf://datasets/{}@refs/convert/parquet/{}/{}/*.parquet"
"""Place of the Parquet files that the hub makes of each public data set, by configuration and split
(huggingface.co/docs/dataset-viewer/parquet).
"""


def data(source: Conversion) -> None:
    """Convert the data set or the mixture, with its evaluation split."""
    kind = RECORDS.get(str(source.converted.choices.get("objective")), "chat")
    source.set("data", kind)
    splits = source.texts("dataset_splits") or [
        str(source.get(f"dataset_{part}_split")) for part in ("train", "test")
    ]
    is_evaluated = str(source.get("eval_strategy")) not in ("no", "False")
    parts = _parts(source, splits[0])
    if all(share == 1 for _, _, _, share in parts):
        if parts:
            paths = [each for *place, _ in parts for each in places_of(source, *place)]
            source.set("data.paths", paths, "dataset_name")
    else:
        _mixture(source, kind, parts)
    names = {name: configuration for name, configuration, _, _ in parts}
    if parts and is_evaluated and len(splits) > 1 and not source.given("dataset_mixture"):
        held_out = [each for it in names.items() for each in places_of(source, *it, splits[1])]
        source.set("data.held_out_paths", held_out, "dataset_name")
    if source.given("dataset_text_field"):
        is_same = source.get("dataset_text_field") in ("text", "messages")
        source.leave("dataset_text_field", why=Why.ignored if is_same else Why.left)


Part = tuple[str, str, str, float]
"""Name of a data set, its configuration and split, and the share of it that is taken."""


def _parts(source: Conversion, split: str) -> list[Part]:
    """Return the data sets that are named: one, or those of a mixture."""
    configuration = str(source.get("dataset_config") or "default")
    mixture, shares = source.get("dataset_mixture"), source.get("dataset_mixer")
    if isinstance(mixture, Mapping):
        entries = mixture.get("datasets")
        size: Any = mixture.get("test_split_size")
        if is_number(size) and 0 < size < 1:
            source.set("data.held_out_fraction", size, "dataset_mixture")
        elif size is not None:
            source.leave("dataset_mixture", value={"test_split_size": size})
        return [_part(each) for each in entries or [] if isinstance(each, Mapping)]
    if isinstance(shares, Mapping):
        return [(str(name), configuration, split, share) for name, share in shares.items()]
    listed = source.get("datasets")
    if isinstance(listed, list):
        return [_part(each) for each in listed if isinstance(each, Mapping)]
    return [(name, configuration, split, 1.0) for name in source.texts("dataset_name") if name]


def _part(entry: Mapping[str, Any]) -> Part:
    name = entry.get("id", entry.get("path"))
    share = entry.get("weight", entry.get("fraction"))
    configuration = entry.get("config", entry.get("name"))
    split = str(entry.get("split") or "train")
    return str(name), str(configuration or "default"), split, 1.0 if share is None else share


def places_of(source: Conversion, name: str, configuration: str, split: str) -> list[str]:
    """Return where a split of a data set lies: its files in a folder, the folder or file if nothing
    there is named by a split, or the Parquet files of the hub.
    """
    found = source.locate(name)
    if is_folder(found):
        files = [each for each in _data_files(found) if each.suffix in FILE_ENDINGS]
        words = SPLITS.get(split, (split,))
        named = [join(name, str(each)) for each in files if {*words} & {*_words_of(each)}]
        return named or [name]
    is_local = is_there(found) or not is_hub_name(name)
    return [name if is_local else PARQUET.format(name, configuration, split)]


SPLITS = {
    "train": ("train", "training"),
    "test": ("test", "testing", "eval", "evaluation"),
    "validation": ("validation", "valid", "dev", "val"),
}
"""Words in the names of a split's files and folders (datasets, data_files.py)."""


def _data_files(folder: Path) -> list[Path]:
    """Return the paths in a folder and in its folders, relative to it."""
    found = (each for pattern in ("*", "*/*") for each in folder.glob(pattern))
    return sorted(each.relative_to(folder) for each in islice(found, MOST_FILES))


MOST_FILES = 10_000


def _words_of(path: Path) -> list[str]:
    return re.split(r"[^a-z0-9]+", str(path).lower())


def _mixture(source: Conversion, kind: str, parts: list[Part]) -> None:
    """Convert shares of data sets: each is passed over so many times in the run."""
    passes = source.number("num_train_epochs") or 1.0
    sources = {
        f"part_{number}": {
            "kind": kind,
            "paths": places_of(source, name, configuration, split),
            "epochs": round(float(share) * passes, 6),
        }
        for number, (name, configuration, split, share) in enumerate(parts, 1)
        if is_number(share)
    }
    source.set("data.sources", sources, "dataset_mixer")


def length(source: Conversion) -> None:
    """Convert the length of the run, which passes of a mixture's sources do not tell."""
    trainer.length(source)
    settings = source.converted.settings
    if "data.sources" in settings and settings.pop("training.epochs", None) is not None:
        source.leave("num_train_epochs")


def template(source: Conversion) -> None:
    """Convert the chat template: a file, or the text of one, which must become a file."""
    path, text = source.get("chat_template_path"), source.get("chat_template")
    if path is not None and str(path).endswith((".jinja", ".j2")):
        source.set("data.chat_template", str(path), "chat_template_path")
    elif path is not None:
        source.leave("chat_template_path")
    if text is not None:
        source.leave("chat_template", value=f"{str(text)[:40]}…")


def packing(source: Conversion) -> None:
    """Convert the packing; without it each conversation is padded there, and packed here."""
    if source.is_on("packing"):
        kind = "stream" if source.get("packing_strategy") == "wrapped" else "best_fit"
        source.set("data.packing", kind, "packing", "packing_strategy")
        return
    if source.converted.choices.get("objective") not in RECORDS:  # a record is a sample by itself
        reason = "samples are always packed, so that a step sees more conversations"
        source.leave("packing", reason, "training.micro_batch_size=1")
    source.ignore("records are not packed, or nothing is", "packing", "packing_strategy")


def learnt(source: Conversion) -> None:
    """Convert which tokens are learnt: all, or those of the assistant."""
    names = ("assistant_only_loss", "completion_only_loss")
    if source.converted.choices.get("data") != "chat":
        source.ignore("of conversations", *names)
    else:
        is_part = any(source.is_on(name) for name in names)
        source.set("data.learn", "assistant" if is_part else "all", *names)


CLASSES = {
    "DPOConfig": "dpo",
    "GKDConfig": "distill",
    "GRPOConfig": "grpo",
    "KTOConfig": "kto",
    "ORPOConfig": "orpo",
    "RLOOConfig": "grpo",
    "RewardConfig": "reward",
    "SFTConfig": "next_token",
}
"""Objective of each class that a pickle names."""

TELLING = {
    "teacher_model_name_or_path": "distill",
    "reward_funcs": "grpo",
    "num_generations": "grpo",
    "epsilon_high": "grpo",
    "scale_rewards": "grpo",
    "center_rewards_coefficient": "reward",
    "desirable_weight": "kto",
    "undesirable_weight": "kto",
    "beta": "dpo",
}
"""Objective that a key belongs to, where no class is named; the first key that is given counts."""

CENTERING = "center_rewards_coefficient"
LOSSES = ("sigmoid", "hinge", "ipo")


def objective(source: Conversion) -> None:
    """Convert the objective: by the class of a pickle, or by the keys that only it has."""
    losses = source.texts("loss_type")
    kind = CLASSES.get(str(source.get("class")).rpartition(".")[2])
    if kind is None and {"kto", "simpo"} & {*losses}:
        kind = "kto" if "kto" in losses else "simpo"
    kind = kind or next((TELLING[each] for each in TELLING if source.given(each)), "next_token")
    telling = next(filter(source.given, ("class", *TELLING)), "class")
    source.set("objective", kind, telling)
    beta = source.number("beta")
    if kind in ("dpo", "simpo", "kto") and beta:
        source.set("objective.beta", beta, "beta")
    if kind == "dpo":
        _dpo_loss(source, losses)
    elif kind == "distill":
        trainer.convert_teacher(source, "teacher_model_name_or_path", "beta", default_beta=0.5)
    elif kind == "grpo":
        is_alone = source.is_on("use_peft") and not source.texts("lora_modules_to_save")
        grpo.set_kl_weight(source, beta or 0.0, "beta", has_reference=is_alone)
    elif kind == "reward" and source.given(CENTERING):
        source.set("objective.centering", source.number(CENTERING), CENTERING)
    elif kind == "orpo":
        source.set("objective.weight", beta or 0.1, "beta")
    elif kind == "simpo":
        ratio = (source.number("simpo_gamma") or 0.0) / (beta or 0.1)
        source.set("objective.gamma_ratio", ratio, "simpo_gamma")
    elif kind == "kto":
        for name in filter(source.given, ("desirable_weight", "undesirable_weight")):
            source.set(f"objective.{name}", source.number(name), name)
    used = {"class", "teacher_model_name_or_path"}
    if kind in ("grpo", "simpo") or (kind, losses) == ("kto", ["kto"]):
        used.add("loss_type")  # GRPO's is converted with the sampling; others name the objective
    for name in source.unused_keys_of("trl.objective", but=used):
        why = Why.ignored if source.get(name) in ("nll", 0) else Why.left
        source.leave(name, f"objective={kind} has none", why=why)


def _dpo_loss(source: Conversion, losses: list[str]) -> None:
    known = [loss for loss in losses if loss in LOSSES]
    if losses and (len(losses) > 1 or not known):
        source.leave(
            "loss_type", f"there is no loss {' and '.join(losses)}", "objective.loss=sigmoid"
        )
    source.set("objective.loss", known[0] if known else "sigmoid", "loss_type")
    smoothing = source.number("label_smoothing")
    if smoothing is not None:
        source.set("objective.label_smoothing", smoothing, "label_smoothing")
